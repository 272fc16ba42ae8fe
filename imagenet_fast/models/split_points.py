"""Find where a network can be cut, its layers in the order of forward, and how to cut it evenly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from operator import itemgetter

from torch import nn

from imagenet_fast.errors import UserError
from imagenet_fast.models.alexnet import AlexNet, CompilableSequential
from imagenet_fast.models.resnet import ResNet

_TORCHVISION = ("torchvision.models.alexnet", "torchvision.models.resnet")

Segment = dict[str, nn.Module]
"""Layers by their names in the whole network: one with parameters and those up to the next such layer."""


def segments_of(model: nn.Module, stages: int = 1) -> list[Segment]:
    """Return the segments into which ``model`` can be cut, in the order of forward.

    No segment begins with an in-place operation, as a ReLU may be: the input of a stage is a leaf of autograd.

    Args:
        model: The network, not compiled.
        stages: Number of stages that it will be cut into.

    Raises:
        UserError: The order of forward is unknown, layers share a weight, or it has too few segments.
    """
    pieces: list[Segment] = [{}]
    for name, layer in _layers(model):
        first = next(module for module in layer.modules() if not any(True for _ in module.children()))
        may_begin = _has_parameters(layer) and not getattr(first, "inplace", False)
        if may_begin and any(_has_parameters(before) for before in pieces[-1].values()):
            pieces.append({})
        pieces[-1][name] = layer
    params = [p for piece in pieces for layer in piece.values() for p in layer.parameters()]
    if len(params) > len(set(params)):
        raise UserError(f"{type(model).__name__} reads a weight in several layers, which stages cannot share")
    if stages > len(pieces):
        raise UserError(
            f"{type(model).__name__} makes {len(pieces)} stages, not {stages}; lower parallel.pipeline or --stages"
        )
    return pieces


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every layer by name, in the order of forward; the layers of a Sequential one by one."""
    match model:
        case _ if isinstance(model, ResNet | AlexNet) or type(model).__module__ in _TORCHVISION:
            *body, head = _children(model)
            yield from _opened(body)
            yield "flatten", nn.Flatten()
            yield from _opened([head])
        case nn.Sequential() if _calls_in_turn(model):
            yield from _opened(_children(model))
        case _:
            raise UserError(
                f"in which order {type(model).__name__} calls its layers is not known, so a pipeline cannot cut it; "
                "take alexnet, alexnet_bn, resnet18, resnet50 or cifarnet"
            )


def _opened(children: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in children:
        if _calls_in_turn(child):
            yield from ((f"{name}.{inner}", layer) for inner, layer in _children(child))
        else:
            yield name, child


def _calls_in_turn(module: nn.Module) -> bool:
    """Return whether forward calls the children one after the other; a class of one's own may add a shortcut."""
    forward = getattr(module.forward, "__func__", None)
    return forward in (nn.Sequential.forward, CompilableSequential.forward) and isinstance(module, nn.Sequential)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children as ``named_children`` does, but a module used in two places twice."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _has_parameters(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters())


def linear_partition(costs: Sequence[float], parts: int) -> list[slice]:
    """Divide ``costs`` into ``parts`` groups of neighbours, none empty, so that the dearest group costs least.

    Dynamic programming over where the last group begins (Skiena, The Algorithm Design Manual, "The Partition Problem").

    Args:
        costs: Costs in order, none negative.
        parts: Number of groups, from 1 to that of costs.
    """
    sums = list(accumulate(costs, initial=0.0))

    @cache
    def best(groups: int, end: int) -> tuple[float, list[slice]]:
        """Return the least cost of the dearest of ``groups`` up to ``end``, and these groups."""
        if groups == 1:
            return sums[end], [slice(0, end)]
        ways = [(best(groups - 1, begin), begin) for begin in range(groups - 1, end)]
        return min(
            ((max(cost, sums[end] - sums[begin]), [*earlier, slice(begin, end)]) for (cost, earlier), begin in ways),
            key=itemgetter(0),
        )

    return best(parts, len(costs))[1]
