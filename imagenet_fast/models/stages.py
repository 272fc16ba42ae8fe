"""Cut a network into stages: consecutive layers, which keep their names in the whole network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.errors import UserError
from imagenet_fast.models.split_points import Segment, linear_partition, segments_of


@dataclass(frozen=True)
class ActivationSpec:
    """Shape, dtype and memory layout of one micro-batch's activations after a layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    """Whether they are sent as they lie in memory, [n, height, width, channels], which backends take for contiguous."""

    @property
    def meta_tensor(self) -> Tensor:
        """Tensor on the meta device, like the one that is sent."""
        shape = [self.shape[axis] for axis in (0, 2, 3, 1)] if self.channels_last else self.shape
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    def leaving(self, values: Tensor) -> Tensor:
        """Return ``values`` in the layout in which they are sent."""
        return (values.permute(0, 2, 3, 1) if self.channels_last else values).contiguous()

    def arrived(self, values: Tensor) -> Tensor:
        """Return received ``values`` in the layout that layers take."""
        return values.permute(0, 3, 1, 2) if self.channels_last else values


@dataclass(frozen=True)
class Stage:
    """Layers that one rank runs one after the other."""

    index: int
    """Position in the pipeline."""
    layers: Segment
    arriving: ActivationSpec | None
    """Activations that the stage receives; None: images."""
    leaving: ActivationSpec

    def __call__(self, values: Tensor) -> Tensor:
        """Run the layers on what was received, and return what is to be sent."""
        if self.arriving is not None:
            values = self.arriving.arrived(values)
        for layer in self.layers.values():
            values = layer(values)
        return self.leaving.leaving(values)


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
        return self.stages[number](values)


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
    """Return the recorded time of each piece, forward and backward, in milliseconds.

    Raises:
        UserError: The profile is of another model.
    """
    times = dict.fromkeys((name for piece in pieces for name in piece), 0.0)
    for layer in profile.layers:
        owner = next((name for name in times if f"{layer.name}.".startswith(f"{name}.")), None)
        if owner is None:
            raise UserError(
                f"the layer profile {profile.model} has a layer {layer.name} that this network has not; take its own"
            )
        times[owner] += layer.forward_ms + layer.backward_ms
    return [sum(times[name] for name in piece) for piece in pieces]


def _trace_shapes(
    model: nn.Module, pieces: Sequence[Segment], images: Tensor
) -> tuple[list[ActivationSpec], list[float]]:
    """Run the pieces once; return the output spec and the forward FLOPs of each, and leave the model as it was."""
    modes = {module: module.training for module in model.modules()}
    norms = [module for module in modes if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(_refuse_single_values) for norm in norms]
    values = torch.zeros_like(images, device=next(model.parameters()).device)
    crossings, work = [], []
    model.eval()
    try:
        for piece in pieces:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                for layer in piece.values():
                    values = layer(values)
            lies_last = values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last)
            crossings.append(
                ActivationSpec(tuple(values.shape), values.dtype, lies_last and not values.is_contiguous())
            )
            work.append(float(counter.get_total_flops()))
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    return crossings, work


def _refuse_single_values(norm: nn.Module, inputs: tuple[Tensor]) -> None:
    if inputs[0].numel() == inputs[0].size(1):
        raise UserError(
            "in micro-batches of one image so small a batch norm has a single value of each channel, and nothing to "
            "normalise by; take fewer micro-batches, or a larger batch"
        )


def _add(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Add ``layer`` to ``module`` under a name with dots."""
    folder, _, rest = name.partition(".")
    if not rest:
        module.add_module(folder, layer)
        return
    if folder not in dict(module.named_children()):
        module.add_module(folder, nn.Module())
    _add(module.get_submodule(folder), rest, layer)
