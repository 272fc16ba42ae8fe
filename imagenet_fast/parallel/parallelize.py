"""A model divided over ranks: what this one trains of it, and what it asks of those that train the rest."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.distributed.device_mesh import ProcessGroups, build_mesh
from imagenet_fast.models.stages import LocalStages, split_model
from imagenet_fast.parallel.pipeline_parallel import joined
from imagenet_fast.parallel.tensor_parallel import TensorGroup, gathered, shard, sharded, shards_of
from imagenet_fast.recipe.pipeline_schedules import chunks_of
from imagenet_fast.recipe.schema import Parallel
from imagenet_fast.sync import DdpSync, Engine, EngineSettings, GradientPool, GradientSync, build_engine
from imagenet_fast.sync.activation_traffic import ActivationTraffic
from imagenet_fast.sync.pool_group import Pools


@dataclass(frozen=True)
class ParallelModel:
    """This rank's part of a model. Ranks of one model must ask for the same, in the same order."""

    own: nn.Module
    """What this rank trains: the model with shards in place of layers, or some stages of it."""
    layout: ProcessGroups
    activations: ActivationTraffic
    outline: nn.Module | None
    """The whole model, on the meta device; None where no stage is missing here."""

    @cached_property
    def shards(self) -> dict[nn.Parameter, None]:
        """The parameters of which this rank holds one shard, in the order of layers."""
        return {param: None for _, param, _ in shards_of(self.own)}

    def whole(self, trained: nn.Module) -> nn.Module:
        """A copy of the whole model with the weights of ``trained``, which is ``own`` or like it; on every rank.

        Weights must be up to date (:meth:`GradientSync.settle`).
        """
        trained = gathered(trained)
        if self.outline is None:
            return trained
        assert isinstance(trained, LocalStages)
        return joined(trained, self.outline, self.layout.pipeline)

    def parts(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of tensors by the names of a whole model's what this rank has of them, by the names in ``own``."""
        held = self.own.state_dict().keys()
        return sharded(self.own, {name: tensor for name, tensor in whole.items() if name in held})

    def whole_norms(self, params: Sequence[nn.Parameter], norms: Tensor) -> Tensor:
        """From norms [..., parameters] of what this rank holds those of whole parameters; added up in the order of
        layers, for that of ``params`` is a pool's, and this rank's pool is not that of the others."""
        held = dict(zip(params, norms.unbind(-1), strict=True))
        shards = [param for param in self.shards if param in held]
        if not shards:
            return norms
        squares = torch.stack([held[param] for param in shards]).square()
        dist.all_reduce(squares, group=self.layout.tensor)
        held |= zip(shards, squares.sqrt(), strict=True)
        return torch.stack([held[param] for param in params], -1)

    def length(self, own: Tensor) -> Tensor:
        """From the norm of what one stage holds, of whole parameters, that of all stages."""
        squared = own.square()
        dist.all_reduce(squared, group=self.layout.pipeline)
        return squared.sqrt()

    def largest(self, value: Tensor) -> Tensor:
        """Of the values of all ranks that hold the same model, in place."""
        for group in (self.layout.tensor, self.layout.pipeline):
            dist.all_reduce(value, dist.ReduceOp.MAX, group)
        return value

    def synchronised(self, engine: EngineSettings | DdpSync | Engine, steps_per_epoch: int = 1) -> GradientSync:
        """Shards are averaged over the ranks that hold the same ones, all else over the ranks of the stage; each pool
        by an engine of its own. Raises ValueError for torch's DDP, which has one group for all parameters."""
        if isinstance(engine, DdpSync):
            raise ValueError("torch's DDP averages all parameters over the same ranks; take an engine that has a pool")
        pools = []
        for shards, ranks in ((True, self.layout.data), (False, self.layout.stage)):
            chosen = [(name, param) for name, param in self.own.named_parameters() if (param in self.shards) == shards]
            if any(param.requires_grad for _, param in chosen):
                pools.append(pool := GradientPool(chosen, ranks, model=self.own))
                pool.attach(build_engine(engine, pool, steps_per_epoch))
        return Pools(pools, self.largest, self.activations.spent)


def parallelize(
    parallel: Parallel,
    model: nn.Module,
    images: Tensor,
    cast: AbstractContextManager[object],
    profile: Profile | None = None,
) -> ParallelModel:
    """Give this rank its part of ``model``, of which it is left, in place, no more than that. All ranks hold the same
    at first.

    ``images`` are like what a rank reads at once, be it on the meta device; forward will run under ``cast``. Stages are
    made even by a layer ``profile``, or without one by counted work. Raises UserError or ValueError where ``model``
    cannot be divided so.
    """
    device = next(model.parameters()).device
    outline = copy.deepcopy(model).to("meta") if parallel.pipeline > 1 else None
    layout, activations = build_mesh(parallel, device), ActivationTraffic(device)
    own = model
    if parallel.tensor > 1:
        shard(model, TensorGroup(layout.tensor, activations))
    if parallel.pipeline > 1:
        stage, micro_batch = layout.pipeline.rank(), images.chunk(parallel.micro_batches)[0]
        with cast:
            own = split_model(model, micro_batch, stage, parallel.pipeline, chunks_of(parallel.schedule), profile)
        for name, layer in model.named_modules():
            if own.owners.get(name, stage) != stage:
                layer.to("meta")
    return ParallelModel(own, layout, activations, outline)
