"""Devices: how long a model's step computes, and by which program, with source and confidence."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from imagenet_fast.cost_model.layer_profile import Profile, load_profile
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.load import read_toml, validated

Kind = Literal["measured", "published", "fitted", "assumed"]
Pace = Literal["launched", "replayed", "published"]
"""Whose steps: this program's, launched by the host or replayed from a CUDA graph, or those that were published."""


class Known(NamedTuple):
    """A model's layer profile, by which its layers share a step, and what an image of 224 pixels in 16 bits keeps."""

    layers: str
    activation_mb: float


MODELS = {
    "alexnet": Known("alexnet", 3.0), "alexnet_bn": Known("alexnet", 4.0), "resnet50": Known("resnet50", 57.0),
    "resnet18": Known("resnet18", 11.0),
}  # fmt: skip
"""The models that are predicted. ResNet-50's and AlexNet-BN's activations were counted from the tensors that autograd
saves; the others are estimates. ResNet-18 comes with a profile that `bench profile` recorded on the device."""
PIXELS = 224
"""Side of the images for which devices are described. If others differ by more than 8, time is scaled by their area."""


class Compute(Table):
    """The milliseconds of a step without any synchronisation: ``c0`` + ``c1`` x batch, and at least ``host``."""

    c0: float
    c1: float
    kind: Kind
    source: str
    host: float = 0.0
    """Milliseconds in which the host starts the kernels of a step."""

    def seconds(self, batch: int, pixels: int = PIXELS) -> float:
        """Return the seconds of a step of ``batch`` images with sides of ``pixels``."""
        area = 1.0 if abs(pixels - PIXELS) <= 8 else (pixels / PIXELS) ** 2
        return max(self.host, self.c0 + self.c1 * batch * area) / 1e3


class Device(Table):
    """A GPU, or what stands in for one."""

    name: str
    computes: dict[str, Compute]
    """Published compute times of a model, by the name of its layer profile."""
    pace: Pace = "published"
    memory_gb: float | None = None
    on_gpu: bool = True
    scale: int = 1
    """Only this fraction (1/N) of each gradient is sent."""
    profile: Profile | None = None
    """A recorded layer profile instead of a shipped one."""

    def compute(self, model: str) -> Compute:
        """Return what is known about ``model``.

        Raises:
            UserError: The model has no layer profile, or this device was not timed with it.
        """
        if model not in MODELS:
            raise UserError(f"plan cannot predict {model}, only {', '.join(MODELS)}; take a recipe of one of these")
        layers = MODELS[model].layers
        if (published := self.computes.get(layers)) is None:
            known = ", ".join(name for name, its in MODELS.items() if its.layers in self.computes)
            raise UserError(
                f"device {self.name} has no step times of {model}, only of {known}; record some there by "
                f"`imagenet-fast bench profile FILE --model {model}` and name that file as the cluster's device"
            )
        if self.pace == "published" or not self.on_gpu or self.profile is not None:
            return published
        ratio = _PACES[self.pace][layers]
        times, measured_on = ratio["times"], ratio["measured_on"]
        where = "as measured" if self.name in measured_on else f"as on {' and '.join(measured_on) or 'others'}"
        return Compute(
            c0=times * published.c0, c1=times * published.c1, host=ratio["host"],
            kind="measured" if self.name in measured_on else "assumed",
            source=f"this program, {self.pace}: {times:.3g} times the published, {where}; {published.source}",
        )  # fmt: skip

    def layers(self, model: str) -> Profile:
        """Return the layers of ``model`` with their shares of a step."""
        return self.profile or _shipped(MODELS[model].layers, self.scale)


@cache
def _shipped(name: str, scale: int) -> Profile:
    """Return a shipped profile of which 1/``scale`` of each gradient is sent."""
    return load_profile(name).downscaled(scale)


_TABLES = read_toml(Path(__file__).with_name("devices.toml"))
_PACES = _TABLES.pop("paces")
DEVICES = {name: validated(Device, name, {"name": name} | table) for name, table in _TABLES.items()}
"""The devices that a cluster can name."""


def device_of(card: str) -> Device | None:
    """Return the device that the driver calls ``card``, with steps of this program, or None if it is not known."""
    words = set(re.split(r"[^a-z0-9]+", card.lower()))
    name = next((name for name in DEVICES if words >= set(name.split("-"))), None)
    return None if name is None else find_device(name, None, "launched")


@cache
def find_device(name: str, batch: int | None, pace: Pace) -> Device:
    """Return a device by its name, or one made of a recorded layer profile.

    Args:
        name: A name, or the path of a .json file.
        batch: Images of a step in that file, if it does not say.
        pace: Whose steps it has; a layer profile's are those that were recorded.

    Raises:
        UserError: There is no such device, the file is no profile, or its batch is not said.
    """
    if not name.endswith(".json"):
        if name in DEVICES:
            return DEVICES[name].model_copy(update={"pace": pace})
        raise UserError(
            f"device {name!r} is not known; there are {', '.join(DEVICES)}, or give a layer profile's .json"
        )
    profile = load_profile(name)
    if (images := profile.batch or batch) is None:
        raise UserError(f"device {name} is a layer profile; write the images of its step as device_batch")
    if profile.model not in MODELS:
        raise UserError(
            f"device {name} is a profile of {profile.model}, which no prediction knows; record another model"
        )
    fixed_ms = 1e3 * profile.fixed * profile.compute_s
    each_ms = (1e3 * profile.compute_s - fixed_ms) / images * (PIXELS / profile.pixels) ** 2
    times = Compute(c0=fixed_ms, c1=each_ms, kind="measured", source=profile.source)
    known = {MODELS[profile.model].layers: times}
    return Device(name=Path(name).stem, computes=known, memory_gb=profile.memory_gb, profile=profile)
