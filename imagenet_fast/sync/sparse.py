"""Coarse-grained sparse communication: only the chunks of the pool that matter most travel, the rest waits its turn.

After GradientFlow (arXiv 1902.06855): the pool is cut into chunks of a fixed size, all ranks agree on the chunks'
L1 norms, and the largest are sent. What is not sent stays in the pool and grows until it is; its weights and their
momentum stand still meanwhile. The chunks for a step are chosen from the norms of the step before, so they can leave
while backward goes on, and the norms are agreed on during the next forward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from imagenet_fast.recipe.engines import Collective
from imagenet_fast.sync.collectives import all_reduce, usual_collective
from imagenet_fast.sync.collectives.butterfly import butterfly
from imagenet_fast.sync.engine import Stopwatch, SyncEngine, SyncStats
from imagenet_fast.sync.lane import Lane, Peers, Transfer
from imagenet_fast.sync.pool import GradientPool
from imagenet_fast.sync.span import Span


class Sparse(SyncEngine):
    """Sends all but ``sparsity`` of the chunks of ``chunk`` elements, fused until ``threshold`` bytes on the wire.

    The first ``dense_steps`` steps send everything, over the next ``ramp_steps`` the share that stays grows to
    ``sparsity``. No chunk stays longer than twice as long as it would if all took turns.
    """

    keeps = True

    def __init__(
        self, pool: GradientPool, wire: torch.dtype, sparsity: float, chunk: int, dense_steps: int, ramp_steps: int,
        threshold: float, collective: Collective | None,
    ) -> None:  # fmt: skip
        self._pool = pool
        self._wire = wire
        self._sparsity = sparsity
        self._chunk = chunk
        self._dense_steps = dense_steps
        self._ramp_steps = ramp_steps
        self._threshold = threshold
        self._lane = Lane(pool.buffer.device)
        self._collective = collective or usual_collective(pool.buffer, wire, self._lane)
        self._chunks = -(-pool.buffer.numel() // chunk)
        self._step = 0
        self._scores = torch.zeros(self._chunks, device=pool.buffer.device)
        self._agreed: Transfer | None = None  # on the scores
        self._ages = torch.zeros(self._chunks, dtype=torch.int64)  # steps since a chunk was last sent
        self._selected = list(range(self._chunks))
        self._next = 0  # the first of the selected chunks that has not left
        self._packed = 0  # the first that is not ready to leave
        self._messages: list[tuple[list[slice], Tensor, Transfer]] = []

    @property
    def sent(self) -> list[slice]:
        return self._parts(self._selected)

    def begin(self) -> None:
        """Choose the chunks of this step, the same on every rank.

        Where chunks are overdue they go first, the longest waiting before the others: with a mere bonus for age, some
        would starve by their place.
        """
        if self._agreed is not None:
            self._agreed.wait()
        count = math.ceil(self._density(self._step) * self._chunks)
        urgency = torch.where(self._ages >= 2 * math.ceil(self._chunks / count), self._ages, 0)
        by_score = torch.sort(self._scores.cpu(), descending=True, stable=True).indices
        by_urgency = by_score[torch.sort(urgency[by_score], descending=True, stable=True).indices]
        self._selected = sorted(by_urgency[:count].tolist())

    def push(self, span: Span) -> None:
        last = span.index == len(self._pool.spans) - 1
        while self._packed < len(self._selected) and (
            last or (self._selected[self._packed] + 1) * self._chunk <= span.stop
        ):
            self._packed += 1
            if (self._packed - self._next) * self._chunk * self._wire.itemsize >= self._threshold:
                self._launch()

    def finish(self) -> SyncStats:
        exposed = Stopwatch(self._pool.buffer.device)
        stats = SyncStats(exposed)
        if self._packed > self._next:
            self._launch()
        for parts, message, transfer in self._messages:
            label = f"{len(parts)} runs of chunks"
            with exposed(label):
                transfer.wait()
            stats.add(label, transfer)
            if len(parts) > 1:
                torch._foreach_copy_([self._pool.buffer[p] for p in parts], _unpacked(message, parts))
        self._messages.clear()
        self._next = self._packed = 0
        self._ages += 1
        self._ages[self._selected] = 0
        self._step += 1
        if self._agreed is not None:
            stats.add("the chunks' norms", self._agreed)
            self._agreed = None
        if self._density(self._step) < 1:
            self._agree()
        return stats

    def state_dict(self) -> dict[str, Any]:
        """What this rank has not sent, and what decides when it will be. Differs between ranks."""
        if self._agreed is not None:
            self._agreed.wait()
        residual = self._pool.buffer.clone()
        for part in self.sent:
            residual[part] = 0
        return {"step": self._step, "residual": residual, "scores": self._scores.clone(), "ages": self._ages.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._pool.buffer.copy_(state["residual"])
        self._scores.copy_(state["scores"])
        self._ages.copy_(state["ages"])
        self._selected = []  # nothing of the last step's is in the pool

    def _density(self, step: int) -> float:
        """The share of the chunks that leaves in a step."""
        ramped = min(1.0, (step - self._dense_steps + 1) / (self._ramp_steps + 1))
        return 1.0 if step < self._dense_steps else 1 - self._sparsity * ramped

    def _launch(self) -> None:
        parts = self._parts(self._selected[self._next : self._packed])
        values = [self._pool.buffer[part] for part in parts]
        message = torch.cat(values) if len(values) > 1 else values[0]
        self._messages.append((parts, message, all_reduce(message, self._wire, self._collective, self._lane)))
        self._next = self._packed

    def _agree(self) -> None:
        """Start adding up every chunk's L1 norm over ranks: of the sent mean where it was sent, else of what is left.

        The first are taken here and now, since the next step sets them to zero; the others stand still till then.
        """
        sent_norms = torch._foreach_norm([self._pool.buffer[p] for n in self._selected for p in self._parts([n])], 1)

        def carry(peers: Peers) -> None:
            whole, rest = divmod(self._pool.buffer.numel(), self._chunk)
            chunks = self._pool.buffer[: whole * self._chunk].view(whole, self._chunk)
            torch.linalg.vector_norm(chunks, 1, dim=1, out=self._scores[:whole])
            if rest:
                self._scores[whole] = self._pool.buffer[-rest:].norm(1)
            self._scores[self._selected] = torch.stack(sent_norms)
            butterfly(self._scores, torch.float32, peers)

        self._agreed = self._lane.start(carry)

    def _parts(self, chunks: list[int]) -> list[slice]:
        """The pool's elements of rising ``chunks``, neighbours as one."""
        parts: list[slice] = []
        for number in chunks:
            begin, end = number * self._chunk, min((number + 1) * self._chunk, self._pool.buffer.numel())
            if parts and parts[-1].stop == begin:
                parts[-1] = slice(parts[-1].start, end)
            else:
                parts.append(slice(begin, end))
        return parts


def _unpacked(message: Tensor, parts: list[slice]) -> list[Tensor]:
    return list(message.split([part.stop - part.start for part in parts]))
