"""Devices: how long a model's step computes, as c0 + c1 x batch, with source and confidence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imagenet_fast.cost_model.layer_profile import Profile, load_profile
from imagenet_fast.errors import UserError

Kind = Literal["measured", "published", "fitted", "assumed"]
Model = Literal["alexnet", "alexnet_bn", "resnet18", "resnet50"]

PROFILES: dict[str, str] = {
    "alexnet": "alexnet", "alexnet_bn": "alexnet", "resnet50": "resnet50", "resnet18": "resnet18",
}  # fmt: skip
"""The layer profile that gives a model's layers their shares of a step; AlexNet's norms have no parameters.

None of ``resnet18`` is shipped: it comes with a profile that `bench profile` recorded on the device.
"""
PIXELS = 224
"""Side of the images for which devices are described. If others differ by more than 8, time is scaled by their area."""


@dataclass(frozen=True)
class Compute:
    """The milliseconds of a step without any synchronisation: ``c0`` + ``c1`` x batch."""

    c0: float
    c1: float
    kind: Kind
    source: str

    def seconds(self, batch: int, pixels: int = PIXELS) -> float:
        """Return the seconds of a step of ``batch`` images with sides of ``pixels``."""
        area = 1.0 if abs(pixels - PIXELS) <= 8 else (pixels / PIXELS) ** 2
        return (self.c0 + self.c1 * batch * area) / 1e3


@dataclass(frozen=True)
class Device:
    """A GPU, or what stands in for one."""

    name: str
    memory_gb: float | None
    computes: dict[str, tuple[Compute, ...]]
    """By the name of a layer profile; the first is used, others are shown beside it."""
    on_gpu: bool = True
    scale: int = 1
    """Only this fraction (1/N) of each gradient is sent."""
    profile: Profile | None = None
    """A recorded layer profile instead of a shipped one."""

    def compute(self, model: str) -> tuple[Compute, ...]:
        """Return what is known about ``model``.

        Raises:
            UserError: The model has no layer profile, or this device was not timed with it.
        """
        layers = PROFILES.get(model)
        if layers is None:
            raise UserError(f"plan cannot predict {model}, only {', '.join(PROFILES)}; take a recipe of one of these")
        if layers not in self.computes:
            known = ", ".join(name for name, profile in PROFILES.items() if profile in self.computes)
            raise UserError(
                f"device {self.name} has no step times of {model}, only of {known}; record some there by "
                f"`imagenet-fast bench profile FILE --model {model}` and name that file as the cluster's device"
            )
        return self.computes[layers]

    def layers(self, model: str) -> Profile:
        """Return the layers of ``model`` with their shares of a step."""
        found = self.profile or load_profile(PROFILES[model])
        return found.downscaled(self.scale) if self.scale > 1 else found


_LOGS = "solved from MLPerf logs of 1 and 8 nodes, less the model's messages and stragglers"
_SAME = "solved from MLPerf v3.0 logs of 2 and 8 nodes that ran one network, less the model's messages and stragglers"
_LIKE_A100 = "3.6 ms a step that do not depend on the batch, as A100 has, are assumed"
V100_C0 = 7.6
"""Milliseconds of ResNet-50 on a V100 that do not depend on the batch: A100's 3.63, times 2.09.

No log of few GPUs has small batches on V100. But NVIDIA timed the same MXNet code on one GPU in inference, in 16 bits,
at 32, 64 and 128 images: 11.02, 19.78 and 38.06 ms on V100, and 4.70, 8.36 and 15.96 ms on A100. Lines through them
begin at 1.88 and 0.90 ms.
"""
_C0 = f"its {V100_C0} ms follow from A100's by NVIDIA's inference tables"

DEVICES = {
    device.name: device
    for device in (
        Device("v100", 16, {
            "resnet50": (Compute(V100_C0, 0.6872, "published", f"NVIDIA: 1376 images/s at 192; {_C0}"),),
            "alexnet": (
                Compute(0.0, 38.8 / 128, "published", "implied by GradientFlow's result on 512 GPUs; circular"),
                Compute(0.0, 18.0 / 128, "assumed", "by FLOPs: 16 to 20 ms at 128"),
            ),
        }),
        Device("v100-dgx1", 16, {
            "resnet50": (Compute(V100_C0, 0.666, "fitted", f"to the MLPerf v0.6 log of one DGX-1; {_C0}"),),
        }),
        Device("v100-dgx2h", 32, {
            "resnet50": (Compute(V100_C0, 0.6015, "fitted", f"to the MLPerf v0.6 log of one DGX-2H (16 GPUs); {_C0}"),),
        }),
        Device("a100", 40, {"resnet50": (Compute(3.63, 0.2892, "fitted", f"{_LOGS} (DGX-A100, v1.1)"),)}),
        Device("h100", 80, {"resnet50": (Compute(2.86, 0.1468, "fitted", _SAME),)}),
        Device("rtx-a5000", 24, {
            "resnet50": (Compute(3.6, 0.742, "published", f"MLPerf: two cards, 35 epochs in 284 min; {_LIKE_A100}"),),
        }),
        Device("cpu-replay", None, {
            "alexnet": (Compute(0.0, 1409 / 128, "measured", "layers that sleep 1.409 s for a batch of 128"),),
            "resnet50": (Compute(0.0, 1533 / 128, "measured", "layers that sleep 1.533 s for a batch of 128"),),
        }, on_gpu=False, scale=4),
    )
}  # fmt: skip
"""The devices that a cluster can name."""


def find_device(name: str, batch: int | None) -> Device:
    """Return a device by its name, or one made of a recorded layer profile.

    Args:
        name: A name, or the path of a .json file.
        batch: Images of a step in that file.

    Raises:
        UserError: There is no such device, the file is no profile, or its batch is not said.
    """
    if not name.endswith(".json"):
        if name not in DEVICES:
            raise UserError(
                f"device {name!r} is not known; there are {', '.join(DEVICES)}, or give a layer profile's .json"
            )
        return DEVICES[name]
    try:
        profile = load_profile(name)
    except UserError as error:
        raise UserError(f"device: {error}") from None
    if batch is None:
        raise UserError(f"device {name} is a layer profile; write the images of its step as device_batch")
    layers = PROFILES.get(profile.model)
    if layers is None:
        raise UserError(
            f"device {name} is a profile of {profile.model}, which no prediction knows; record another model"
        )
    each_ms = 1e3 * profile.compute_s / batch * (PIXELS / profile.pixels) ** 2
    times = Compute(0.0, each_ms, "measured", profile.source)
    return Device(Path(name).stem, None, {layers: (times,)}, profile=profile)
