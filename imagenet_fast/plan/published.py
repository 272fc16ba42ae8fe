"""Published steps and efficiencies, and steps measured between shaped hosts, with the inputs that predict them."""

from __future__ import annotations

from dataclasses import dataclass

from imagenet_fast.plan.devices import DEVICES, V100_C0, Compute
from imagenet_fast.recipe.sync_config import (
    AllReduceSync,
    DdpSync,
    DearSync,
    HybridSync,
    LazySync,
    RingSync,
    SparseSync,
    Sync,
)

FUSED = AllReduceSync(wire="bf16", fused=True)
"""One message of 16 bits after backward: the scheme of NVIDIA's submissions to MLPerf."""


@dataclass(frozen=True)
class Published:
    """A published result."""

    name: str
    cluster: str
    gpus: int
    batch: int
    """Images of one GPU in a step."""
    step_ms: float
    """Reported milliseconds of a step."""
    compute: Compute
    engine: Sync = FUSED
    model: str = "resnet50"
    calibrated_on: str = "held out"
    """The row that the compute was fitted to: ``itself``, or ``circular`` if it follows from this system's speed-up."""
    gbit: float | None = None
    """Rate of all NICs of a node, instead of the cluster's."""
    left: str = ""
    """The reason why the model misses, as far as it is known."""


_H100, _A100, _DGX2H, _DGX1 = (
    DEVICES[name].computes["resnet50"][0] for name in ("h100", "a100", "v100-dgx2h", "v100-dgx1")
)
_DGX1_V05 = Compute(V100_C0, 0.7404, "fitted", "MLPerf v0.5, one DGX-1")
_DGX2H_V05 = Compute(V100_C0, 0.7387, "fitted", "MLPerf v0.5, one DGX-2H")
_DGX2H_V07 = Compute(V100_C0, 0.5854, "fitted", "MLPerf v0.7, one DGX-2H")
_A100_V07 = Compute(_A100.c0, 0.3412, "fitted", "MLPerf v0.7, one DGX-A100")
_RESNET_MB = 51.1 / 1.048576


def _groups(count: int) -> LazySync:
    """Return the scheme of MLPerf v0.6, and of one node in v0.7: that many messages of 16 bits during backward."""
    return LazySync(threshold_mb=_RESNET_MB / count, collective="native")


_GROUPED = (
    "norms are averaged over two GPUs, and a step of 15 or 16 images no longer fills an A100: below 35 images its logs "
    "bend away from the line"
)
_FUSED_NORMS = "one node runs another network than several (resnet-v1b-mainloop-fl), whose norms are fused"
_YOUNG = (
    "v0.7's two nodes already take 87 ms where v1.0's eight take 66 at the same batch: its young software, not links"
)
_V05 = "NCCL 2.3 has no trees, and gradients leave in messages that Horovod puts together; how many is not logged"
_ABCI = "the nodes are not NVIDIA's, and the software is Fujitsu's own"
_ALEXNET = DEVICES["v100"].computes["alexnet"][0]
_RESNET = Compute(0.0, 211 / 128, "published", "implied by GradientFlow's speed-up and time; circular")
_P100 = Compute(0.0, 230 / 32, "published", "implied by Goyal et al.'s hour on 256 P100; circular")

PUBLISHED = (
    Published("MLPerf v3.0 XE9680 H100", "dgx-h100", 16, 200, 33.12, _H100, calibrated_on="itself"),
    Published("MLPerf v3.0 DGX-H100", "dgx-h100", 64, 50, 10.84, _H100, calibrated_on="itself"),
    Published("MLPerf v3.0 DGX-H100", "dgx-h100", 8, 400, 57.03, _H100, left=_FUSED_NORMS),
    Published("MLPerf v4.0 DGX-H100", "dgx-h100", 8, 400, 55.79, _H100, left=_FUSED_NORMS),
    Published("MLPerf v4.0 DGX-H100", "dgx-h100", 64, 50, 10.18, _H100),
    Published("MLPerf v3.0 DGX-H100", "dgx-h100", 512, 40, 9.09, _H100),
    Published("MLPerf v3.0 DGX-H100", "dgx-h100", 768, 42, 9.39, _H100),
    Published("MLPerf v4.0 Eos", "dgx-h100", 2528, 16, 5.80, _H100),
    Published("MLPerf v3.0 HGX-H100", "dgx-h100", 3584, 16, 5.61, _H100),
    Published("MLPerf v1.1 DGX-A100", "dgx-a100", 8, 408, 123.77, _A100, calibrated_on="itself"),
    Published("MLPerf v1.1 DGX-A100", "dgx-a100", 64, 51, 19.56, _A100, calibrated_on="itself"),
    Published("MLPerf v1.1 Azure A100", "dgx-a100", 64, 51, 19.70, _A100),
    Published("MLPerf v1.0 DGX-A100", "dgx-a100", 64, 204, 65.17, _A100),
    Published("MLPerf v1.1 DGX-A100", "dgx-a100", 1024, 35, 15.50, _A100),
    Published("MLPerf v2.0 DGX-A100", "dgx-a100", 1024, 35, 15.16, _A100),
    Published("MLPerf v2.0 DGX-A100", "dgx-a100", 4216, 16, 10.51, _A100, left=_GROUPED),
    Published("MLPerf v1.1 DGX-A100", "dgx-a100", 4320, 15, 11.18, _A100, left=_GROUPED),
    Published("MLPerf v0.7 DGX-A100", "dgx-a100", 8, 408, 144.95, _A100_V07, _groups(20), calibrated_on="itself"),
    Published("MLPerf v0.7 DGX-A100", "dgx-a100", 768, 45, 26.74, _A100_V07, left=_YOUNG),
    Published("MLPerf v0.6 DGX-2H", "dgx2h", 16, 208, 135.17, _DGX2H, _groups(20), calibrated_on="itself"),
    Published("MLPerf v0.6 DGX-1", "dgx1", 8, 208, 148.27, _DGX1, _groups(20), calibrated_on="itself"),
    Published("MLPerf v0.6 DGX-2H", "dgx2h", 512, 65, 51.62, _DGX2H, _groups(16)),
    Published("MLPerf v0.6 DGX-1", "dgx1", 1040, 52, 46.27, _DGX1, _groups(16)),
    Published("MLPerf v0.6 DGX-2H", "dgx2h", 1536, 39, 35.60, _DGX2H, _groups(16)),
    Published("MLPerf v0.7 DGX-2H", "dgx2h", 16, 208, 131.77, _DGX2H_V07, _groups(20), calibrated_on="itself"),
    Published("MLPerf v0.7 DGX-2H", "dgx2h", 512, 65, 51.99, _DGX2H_V07),
    Published("MLPerf v0.6 Fujitsu", "abci", 2048, 42, 49.26, _DGX1, left=_ABCI),
    Published("MLPerf v0.5 DGX-1", "dgx1", 8, 208, 164.65, _DGX1_V05, calibrated_on="itself"),
    Published("MLPerf v0.5 DGX-2H", "dgx2h", 16, 256, 201.04, _DGX2H_V05, calibrated_on="itself"),
    Published("MLPerf v0.5 DGX-2H", "dgx2h", 512, 32, 60.93, _DGX2H_V05, left=_V05),
    Published("MLPerf v0.5 DGX-1", "dgx1", 640, 26, 56.37, _DGX1_V05, left=_V05),
    Published("Yamazaki", "abci", 2048, 40, 47.3, _DGX1, left=_ABCI),
    Published(
        "Mikami", "abci", 2176, 32, 135.2, _DGX1,
        left="224 s for 90 epochs include evaluation, start and changes of the batch; their share is not published",
    ),
    Published(
        "GradientFlow AlexNet", "gradientflow-v", 512, 128, 48.5, _ALEXNET, SparseSync(), "alexnet",
        calibrated_on="circular",
        left="80.1 % is less than sparse messages and stragglers explain: selection and input are not modelled",
    ),
    Published(
        "GradientFlow ResNet-50", "gradientflow-v", 512, 128, 249.0, _RESNET, LazySync(), calibrated_on="circular",
        left="84.8 % is not communication, 1 % at most is exposed: input and evaluation are not modelled",
    ),
    Published(
        "systems of the day, AlexNet", "gradientflow-v", 64, 128, 993.0, _ALEXNET,
        AllReduceSync(wire="fp32", collective="native"), "alexnet", calibrated_on="circular",
        left="a speed-up of 2.5 on 64 GPUs is far below the link: messages went through host memory, and one by one",
    ),
    Published(
        "Goyal", "gradientflow-v", 256, 32, 255.6, _P100, LazySync(wire="fp32", collective="native"),
        calibrated_on="circular", gbit=50,
        left="their 50 Gbit/s Ethernet went through host memory",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Shaped:
    """Steps measured by `bench sync` between hosts in network namespaces: see docs/benchmarks.md."""

    profile: str
    scale: int
    hosts: int
    mbit: float
    compute_s: float
    """Measured seconds of a step without synchronisation."""
    seconds: tuple[tuple[Sync, float], ...]
    """Engine and measured seconds."""
    ranks_per_host: int = 1


_DDP, _RING, _LAZY, _HYBRID, _DEAR, _SPARSE = (
    DdpSync(wire="bf16"), RingSync(), LazySync(), HybridSync(), DearSync(), SparseSync(),
)  # fmt: skip


def _usual(*seconds: float, engines: tuple[Sync, ...]) -> tuple[tuple[Sync, float], ...]:
    return tuple(zip(engines, seconds, strict=True))


_SIX = (_DDP, _RING, _LAZY, _HYBRID, _DEAR, _SPARSE)
_FIVE = _SIX[:5]
_FOUR = (_DDP, _LAZY, _HYBRID, _DEAR)

SHAPED = (
    Shaped("alexnet", 4, 4, 250, 1.409, (
        (DdpSync(), 3.694), (AllReduceSync(wire="bf16"), 3.023),
        *_usual(2.207, 2.022, 2.023, 1.607, 1.622, 1.475, engines=_SIX),
    )),
    Shaped("alexnet", 4, 4, 250, 0.180, ((_DDP, 1.645), (_HYBRID, 1.542))),
    Shaped("alexnet", 4, 4, 250, 0.355, ((_DDP, 1.678), (_HYBRID, 1.545))),
    Shaped("alexnet", 4, 4, 250, 0.706, ((_DDP, 1.836), (_HYBRID, 1.569))),
    Shaped("alexnet", 4, 4, 250, 1.407, ((_DDP, 2.205), (_HYBRID, 1.598))),
    Shaped("alexnet", 4, 3, 250, 1.407, _usual(2.040, 1.847, 1.845, 1.469, 1.505, 1.438, engines=_SIX)),
    Shaped("alexnet", 5, 5, 200, 1.407, _usual(2.306, 2.119, 2.140, 1.789, 1.734, 1.454, engines=_SIX)),
    Shaped("alexnet", 8, 8, 125, 1.411, _usual(2.478, 2.357, 2.322, 1.930, 1.998, 1.474, engines=_SIX)),
    Shaped("resnet50", 8, 4, 1000, 1.526, _usual(1.601, 1.560, 1.551, 1.545, 1.551, engines=_FIVE)),
    Shaped("resnet50", 8, 4, 125, 1.511, _usual(2.137, 1.533, 1.541, 1.540, 1.542, engines=_FIVE)),
    Shaped("random:7", 1, 4, 250, 1.007, _usual(2.278, 2.018, 1.927, 1.929, engines=_FOUR)),
    Shaped("random:8", 1, 4, 250, 1.006, _usual(1.979, 1.812, 1.679, 1.666, engines=_FOUR)),
    Shaped("random:9", 1, 4, 250, 1.010, _usual(3.999, 3.927, 3.634, 3.581, engines=_FOUR)),
    Shaped("random:10", 1, 4, 250, 1.009, _usual(3.403, 3.270, 3.067, 3.038, engines=_FOUR)),
)  # fmt: skip
