"""Time batch norms by this program's kernels beside torch's on a GPU: each by its shape, and steps with and without.

python -m experiments.norms shapes [IMAGES]    norms of ResNet-50 and AlexNet-BN, after a check against float64
python -m experiments.norms steps [IMAGES]     steps, launched and replayed from a CUDA graph

Without a GPU it is a dry run, as small as it goes, in which Triton interprets the kernels.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

DRY_RUN = "TRITON_INTERPRET"
"""Set before Triton is imported."""
REPEATS = 10  # of an operation in a graph


class Norm(NamedTuple):
    """A norm, with the add and the ReLU around it."""

    channels: int
    side: int
    relu: str
    adds: bool
    affine: bool

    def passes(self, backward: bool) -> int:
        """Return how often the kernels read or write a tensor of the images' size."""
        return (7 if self.adds else 5) if backward else 3 + self.adds


def norms_of(name: str) -> Counter[Norm]:
    """Count the norms of a network by shape, for ImageNet's images."""
    import torch

    from imagenet_fast.models import build_model
    from imagenet_fast.models.alexnet import CompilableSequential
    from imagenet_fast.models.fused_norm import FusedBatchNorm2d
    from imagenet_fast.recipe.schema import AlexNetBN, ResNet

    found: Counter[Norm] = Counter()
    with torch.device("meta"):
        model = build_model(ResNet(kind="resnet50") if name == "resnet50" else AlexNetBN(kind="alexnet_bn"), 1000)
        for module in model.modules():
            if isinstance(module, CompilableSequential):
                module.give_relus_to_norms()
            if isinstance(module, FusedBatchNorm2d):
                module.register_forward_hook(
                    lambda norm, given, _: found.update(
                        [Norm(norm.num_features, given[0].size(2), norm.relu, len(given) > 1, norm.affine)]
                    )
                )
        side = 224 if name == "resnet50" else 227
        model(torch.empty(2, 3, side, side))
    return found


def microseconds(operation: Callable[[], object]) -> float:
    """Return the time of an operation on the GPU, replayed from a CUDA graph: the host launches too slowly."""
    import torch

    if DRY_RUN in os.environ:
        begun = time.perf_counter()
        operation()
        return 1e6 * (time.perf_counter() - begun)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        operation()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(REPEATS):
            operation()
    times: list[float] = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / REPEATS)
    graph.reset()
    return min(times)


def time_norm(norm: Norm, images: int, count: int) -> tuple[float, float]:
    """Check a norm, print a row of its times, and return those of all such norms: ours and torch's."""
    import torch

    from imagenet_fast.models.fused_norm import FusedBatchNorm2d

    device = torch.device("cpu" if DRY_RUN in os.environ else "cuda")
    shape = (images, norm.channels, norm.side, norm.side)
    x, residual, dy = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        for _ in range(3)
    )
    x.requires_grad_()
    residual.requires_grad_()
    layer = FusedBatchNorm2d(norm.channels, affine=norm.affine, relu=norm.relu).to(device)  # type: ignore[arg-type]
    given = [x, residual] if norm.adds else [x]

    def both(norm: Any, inputs: Sequence[Any], gradient: Any) -> list[Any]:
        out = norm(*inputs)
        return [out.detach(), *torch.autograd.grad(out, [*inputs, *norm.parameters()], gradient)]

    exact = copy.deepcopy(layer).double()
    expected = both(exact, [one.detach().double().requires_grad_() for one in given], dy.double())
    layer.fused = True
    found = both(layer, given, dy)
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
    if worst > 2e-2:
        raise SystemExit(f"{norm} is off by {worst:.2g} of float64")
    del found, expected
    size, sums, shown = x.numel() * x.element_size(), [], []
    for layer.fused in (True, False):
        with torch.no_grad():
            forward = microseconds(partial(layer, *given))
        whole = microseconds(partial(both, layer, given, dy))
        sums.append(count * whole)
        shown += [f"{forward:10.1f}", f"{whole - forward:10.1f}"]
        if layer.fused:
            times = ((False, forward), (True, whole - forward))
            shown += [f"{norm.passes(backward) * size / 1e6 / us:6.2f}" for backward, us in times]
    kind = ("relu, " if norm.relu == "before" else "") + "norm" + (", add" if norm.adds else "")
    kind += ", relu" if norm.relu == "after" else ""
    print(f"{count:3} {norm.channels:5} {norm.side:4}  {kind:16}{''.join(shown)}  {worst:.1e}", flush=True)
    return sums[0], sums[1]


def time_shapes(images: int) -> None:
    """Print the times of every norm of two networks, and their sums."""
    import torch

    dry = DRY_RUN in os.environ
    print(f"torch {torch.__version__}, {images} images, bf16; us forward, us backward, TB/s of each, then torch's us")
    for name in ("resnet50", "alexnet_bn"):
        norms = norms_of(name)
        if dry:
            norms = Counter({norm._replace(side=5): 1 for norm in [*norms][:3]})
        sums = [time_norm(norm, images, count) for norm, count in norms.items()]
        ours, torchs = (sum(one) / 1e3 for one in zip(*sums, strict=True))
        print(f"all norms of {name}: {ours:.2f} ms, torch's {torchs:.2f} ms", flush=True)


def time_steps(images: int) -> None:
    """Print the times of steps with and without the kernels."""
    from rich.console import Console

    from imagenet_fast.bench.train_step import bench_step, step_recipe
    from imagenet_fast.metrics.tables import table

    dry = DRY_RUN in os.environ
    plain = step_recipe("resnet18" if dry else "resnet50", 32 if dry else 224, images, "fp32" if dry else None)
    for fused in (True, False):
        recipe = plain.model_copy(update={"model": plain.model.model_copy(update={"fused_norm": fused})})
        rows = bench_step([recipe], rounds=1 if dry else 20, steps=1 if dry else 2, replayed=not dry)
        print(f"{images} images, model.fused_norm {str(fused).lower()}:")
        Console().print(table(rows))


def main(words: Sequence[str]) -> None:
    """Run the command that ``words`` are."""
    import torch

    if not torch.cuda.is_available():
        os.environ[DRY_RUN] = "1"
    what, images = words[0] if words else "", int(words[1]) if len(words) > 1 else 128
    commands = {"shapes": time_shapes, "steps": time_steps}
    if what not in commands:
        raise SystemExit(__doc__)
    commands[what](2 if DRY_RUN in os.environ else images)


if __name__ == "__main__":
    main(sys.argv[1:])
