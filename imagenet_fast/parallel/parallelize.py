"""Divide a model over ranks, and reduce and gather values over the ranks that train its parts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.distributed.groups import ProcessGroups, build_mesh
from imagenet_fast.models.stages import LocalStages, split_model
from imagenet_fast.parallel.ddp import GradientSync
from imagenet_fast.parallel.pool_group import ActivationTraffic, PoolGroup
from imagenet_fast.parallel.tensor_parallel import TensorGroup, gathered, shard, sharded, shards_of
from imagenet_fast.recipe.parallel_config import Parallel, chunks_of
from imagenet_fast.sync import AutoSync, DdpSync, Declaration, EngineSettings, GradientPool


@dataclass(frozen=True)
class ParallelModel:
    """This rank's part of a model; ranks of one model must call the same methods in the same order."""

    own: nn.Module
    """The part that this rank trains: the model with shards in place of layers, or some stages of it."""
    layout: ProcessGroups
    activations: ActivationTraffic
    outline: nn.Module | None
    """The whole model, on the meta device; None if no stage is missing here."""

    @cached_property
    def shards(self) -> dict[nn.Parameter, None]:
        """Parameters of which this rank holds one shard, in the order of layers."""
        return {param: None for _, param, _ in shards_of(self.own)}

    def whole(self, trained: nn.Module) -> nn.Module:
        """Return the whole model with the weights of ``trained``, on every rank.

        It is a copy. Weights must be up to date (``GradientSync.settle``).

        Args:
            trained: ``own``, or a module like it.
        """
        trained = gathered(trained)
        if self.outline is None:
            return trained
        assert isinstance(trained, LocalStages)
        return join_stages(trained, self.outline, self.layout.pipeline)

    def whole_params(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors like the parameters of the whole model, such as momenta, on every rank.

        Args:
            own: Tensors like the parameters of ``own``, by name.
        """
        whole = dict(own)
        for name, _, layer in shards_of(self.own):
            whole[name] = layer.group.whole(own[name], layer.dim).data
        if self.outline is None:
            return whole
        assert isinstance(self.own, LocalStages)
        return _from_owners(self.own, whole, dict(self.outline.named_parameters()), self.layout.pipeline)

    def parts(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of ``whole``, under the names in ``own``.

        Args:
            whole: Tensors by the names of the whole model.
        """
        held = self.own.state_dict().keys()
        return sharded(self.own, {name: tensor for name, tensor in whole.items() if name in held})

    def whole_norms(self, params: Sequence[nn.Parameter], norms: Tensor) -> Tensor:
        """Return the norms of whole parameters from those of this rank's parts.

        The squares are summed in the order of layers, because the order of ``params`` is that of a pool, and pools
        differ between ranks.

        Args:
            params: Parameters or shards of this rank.
            norms: Their norms [..., parameters].
        """
        held = dict(zip(params, norms.unbind(-1), strict=True))
        shards = [param for param in self.shards if param in held]
        if not shards:
            return norms
        squares = torch.stack([held[param] for param in shards]).square()
        dist.all_reduce(squares, group=self.layout.tensor)
        held |= zip(shards, squares.sqrt(), strict=True)
        return torch.stack([held[param] for param in params], -1)

    def length(self, own: Tensor) -> Tensor:
        """Return the norm over all stages, from ``own``, the norm of one stage's whole parameters."""
        squared = own.square()
        dist.all_reduce(squared, group=self.layout.pipeline)
        return squared.sqrt()

    def largest(self, value: Tensor) -> Tensor:
        """Replace ``value`` by the maximum over all ranks that hold the same model, in place, and return it."""
        for group in (self.layout.tensor, self.layout.pipeline):
            dist.all_reduce(value, dist.ReduceOp.MAX, group)
        return value

    def synchronised(self, engine: EngineSettings | DdpSync | Declaration, steps_per_epoch: int = 1) -> GradientSync:
        """Build the gradient sync of this rank's part.

        Shards are averaged over the ranks that hold the same shards, all other parameters over the ranks of the stage.
        Each of the two pools has an engine of its own. ``auto`` may choose another one for each group of shards, so
        there it defers nothing: the norms of whole layers are taken when all groups update.

        Args:
            engine: The engine, or its settings.
            steps_per_epoch: Optimizer steps in one epoch.
        """
        assert not isinstance(engine, DdpSync), "it has one group for all parameters"
        at_once = engine.model_copy(update={"defer": False}) if isinstance(engine, AutoSync) else engine
        pools: list[GradientPool] = []
        with ExitStack() as opened:  # if the second pool is refused, the first is closed
            for shards, ranks, settings in ((True, self.layout.data, at_once), (False, self.layout.stage, engine)):
                chosen = [(name, p) for name, p in self.own.named_parameters() if (p in self.shards) == shards]
                if any(param.requires_grad for _, param in chosen):
                    pool = GradientPool(
                        chosen, settings, ranks, model=self.own, steps_per_epoch=steps_per_epoch, lockstep=shards
                    )
                    opened.callback(pool.close)
                    pools.append(pool)
            opened.pop_all()
        return PoolGroup(pools, self.largest, self.activations.spent, self.layout.close)


def parallelize(
    parallel: Parallel,
    model: nn.Module,
    images: Tensor,
    cast: AbstractContextManager[object],
    profile: Profile | None = None,
) -> ParallelModel:
    """Reduce ``model`` in place to this rank's part of it.

    All ranks hold the same model at first.

    Args:
        parallel: The recipe's layout.
        model: The whole model, on this rank's device.
        images: Like what a rank reads at once; may be on the meta device.
        cast: Context in which forward will run.
        profile: Layer times by which stages are balanced; None: by counted operations.

    Raises:
        UserError: ``model`` cannot be cut into these stages.
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


def join_stages(part: LocalStages, outline: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Return the whole network that the ranks of a pipeline hold, a copy on each rank.

    Every rank must call it.

    Args:
        part: The stages of this rank.
        outline: The whole network, on the meta device.
        group: Ranks of the pipeline.
    """
    whole = _from_owners(part, _tensors(part), _tensors(outline), group)
    network = copy.deepcopy(outline)
    persistent = outline.state_dict().keys()
    network.load_state_dict({name: whole[name] for name in persistent}, assign=True)
    for name in whole.keys() - persistent:
        folder, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(folder), leaf, whole[name])
    return network


def _from_owners(
    part: LocalStages, own: Mapping[str, Tensor], outline: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Return a tensor for each of ``outline``, from the rank that holds its layer in its ``part``."""
    rank, whole = dist.get_rank(group), dict[str, Tensor]()
    for name, like in outline.items():
        owner = next(rank for layer, rank in part.owners.items() if name.startswith(f"{layer}."))
        value = torch.empty(like.shape, dtype=like.dtype, device=part.device)
        if owner == rank:
            value.copy_(own[name])
        dist.broadcast(value, group=group, group_src=owner)
        whole[name] = torch.empty_like(like, device=part.device).copy_(value)
    return whole


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of ``model`` and the buffers that it leaves out."""
    return model.state_dict() | dict(model.named_buffers())
