"""Shard AlexNet's two large layers, which hold nine tenths of its weights, over ranks.

"One weird trick" (Krizhevsky, arXiv 1404.5997): convolutions are data-parallel. The ranks of a tensor group, each with
images of its own, compute the fully connected layers together for the images of all. The first of these layers is cut
by outputs and the second by inputs (as in Megatron-LM, arXiv 1909.08053), so nothing is sent between them. The outputs
of the second are summed, and each is sent to the rank that holds its image. The last layer is data-parallel again. So
two activations per image are sent, in forward and in backward, in place of the gradients of the large layers.

A rank's loss is the mean over its own images, and a pool takes the plain mean of its ranks' gradients. A shard's
gradient is of the losses of all G ranks of its group. So gradients are divided by G where they enter the sharded
layers, and multiplied by G where they leave these, for features of one rank's images.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from imagenet_fast.parallel.pool_group import ActivationTraffic
from imagenet_fast.sync.comm_stream import all_gather_single


class TensorGroup:
    """Ranks that hold the shards of a model's layers, and the collectives between them.

    All ranks must call these in the same order, with the same number of images. ``activations`` counts and times them.
    """

    def __init__(self, group: dist.ProcessGroup, activations: ActivationTraffic) -> None:
        """Use ``group`` for collectives, and count their traffic in ``activations``."""
        self.size = dist.get_world_size(group)
        self.place = dist.get_rank(group)
        self._group = group
        self._activations = activations

    def __deepcopy__(self, memo: object) -> TensorGroup:
        """Return this object: copies of a model belong to the same ranks."""
        return self

    def gather(self, own: Tensor) -> Tensor:
        """Return the [images, units] of each rank as [G images, units], in the order of ranks."""
        own = own.contiguous()
        whole = own.new_empty(self.size * len(own), *own.shape[1:])
        with self._activations.waited_for((self.size - 1) * own.nbytes):
            all_gather_single(whole, own, self._group)
        return whole

    def scatter(self, parts: Tensor) -> Tensor:
        """Sum the [G images, units] of all ranks, and return the part [images, units] of this rank's images.

        It is summed in fp32 at least and rounded once. gloo's reduce-scatter would send twice as much.
        """
        parts = parts.contiguous()
        arrived = torch.empty_like(parts)
        with self._activations.waited_for((self.size - 1) * parts.nbytes // self.size):
            dist.all_to_all_single(arrived, parts, group=self._group)
        exact = torch.promote_types(parts.dtype, torch.float32)
        return arrived.view(self.size, -1, *parts.shape[1:]).sum(0, dtype=exact).to(parts.dtype)

    def shard(self, whole: Tensor, dim: int) -> nn.Parameter:
        """Return this rank's part of a parameter that all ranks hold, cut along ``dim``."""
        part = whole.detach().chunk(self.size, dim)[self.place]
        return nn.Parameter(part.clone(memory_format=torch.contiguous_format), whole.requires_grad)

    def whole(self, shard: Tensor, dim: int) -> nn.Parameter:
        """Gather the parts that ``shard`` cut, trained since or not, on every rank."""
        parts = [torch.empty_like(shard) for _ in range(self.size)]
        dist.all_gather(parts, shard.detach(), self._group)
        return nn.Parameter(torch.cat(parts, dim), shard.requires_grad)


class Shard(nn.Linear):
    """This rank's part of a fully connected layer, for the images of the whole group."""

    dim: int
    """Axis of the weight along which the layer is cut: 0 for outputs, with the bias, or 1 for inputs."""

    def __init__(self, layer: nn.Linear, group: TensorGroup) -> None:
        """Keep this rank's part of ``layer``, cut along ``dim``."""
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.group = group
        for name, param in layer.named_parameters():
            setattr(self, name, group.shard(param, self.dim) if self.cuts(param) else param)
        self.out_features, self.in_features = self.weight.shape

    def cuts(self, param: Tensor) -> bool:
        """Return whether ranks hold parts of ``param``; if not, all hold the same."""
        return param.dim() > self.dim

    def whole(self) -> nn.Linear:
        """Gather the layer, on every rank."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        for name, param in self.named_parameters():
            setattr(layer, name, self.group.whole(param, self.dim) if self.cuts(param) else param)
        layer.out_features, layer.in_features = layer.weight.shape
        return layer


class ColumnParallel(Shard):
    """Some outputs of a layer: [images, in] to [G images, out / G]."""

    dim = 0

    def forward(self, features: Tensor) -> Tensor:
        """Gather the features of all ranks and compute this rank's outputs for them."""
        device = features.device.type
        if torch.is_autocast_enabled(device):  # sent in the dtype in which it is multiplied
            features = features.to(torch.get_autocast_dtype(device))
        return super().forward(_Exchange.apply(features, self.group, True))


class RowParallel(Shard):
    """Some inputs of a layer: [G images, in / G] to [images, out]."""

    dim = 1

    def forward(self, units: Tensor) -> Tensor:
        """Compute this rank's summand for the images of all ranks; return the sum for its own images."""
        own: Tensor = _Exchange.apply(F.linear(units, self.weight), self.group, False)
        return own if self.bias is None else own + self.bias.to(own.dtype)


def shard(model: nn.Module, group: TensorGroup) -> None:
    """Replace an AlexNet's first two fully connected layers by this rank's shards, in place, under the same names.

    All ranks hold the same model at first. Dropout before these layers drops features of a rank's own images; dropout
    between them drops units of its own shard. This acts as usual if the ranks' random numbers differ. The units of
    these layers are a multiple of the ranks.
    """
    layers = model.get_submodule("classifier")
    connected = [(name, layer) for name, layer in layers.named_children() if isinstance(layer, nn.Linear)]
    (first, outputs), (second, inputs), *_ = connected
    setattr(layers, first, ColumnParallel(outputs, group))
    setattr(layers, second, RowParallel(inputs, group))


def gathered(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` whose layers are whole, as before ``shard``.

    A model without shards is returned itself. Every rank of the group must call it. Weights must be up to date
    (``GradientSync.settle``).
    """
    if not any(isinstance(module, Shard) for module in model.modules()):
        return model
    whole = copy.deepcopy(model)
    for name, layer in list(whole.named_modules()):
        if isinstance(layer, Shard):
            whole.set_submodule(name, layer.whole())
    return whole


def sharded(model: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of ``whole``, with those that ``shard`` cut reduced to this rank's part.

    Args:
        model: A model after ``shard``.
        whole: Tensors by the names of the whole model.
    """
    own = dict(whole)
    for name, _, layer in shards_of(model):
        if name in own:
            own[name] = own[name].chunk(layer.group.size, layer.dim)[layer.group.place]
    return own


def shards_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shard]]:
    """Yield the name, parameter and layer of each parameter that this rank holds as one shard, in layer order."""
    for name, layer in model.named_modules():
        if isinstance(layer, Shard):
            yield from ((f"{name}.{own}", param, layer) for own, param in layer.named_parameters() if layer.cuts(param))


class _Exchange(torch.autograd.Function):
    """Gather features for the sharded layers, or sum and scatter their outputs; in backward, the other of the two."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TensorGroup, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return group.gather(values) if gathers else group.scatter(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        return group.scatter(gradient) * group.size if ctx.gathers else group.gather(gradient / group.size), None, None
