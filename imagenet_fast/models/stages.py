"""Cut a network into stages: consecutive layers, which keep their names in the whole network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.models.split_points import Segment, linear_partition, segments_of


@dataclass(frozen=True)
class Crossing:
    """One micro-batch's activations after a layer, sent in the order of memory, as backends want them."""

    meta_tensor: Tensor
    """Tensor on the meta device, like the one that is sent."""
    axes: tuple[int, ...]
    """Axes of the activations in the order of memory: [n, height, width, channels], where they are channels_last."""


@dataclass(frozen=True)
class Stage:
    """Layers that one rank runs one after the other."""

    index: int
    """Position in the pipeline."""
    layers: Segment
    arriving: Crossing | None
    """Activations that the stage receives; None: images."""
    leaving: Crossing


class LocalStages(nn.Module):
    """The stages of one rank; its state dict is a part of the whole network's."""

    def __init__(self, stages: Sequence[Stage], count: int, images: Tensor, owners: Mapping[str, int]) -> None:
        """Combine the ``stages`` of this rank, in the order of the pipeline, into one module."""
        super().__init__()
        self.stages = tuple(stages)
        self.count = count
        """Number of stages of all ranks together."""
        self.owners = owners
        """Rank that holds each layer of the network, by the layer's name."""
        self.images = images
        """One micro-batch, on the meta device."""
        for stage in stages:
            for name, layer in stage.layers.items():
                _add(self, name, layer)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def crossing_bytes(self) -> int:
        """Bytes of one micro-batch's activations that are received from other ranks and sent to them."""
        arriving = [stage.arriving for stage in self.stages if stage.arriving is not None]
        leaving = [stage.leaving for stage in self.stages if stage.index < self.count - 1]
        return sum(crossing.meta_tensor.nbytes for crossing in arriving + leaving)

    def forward(self, values: Tensor, number: int = 0) -> Tensor:
        """Run one of this rank's stages.

        Args:
            values: Images [n, 3, S, S] for the network's first stage, else received activations.
            number: Index of the stage on this rank.

        Returns:
            Activations to send, or logits [n, classes] of the network's last stage.
        """
        stage = self.stages[number]
        if stage.arriving is not None:
            sent = stage.arriving.axes
            values = values.permute([sent.index(axis) for axis in range(len(sent))])
        for layer in stage.layers.values():
            values = layer(values)
        return values.permute(stage.leaving.axes).contiguous()


def split_model(
    model: nn.Module, images: Tensor, rank: int, ranks: int, chunks: int = 1, profile: Profile | None = None
) -> LocalStages:
    """Cut ``model`` into stages and return those of one rank: ``chunks`` stages, every ``ranks``-th.

    The cut makes the slowest stage as fast as possible. The model is run once, in evaluation mode and on zeros, to find
    the activations between stages. Call this under the autocast that the stages will run in.

    Args:
        model: The whole network.
        images: Like one micro-batch; may be on the meta device.
        rank: Rank in the pipeline whose stages are returned.
        ranks: Number of ranks in the pipeline.
        chunks: Stages per rank.
        profile: Layer times of the model; None: counted floating-point operations are used instead.

    Raises:
        UserError: The model cannot be cut into so many stages.
    """
    count = ranks * chunks
    pieces = segments_of(model, count)
    crossings, work = _trace_shapes(model, pieces, images)
    runs = linear_partition(work if profile is None else recorded_times(pieces, profile), count)
    leaving = [crossings[run.stop - 1] for run in runs]
    stages = [
        Stage(index, {name: layer for piece in pieces[run] for name, layer in piece.items()}, before, after)
        for index, (run, before, after) in enumerate(zip(runs, [None, *leaving], leaving, strict=False))
    ]
    owners = {name: stage.index % ranks for stage in stages for name in stage.layers}
    return LocalStages(stages[rank::ranks], count, torch.empty_like(images, device="meta"), owners)


def recorded_times(pieces: Sequence[Segment], profile: Profile) -> list[float]:
    """Return the time of each piece in a profile of the model, forward and backward, in milliseconds."""
    times = dict.fromkeys((name for piece in pieces for name in piece), 0.0)
    for layer in profile.layers:
        owner = next(name for name in times if f"{layer.name}.".startswith(f"{name}."))
        times[owner] += layer.forward_ms + layer.backward_ms
    return [sum(times[name] for name in piece) for piece in pieces]


def _trace_shapes(model: nn.Module, pieces: Sequence[Segment], images: Tensor) -> tuple[list[Crossing], list[float]]:
    """Run the pieces once; return the activations after each and its forward FLOPs, and leave the model as it was."""
    modes = {module: module.training for module in model.modules()}
    values = torch.zeros_like(images, device=next(model.parameters()).device)
    crossings, work = [], []
    model.eval()
    try:
        for piece in pieces:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                for layer in piece.values():
                    values = layer(values)
            axes = tuple(sorted(range(values.dim()), key=values.stride().__getitem__, reverse=True))
            like = torch.empty_like(values.permute(axes), device="meta", requires_grad=True)
            crossings.append(Crossing(like, axes))
            work.append(float(counter.get_total_flops()))
    finally:
        for module, training in modes.items():
            module.training = training
    return crossings, work


def _add(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Add ``layer`` to ``module`` under a name with dots."""
    *folders, own = name.split(".")
    for folder in folders:
        if folder not in module._modules:
            module.add_module(folder, nn.Module())
        module = module.get_submodule(folder)
    module.add_module(own, layer)
