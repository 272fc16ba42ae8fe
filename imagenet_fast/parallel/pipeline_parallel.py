"""A batch through the stages of several ranks, in micro-batches, by one of torch's schedules.

GPipe (Huang et al., arXiv 1811.06965) sends all micro-batches forward and then all backward; 1F1B (PipeDream-Flush,
Narayanan et al., arXiv 2006.09503) goes backward as soon as it can, and so keeps fewer activations; interleaved 1F1B
(arXiv 2104.04473) gives each rank several stages, so that the pipeline fills sooner. Gradients are those of
accumulation over the same micro-batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.errors import UserError
from imagenet_fast.models.batchnorm_stats import PipelinedStatistics
from imagenet_fast.models.stages import LocalStages
from imagenet_fast.recipe.pipeline_schedules import chunks_of, misfit
from imagenet_fast.sync import GradientSync
from imagenet_fast.sync.activation_traffic import ActivationTraffic
from imagenet_fast.sync.engines.ddp import DdpPeer

Pass = Literal["forward", "backward"]
Observe = Callable[[Pass, int], AbstractContextManager[object]]
"""What surrounds one pass of one micro-batch through a stage, which it is told by its place in the pipeline."""


class Pipeline:
    """The ranks of ``group`` as a pipeline, of which this one runs ``part``.

    ``sync`` averages the part's gradients with those of its replicas: they leave during the last micro-batch's
    backward, unless a ``no_sync`` of the caller's says otherwise; None: there are no replicas. Forward and
    ``criterion``, a mean over images, run under ``cast``. Running statistics of batch norms move once a batch, as in
    accumulation (:mod:`imagenet_fast.models.batchnorm_stats`). Raises UserError where schedule, micro-batches and
    engine do not go together.
    """

    def __init__(
        self,
        part: LocalStages,
        group: dist.ProcessGroup | None,
        schedule: str,
        micro_batches: int,
        criterion: Callable[[Tensor, Tensor], Tensor],
        sync: GradientSync | None = None,
        cast: AbstractContextManager[object] | None = None,
        observe: Observe | None = None,
        activations: ActivationTraffic | None = None,
    ) -> None:
        self._ranks = dist.get_world_size(group)
        if (why := misfit(schedule, self._ranks, micro_batches)) is not None:
            raise UserError(why)
        if isinstance(sync, DdpPeer):
            raise UserError("the engine ddp watches the forward of a whole network, not stages; take another engine")
        assert part.count == self._ranks * chunks_of(schedule), "the network has been cut for another schedule"
        self._part = part
        self._group = group
        self._micro_batches = micro_batches
        self._criterion = criterion
        self._cast = cast or nullcontext()
        self._scale: Callable[[Tensor], Tensor] | None = None
        self._loss = torch.zeros((), device=part.device)
        self._stages = [
            _MicroStage(part, number, group, micro_batches, sync, observe or _unobserved)
            for number in range(len(part.stages))
        ]
        self._activations = activations
        self._schedule = _schedule(schedule, self._stages, micro_batches, self._criterion_of)

    def __call__(self, images: Tensor, labels: Tensor, scale: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Forward and backward of a batch, of which the first stage reads ``images`` and the last ``labels``.

        Returns the mean loss, on every rank. What is differentiated is what ``scale`` makes of it. Raises UserError
        where the batch is not of the size that the network was cut for.
        """
        source = self._micro_batches * len(self._part.images)
        if len(images) != source or len(labels) != source:
            raise UserError(
                f"a batch of {len(images)} images is not the {images} of {self._micro_batches} equal micro-batches "
                "that the pipeline's ranks have agreed on; give it full batches"
            )
        self._scale = scale
        self._loss = torch.zeros_like(self._loss)
        for stage in self._stages:
            stage.statistics.begin()
        first, last = self._stages[0].is_first, self._stages[-1].is_last
        here.enter("sync")  # but for the passes: stages wait for one another
        with self._cast:  # over all micro-batches, which so share the copies of weights that it makes
            self._schedule.step(*((images,) if first else ()), target=labels if last else None)
        if self._activations is not None:
            crossed = self._micro_batches * self._part.crossing_bytes
            self._activations.exchanged(crossed, crossed)  # either as activations or as their gradients
        dist.broadcast(self._loss, group=self._group, group_src=self._ranks - 1)
        return self._loss

    def _criterion_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of one micro-batch; the sum over all is the batch's mean."""
        loss = self._criterion(logits, labels) / self._micro_batches
        self._loss += loss.detach()
        return loss if self._scale is None else self._scale(loss)


def joined(part: LocalStages, outline: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """The whole network as the ranks of a pipeline hold it, a copy on each. ``outline`` is like it, on the meta device.

    Every rank must ask for it.
    """
    own, rank, whole = part.state_dict(), dist.get_rank(group), dict[str, Tensor]()
    for name, like in outline.state_dict().items():
        owner = next(rank for layer, rank in part.owners.items() if name.startswith(f"{layer}."))
        value = torch.empty(like.shape, dtype=like.dtype, device=part.device)
        if owner == rank:
            value.copy_(own[name])
        dist.broadcast(value, group=group, group_src=owner)
        whole[name] = torch.empty_like(like, device=part.device).copy_(value)
    network = copy.deepcopy(outline)
    network.load_state_dict(whole, assign=True)
    return network


class _MicroStage(PipelineStage):
    """A stage that hands its gradients to the engine during the last micro-batch's backward, and during no other."""

    def __init__(
        self,
        part: LocalStages,
        number: int,
        group: dist.ProcessGroup | None,
        micro_batches: int,
        sync: GradientSync | None,
        observe: Observe,
    ) -> None:
        stage = part.stages[number]
        arriving = part.images if stage.arriving is None else stage.arriving.likeness
        super().__init__(part, stage.index, part.count, part.device, arriving, stage.leaving.likeness, group=group)
        self._number = number
        self._sync = sync
        self._observe = observe
        self.statistics = PipelinedStatistics(stage.layers.values(), micro_batches)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        here.enter("forward")
        with self._observe("forward", self.stage_index), self.statistics.forward():
            arrived = self.submod(*args, self._number)
        here.enter("sync")
        return arrived

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        assert backward_type == "full", "gradients of a backward in halves come where the pool's hooks do not see them"
        held = nullcontext() if self._sync is None or last_backward else self._sync.no_sync()
        uncast = torch.autocast(self.device.type, enabled=False)
        here.enter("backward")
        with self._observe("backward", self.stage_index), held, uncast:
            gradients = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        here.enter("sync")
        return gradients


def _schedule(
    schedule: str, stages: list[_MicroStage], micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B:
    """Losses are means already, so gradients are not to be divided once more."""
    if schedule == "interleaved":
        return ScheduleInterleaved1F1B([*stages], micro_batches, loss, scale_grads=False)
    kind = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
    return kind(stages[0], micro_batches, loss, scale_grads=False)


def _unobserved(which: Pass, stage: int) -> AbstractContextManager[object]:
    return nullcontext()
