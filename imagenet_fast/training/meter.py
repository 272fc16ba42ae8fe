"""What happened between two log lines, kept on the device until a line is due."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from imagenet_fast.ranks.agreement import largest, total
from imagenet_fast.ranks.counter import link_bytes
from imagenet_fast.ranks.whereabouts import here
from imagenet_fast.ranks.world import World
from imagenet_fast.record import Outcome, Record
from imagenet_fast.sync import SyncStats
from imagenet_fast.sync.marks import Mark, mark, seconds_between
from imagenet_fast.training.precision import LossScale
from imagenet_fast.training.streak import NotFinite, Streak


class Meter:
    """Averages over the steps since the last report, which alone waits for the device.

    A report ends the run where ``streak`` has come to ``most`` steps on any rank; 0: it never does. It adds what was
    waited for data to ``outcome``.
    """

    def __init__(
        self, world: World, global_batch: int, scale: LossScale, streak: Streak, most: int, outcome: Outcome
    ) -> None:
        self._world = world
        self._global_batch = global_batch
        self._scale = scale
        self._streak = streak
        self._most = most
        self._outcome = outcome
        self._started = False
        """Whether its first step is over, for which loaders start, kernels are chosen and blocks compiled."""
        self.restart()

    def restart(self) -> None:
        """Begin a new interval, for instance after an evaluation."""
        self._loss = torch.zeros((), device=self._world.device)
        self._steps: list[SyncStats] = []
        self._fetches: list[tuple[Mark, Mark]] = []
        self._at_start = 0
        """Of the fetches, those of the first step."""
        self._link_begun = self._link_bytes()
        self._begun = time.perf_counter()

    def fetch(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The next batch. What passes on the device, from the end of its work until the batch is there, counts as
        waiting for data: on a GPU that is also what is decoded, copied or normalised on its stream, but nothing where
        the host is ahead of it."""
        here.enter("data")
        begun = mark(self._world.device)
        batch = next(batches)
        self._fetches.append((begun, mark(self._world.device)))
        return batch

    def add_step(self, stats: SyncStats, loss: Tensor) -> None:
        """What a step cost, and this rank's loss in it."""
        self._steps.append(stats)
        if not self._started:
            self._started, self._at_start = True, len(self._fetches)
        self._loss += loss
        self._streak.add(loss)

    def report(self, record: Record, step: int, epoch: int, lr: float) -> None:
        """Record the interval. Every rank must call it: losses and bytes are averaged over ranks.

        Raises NotFinite, on all ranks alike, where losses have not been finite for too long.
        """
        steps = len(self._steps)
        if not steps:
            return
        own_loss, reached = float(self._loss), self._link_bytes()
        own_s = time.perf_counter() - self._begun  # before ranks wait for each other
        own_sent = sum(s.sent_bytes for s in self._steps)
        spoilt = float(0 < self._most <= int(self._streak))
        *sums, spoilt = total(own_loss, own_sent, reached - self._link_begun, spoilt, device=self._world.device)
        loss, sent, linked = (value / self._world.size / steps for value in sums)
        seconds = time.perf_counter() - self._begun
        waited = self._add_waiting()
        here.enter("record")
        record("data", step, wait_pct=100 * waited / seconds)
        record("speed", step, images_per_s=steps * self._global_batch / seconds)
        exposed = [s.exposed.seconds() for s in self._steps if s.exposed is not None]
        if exposed:
            here.took(steps, own_s - sum(exposed))
        record(
            "sync",
            step,
            **({"exposed_ms": 1e3 * sum(exposed) / steps} if exposed else {}),
            sent_MB=sent / 1e6,
            **({} if math.isnan(linked) else {"link_MB": linked / 1e6}),
            launches=sum(s.launches for s in self._steps) / steps,
        )
        for decision in (s.decision for s in self._steps if s.decision):
            record(
                "choice", step, engine=next(p.engine for p in decision if p.chosen),
                predicted_ms={p.engine: 1e3 * p.step_s for p in decision},
                exact={p.engine: p.exact for p in decision},
            )  # fmt: skip
        if scale := self._scale.told():
            record("precision", step, **scale)
        record("train", step, epoch=epoch, loss=loss, lr=lr)
        if spoilt:
            raise NotFinite
        self.restart()
        self._link_begun = reached  # what an engine that defers is sending meanwhile is not lost

    def _add_waiting(self) -> float:
        """Seconds that the rank waited for data that waited longest: where one is late, all are. Every rank must ask.

        The run's share leaves out its first step, and begins with the second one's first batch.
        """
        device, after = self._world.device, self._at_start
        waits = [seconds_between(begun, there) for begun, there in self._fetches]
        passed = seconds_between(self._fetches[after][0], mark(device)) if after < len(waits) else 0.0
        waited, counted, passed = largest(sum(waits), sum(waits[after:]), passed, device=device)
        self._outcome.wait_for_data(counted, passed)
        return waited

    def _link_bytes(self) -> float:
        """NaN on GPUs, too, whose network cards may read their memory past the kernel."""
        return link_bytes(self._world) if self._world.device.type == "cpu" else math.nan
