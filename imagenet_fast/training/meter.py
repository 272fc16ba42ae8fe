"""Measure speed, losses and costs between two log lines; values stay on the device until a line is due."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from imagenet_fast.distributed.device_timer import Timestamp, record_timestamp, seconds_between
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.network import link_bytes
from imagenet_fast.distributed.reductions import gather_rows
from imagenet_fast.distributed.watchdog import Paces
from imagenet_fast.metrics.events import MetricLogger
from imagenet_fast.run.result import RunResult
from imagenet_fast.sync import SyncStats
from imagenet_fast.training.nonfinite import NonFiniteLoss
from imagenet_fast.training.precision import LossScaler


@dataclass
class _Interval:
    """The steps up to ``step`` since the last report, as one rank saw them."""

    step: int
    epoch: int
    lr: float
    steps: list[SyncStats]
    fetches: list[tuple[Timestamp, Timestamp]]
    """Begin and end of each fetch of a batch, but for those of the run's first step."""
    begun: Timestamp
    ended: Timestamp
    linked: float
    """Bytes sent on the link."""
    own: Tensor
    """Sum of losses, non-finite streak, and loss-scale state, in host memory once ``ended`` has passed."""


class Meter:
    """Averages over the steps since the last report.

    One report closes an interval. On a GPU the next one records it, when its values have long been in host memory: the
    host does not wait for the device. ``flush`` records what is left.

    The run ends when ``most`` losses in a row were not finite on any rank; 0: never. The time spent waiting for data is
    added to ``outcome``.
    """

    def __init__(self, world: DistContext, global_batch: int, scale: LossScaler, most: int, outcome: RunResult) -> None:
        """Create a meter that starts with an empty interval.

        Args:
            world: This rank and its process group.
            global_batch: Images in one step, over all ranks.
            scale: Loss scale to report.
            most: Consecutive non-finite losses that end the run; 0: never.
            outcome: Result of the run, to which the time spent waiting for data is added.
        """
        self._world = world
        self._global_batch = global_batch
        self._scale = scale
        self._most = most
        self._outcome = outcome
        self._started = False
        """True if the first step is over, in which loaders start, kernels are chosen and blocks are compiled."""
        self._paces = Paces(world.size)
        self.loss = torch.zeros((), device=world.device)
        """The sum of this rank's losses in the interval, on the device, where graphs add to it."""
        self.streak = torch.zeros((), dtype=torch.int32, device=world.device)
        """Number of steps in a row, up to the last one, whose loss on this rank was not finite."""
        self.restart()

    def restart(self) -> None:
        """Begin a new interval, as after an evaluation; the one before is dropped unless it has been recorded."""
        self._closed: _Interval | None = None  # not yet recorded
        self.loss.zero_()
        self._steps: list[SyncStats] = []
        self._fetches: list[tuple[Timestamp, Timestamp]] = []
        self._link_begun = self._link_bytes()
        self._begun = record_timestamp(self._world.device)

    def fetch(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the next batch, and count the time that the device waits for it.

        The wait lasts from the end of the device's work until the batch is ready. On a GPU it includes decoding, copies
        and normalisation on its stream, but is zero while the host is ahead of the device.
        """
        here.enter("data")
        begun = record_timestamp(self._world.device)
        batch = next(batches)
        if self._started:
            self._fetches.append((begun, record_timestamp(self._world.device)))
        return batch

    def add_loss(self, loss: Tensor) -> None:
        """Add this rank's loss in a step, on the device."""
        self.loss += loss
        self.streak.add_(1).mul_(loss - loss != 0)  # 0 where the loss is finite

    def add_step(self, stats: SyncStats) -> None:
        """Count a step, with its costs."""
        self._steps.append(stats)
        self._started = True

    def report(self, record: MetricLogger, step: int, epoch: int, lr: float) -> None:
        """Close the interval and record it; on a GPU, record the one before instead.

        Every rank must call it.

        Args:
            record: Logger of the run.
            step: Steps taken so far.
            epoch: Epoch of the last step, from 1.
            lr: Learning rate of the last step.

        Raises:
            NonFiniteLoss: On all ranks alike, if losses have not been finite for too long.
        """
        if not self._steps:
            return
        reached = self._link_bytes()
        values = (self.loss, self.streak, self._scale.scale, self._scale.skipped)
        own = _on_host(torch.stack([value.double() for value in values]))
        ended = record_timestamp(self._world.device)
        linked = reached - self._link_begun
        if self._world.device.type != "cpu":
            self.flush(record)
        closed = _Interval(step, epoch, lr, self._steps, self._fetches, self._begun, ended, linked, own)
        if self._world.device.type == "cpu":
            self._record(closed, record)
        self.restart()
        self._closed = None if self._world.device.type == "cpu" else closed
        self._link_begun = reached  # count what a deferring engine sends between the intervals

    def flush(self, record: MetricLogger) -> None:
        """Record the closed interval, if there is one, waiting for the device.

        Every rank must call it.

        Raises:
            NonFiniteLoss: As ``report``.
        """
        if self._closed is not None:
            interval, self._closed = self._closed, None
            self._record(interval, record)

    def _record(self, interval: _Interval, record: MetricLogger) -> None:
        """Record the interval: means of losses and bytes over ranks, maxima of data waits: if one waits, all do."""
        here.enter("record")
        seconds = seconds_between(interval.begun, interval.ended)  # waits until the losses are on the host
        waits = [seconds_between(begun, there) for begun, there in interval.fetches]
        passed = seconds_between(interval.fetches[0][0], interval.ended) if waits else 0.0
        loss, streak, *scaling = interval.own.tolist()
        sent = sum(stats.sent_bytes for stats in interval.steps)
        ended = 0 < self._most <= streak
        exposed = [stats.exposed.seconds() for stats in interval.steps if stats.exposed is not None]
        own = [loss, sent, interval.linked, ended, sum(waits), passed, seconds - sum(exposed)]
        rows = gather_rows(own)
        loss, sent, linked, spoilt = rows.sum(0)[:4].tolist()
        waited, passed = rows.amax(0)[4:6].tolist()
        self._outcome.add_wait(waited, passed)
        step, count, of = interval.step, len(interval.steps), self._world.size * len(interval.steps)
        record("data", step, wait_pct=100 * waited / passed if passed else 0.0)
        record("speed", step, images_per_s=count * self._global_batch / seconds)
        if self._world.is_main:
            self._paces.add(rows[:, 6], count)
        record(
            "sync",
            step,
            **({"exposed_ms": 1e3 * sum(exposed) / len(exposed)} if exposed else {}),
            sent_MB=sent / of / 1e6,
            **({} if math.isnan(linked) else {"link_MB": linked / of / 1e6}),
            launches=sum(stats.launches for stats in interval.steps) / count,
        )
        for decision in (stats.decision for stats in interval.steps if stats.decision):
            record(
                "choice", step, engine=next(p.engine for p in decision if p.chosen),
                predicted_ms={p.engine: 1e3 * p.step_s for p in decision},
                exact={p.engine: p.exact for p in decision},
            )  # fmt: skip
        if scale := self._scale.metrics(*scaling):
            record("precision", step, **scale)
        record("train", step, epoch=interval.epoch, loss=loss / of, lr=interval.lr)
        if spoilt:
            raise NonFiniteLoss

    def _link_bytes(self) -> float:
        # Network cards may read GPU memory past the kernel, which then counts nothing.
        return link_bytes(self._world) if self._world.device.type == "cpu" else math.nan


def _on_host(values: Tensor) -> Tensor:
    """Return a host copy that is valid once the stream has reached it; the host does not wait."""
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    return host.copy_(values, non_blocking=True)
