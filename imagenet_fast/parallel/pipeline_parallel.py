"""Run a batch through pipeline stages on several ranks, in micro-batches, by one of torch's schedules.

GPipe (Huang et al., arXiv 1811.06965) runs all forwards and then all backwards. 1F1B (PipeDream-Flush, Narayanan et
al., arXiv 2006.09503) runs a backward as soon as it can, so it keeps fewer activations. Interleaved 1F1B (arXiv
2104.04473) gives each rank several stages, so the pipeline fills sooner. Gradients equal those of accumulation over the
same micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.models.batchnorm_stats import StepStatistics
from imagenet_fast.models.stages import LocalStages
from imagenet_fast.parallel.ddp import GradientSync
from imagenet_fast.parallel.pool_group import ActivationTraffic
from imagenet_fast.recipe.parallel_config import chunks_of

Pass = Literal["forward", "backward"]
Observe = Callable[[Pass, int], AbstractContextManager[object]]
"""Function that returns a context for one pass of one micro-batch, given the stage's position in the pipeline."""


class Pipeline:
    """The ranks of ``group`` as a pipeline, of which this rank runs ``part``.

    Running statistics of batch norms move once per batch, as in accumulation
    (``imagenet_fast.models.batchnorm_stats``).
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
        """Build the schedule of this rank.

        Args:
            part: The stages of this rank.
            group: Ranks of the pipeline; None: all ranks.
            schedule: ``gpipe``, ``1f1b`` or ``interleaved``.
            micro_batches: Micro-batches in a batch.
            criterion: Loss as a mean over images.
            sync: Averages the part's gradients with those of its replicas. They are sent during the last micro-batch's
                backward, unless the caller is in ``no_sync``. None: there are no replicas.
            cast: Context in which forward and ``criterion`` run; None: none.
            observe: Makes a context for each pass; None: not observed.
            activations: Counts the activations sent; None: not counted.
        """
        self._ranks = dist.get_world_size(group)
        assert part.count == self._ranks * chunks_of(schedule), "the network has been cut for another schedule"
        self._part = part
        self._group = group
        self._micro_batches = micro_batches
        self._criterion = criterion
        self._cast = cast or nullcontext()
        self._scale: Callable[[Tensor], Tensor] | None = None
        self._loss = torch.zeros((), device=part.device)
        self._stages = [
            _MicroStage(part, number, group, micro_batches, sync, observe or (lambda *_: nullcontext()))
            for number in range(len(part.stages))
        ]
        self._activations = activations
        self._schedule = _schedule(schedule, self._stages, micro_batches, self._criterion_of)

    def __call__(self, images: Tensor, labels: Tensor, scale: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Run forward and backward of a batch, and return its mean loss on every rank.

        Args:
            images: Read by the first stage.
            labels: Read by the last stage.
            scale: Function of the loss whose result is differentiated; None: the loss itself.
        """
        assert len(images) == len(labels) == self._micro_batches * len(self._part.images), "batches are full"
        self._scale = scale
        self._loss = torch.zeros_like(self._loss)
        for stage in self._stages:
            stage.statistics.begin()
        first, last = self._stages[0].is_first, self._stages[-1].is_last
        here.enter("sync")  # outside the passes, stages wait for one another
        with self._cast:  # around all micro-batches, so that they share the cast copies of weights
            self._schedule.step(*((images,) if first else ()), target=labels if last else None)
        if self._activations is not None:
            crossed = self._micro_batches * self._part.crossing_bytes
            self._activations.exchanged(crossed)  # as activations or as their gradients
        dist.broadcast(self._loss, group=self._group, group_src=self._ranks - 1)
        return self._loss

    def _criterion_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of one micro-batch, divided so that the sum over all is the batch's mean."""
        loss = self._criterion(logits, labels) / self._micro_batches
        self._loss += loss.detach()
        return loss if self._scale is None else self._scale(loss)


class _MicroStage(PipelineStage):
    """Stage that hands its gradients to the engine only during the last micro-batch's backward."""

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
        arriving = part.images if stage.arriving is None else stage.arriving.meta_tensor
        super().__init__(part, stage.index, part.count, part.device, arriving, stage.leaving.meta_tensor, group=group)
        self._number = number
        self._sync = sync
        self._observe = observe
        self.statistics = StepStatistics(nn.ModuleList(stage.layers.values()), micro_batches)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        here.enter("forward")
        with self._observe("forward", self.stage_index), self.statistics.micro_step():
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
    """Build torch's schedule without dividing gradients once more: losses are means already."""
    if schedule == "interleaved":
        return ScheduleInterleaved1F1B([*stages], micro_batches, loss, scale_grads=False)
    kind = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
    return kind(stages[0], micro_batches, loss, scale_grads=False)
