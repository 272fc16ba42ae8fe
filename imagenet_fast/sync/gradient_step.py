"""One step of a pool: from the gradients that backward produces to the engine that sends them, and to the update.

Backward's hooks fire in an order of their own. The step pushes slots to the engine strictly in pool order, which is the
same on every rank. It copies gradients into the pool, many at once, when the engine is about to send them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.sync import contract
from imagenet_fast.sync.contract import StepState
from imagenet_fast.sync.engine import SyncEngine, SyncStats
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.param_slot import USED, ParamSlot
from imagenet_fast.sync.pending import PendingUpdate, Readers, Update


class Owner(Protocol):
    """What a step needs of its pool."""

    engine: SyncEngine
    gradients: GradientBuffer
    readers: Readers
    lock: threading.RLock
    lockstep: bool
    current: GradientStep
    knows_order: bool = False
    """True once the order of gradients has been learned or loaded."""
    learned: list[ParamSlot] | None = None
    """The order that the next step adopts."""
    largest: float | None = None
    """The magnitude above which a gradient counts as infinite; None: gradients are not checked."""
    syncing: bool = True
    """True if a backward pushes its gradients, as outside of ``no_sync``."""
    pending: PendingUpdate | None = None
    """The last update that was deferred."""

    def settle(self) -> None:
        """Carry out every deferred update."""


class GradientStep:
    """The gradients of one step. Its end is the beginning of the next one, a new object.

    Autograd produces a fresh tensor that is copied, rather than accumulating into the pool. That costs two passes over
    memory instead of four for a memset and an in-place add. Later micro-steps of one step do add in place. Until a
    message is about to leave, its gradients have their own memory.
    """

    def __init__(self, pool: Owner) -> None:
        """Begin a step of ``pool``, whose layout and engine stay until its end."""
        self._pool = pool
        pool.gradients.fill = self.fill
        self.state = StepState.OPEN
        self.stats: SyncStats | None = None
        """The cost of the synchronisation, once all has been sent."""
        self.found_inf: Tensor | None = None
        """1 if a gradient cannot be used on any rank, else 0, once all has been sent; None if none is checked."""
        self._late: set[ParamSlot] | None = None  # unread when the first gradient came; None before
        self._ready = bytearray(len(pool.gradients.slots))  # by slot: whether its gradient may be sent
        self._front = 0  # slots before this index have been pushed to the engine
        self._checked = 0  # slots before this index have been checked
        self._magnitudes: list[Tensor] = []  # the largest magnitudes found
        self._unused: set[ParamSlot] = set()  # slots that this rank's backward has not reached
        self._came: dict[ParamSlot, Tensor] = {}  # gradients that ``fill`` has still to take
        self._taken: dict[ParamSlot, Tensor] = {}  # gradients, which become means where they are
        self._gpu = pool.gradients.values.device.index if pool.gradients.values.is_cuda else None
        self._stream: torch.cuda.Stream | None = None  # of the last hook
        self.failed: dict[ParamSlot, int] = {}
        """If the update has failed: the slots, with the version of each parameter then."""

    def on_gradient(self, slot: ParamSlot) -> None:
        """Accept the gradient of ``slot``, which backward has produced, and push what is due."""
        pool = self._pool
        if not pool.syncing and self.state in (StepState.MEANS, StepState.DONE):
            self.state = StepState.DONE  # of another network's loss, after the optimizer's own step
            return
        contract.check(self.state, "backward")
        gradient = slot.param.grad
        if gradient is None:
            contract.refuse("taken away", slot)
        is_first = self._late is None
        if late := self._started():
            if slot in late:
                contract.refuse("unseen read", slot)
            if is_first:  # a later forward of this step may read them, now that they are updated
                torch.autograd.Variable._execution_engine.queue_callback(late.clear)
        if self._ready[slot.index]:
            contract.refuse("second backward", slot)
        contract.check_gradient(slot, gradient, pool.gradients.values)
        if pool.syncing:
            self.state = StepState.SENDING
            self._take(slot, gradient)
            self._ready[slot.index] = True
            # The last waits for ``end_backward``, or a rank's lone backward would pass; ``drop`` writes into it.
            self._push(pool.gradients.last)
        elif not pool.engine.sends_part:  # which adds a gradient to its residual, so takes one only once a step
            self._take(slot, gradient)
            self.fill()
            slot.param.grad = self._taken[slot]

    def end_backward(self) -> SyncStats:
        """Send what backward did not reach, with a gradient of zero, and all that is left."""
        contract.check(self.state, "end_backward")
        if self.state < StepState.SENT:
            pool = self._pool
            self._started()
            for slot in pool.gradients.slots:
                gradient = slot.param.grad
                if self._ready[slot.index]:
                    if gradient is not pool.gradients.placeholders[slot.index]:
                        contract.refuse("change", slot)
                    continue
                contract.check_gradient(slot, gradient, pool.gradients.values)
                if gradient is None:
                    self._unused.add(slot)
                    self._leave_out(slot)
                else:
                    self._take(slot, gradient)
            self.fill()
            self._push_all()
            self.found_inf = self._any_overflow()
            self.stats = pool.engine.finish()
            self.state = StepState.SENT
            if not pool.knows_order:
                pool.knows_order, pool.learned = True, pool.gradients.agreed_order(self._taken)
        assert self.stats is not None
        return self.stats

    def means(self) -> None:
        """Wait for all gradients, and put the means into ``p.grad``."""
        contract.check(self.state, "finish")
        self.end_backward()
        if self.state is StepState.SENT:
            pool = self._pool
            self._wait()
            self.used(pool.gradients.slots)
            if (sent := pool.engine.sent_slices()) is not None:
                pool.gradients.show_only(sent)
            self.state = StepState.MEANS

    def apply(self, update: Update, at_once: bool) -> None:
        """Apply ``update`` now, or put it off if the engine defers and ``p.grad`` was not asked for."""
        contract.check(self.state, "step")
        self.end_backward()
        pool, engine = self._pool, self._pool.engine
        elements = engine.sent_slices()
        limited: Update = update if elements is None else lambda params: update(params, elements)
        slots = pool.gradients.slots
        if engine.defers and not at_once and self.state is StepState.SENT:
            unseen = pool.readers.unseen()
            pool.pending = PendingUpdate(engine, slots, self.used, limited, pool.lock, pool.lockstep)
            pool.pending.settle(unseen)
        else:
            if self.state is StepState.SENT:
                self._wait()
                due = self.used(slots)
            else:
                due = [slot.param for slot in slots if slot.param.grad is not None]
            self._taken.clear()  # what is left of them is in ``p.grad``
            self.state = StepState.DONE
            try:
                limited(due)
            except BaseException:
                self.failed = {slot: slot.param._version for slot in slots}
                raise
            if engine.sends_part or engine.defers:
                _forget_gradients(slots)
        self.state = StepState.DONE

    def drop(self) -> None:
        """Send zeros for what has not been sent, and last NaN, for a rank that takes the step. Forget it all."""
        contract.check(self.state, "drop")
        pool = self._pool
        self._start()
        self.fill()
        for slot in pool.gradients.slots:
            if not self._ready[slot.index]:
                self._leave_out(slot)
        last = pool.gradients.slots[pool.gradients.last]
        pool.gradients.extent(last)[:-1] = math.nan
        pool.gradients.values[last.flag] = USED
        pool.engine.spoil()
        self._push_all()
        self._any_overflow()
        self.stats = pool.engine.finish()
        self._wait()
        pool.engine.forget_nonfinite()
        self.state = StepState.DONE
        _forget_gradients(pool.gradients.slots)

    def used(self, slots: Sequence[ParamSlot]) -> list[nn.Parameter]:
        """Put the gradients of ``slots`` into ``p.grad``, and return the parameters to update.

        ``p.grad`` is None instead where no rank has used the parameter. Costs a device synchronisation if this rank has
        not used some of them.
        """
        gradients, left_out = self._pool.gradients, set()
        if unused := [slot for slot in slots if slot in self._unused]:
            flags = torch.stack([gradients.values[slot.flag] for slot in unused]).tolist()
            left_out = {slot for slot, flag in zip(unused, flags, strict=True) if not flag}
        for slot in slots:
            slot.param.grad = None if slot in left_out else self._taken[slot]
        return [slot.param for slot in slots if slot not in left_out]

    def fill(self) -> None:
        """Copy into the pool the gradients that it lacks, and check the range of those pushed, if the pool guards them.

        The engine calls it before it sends them.
        """
        pool, buffer = self._pool, self._pool.gradients
        if self._came:
            pool.engine.store_gradients([self._taken[slot] for slot in self._came], [*self._came.values()])
            self._came = {}
        if pool.largest is not None and self._checked < self._front:
            since = buffer.values[buffer.slots[self._checked].start : buffer.slots[self._front - 1].stop]
            self._magnitudes.append(torch.linalg.vector_norm(since, math.inf))
            self._checked = self._front

    def _started(self) -> set[ParamSlot]:
        """Before the first gradient, check what is trained; return the slots that no forward has read by then."""
        if self._late is None and (model := self._pool.gradients.model) is not None:
            contract.check_strays(model, self._pool.gradients.slot_of)
        return self._start()

    def _start(self) -> set[ParamSlot]:
        """Before the first gradient, carry out the updates that are left.

        Autograd calls each hook on its forward's stream. Gradients of one stream are taken there, before another's.
        """
        last, gpu = self._stream, self._gpu
        if gpu is not None and (last is None or last.cuda_stream != torch._C._cuda_getCurrentRawStream(gpu)):
            self._stream = torch.cuda.current_stream(gpu)
            if last is not None:
                with torch.cuda.stream(last):
                    self.fill()
                self._stream.wait_stream(last)
        if self._late is None:
            pool = self._pool
            contract.refuse_late_group(pool.gradients.topology)
            self._late = set() if pool.pending is None else pool.pending.unread
            pool.settle()
            pool.engine.start()
            pool.gradients.mark_used()
        return self._late

    def _take(self, slot: ParamSlot, gradient: Tensor) -> None:
        """Put a placeholder into ``p.grad``, and have ``fill`` copy the gradient, unless it is in its place already.

        Where nothing is sent, it stays where it is, unless a fused optimizer would mix up its strides.
        """
        pool, buffer = self._pool, self._pool.gradients
        view = buffer.view(slot)
        if pool.engine.is_local and pool.largest is None and gradient.stride() == view.stride():
            view = gradient
        elif gradient is not view:
            self._came[slot] = gradient
        self._taken.pop(slot, None)  # the last backward's order counts
        self._taken[slot] = view
        slot.param.grad = buffer.placeholders[slot.index]

    def _leave_out(self, slot: ParamSlot) -> None:
        """Send zero for a parameter that this rank has not used."""
        self._pool.engine.store_unused(self._pool.gradients.extent(slot))
        self._taken[slot] = self._pool.gradients.view(slot)

    def _push(self, stop: int) -> None:
        """Push to the engine every slot before ``stop`` that is ready and has no unready slot before it."""
        slots, engine = self._pool.gradients.slots, self._pool.engine
        while self._front < stop and self._ready[self._front]:
            self._front += 1
            engine.gradient_ready(slots[self._front - 1])

    def _push_all(self) -> None:
        self._ready = bytearray(b"\1") * len(self._ready)
        self._push(len(self._ready))

    def _wait(self) -> None:
        engine = self._pool.engine
        for slot in self._pool.gradients.slots if engine.defers else ():
            engine.wait(slot)

    def _any_overflow(self) -> Tensor | None:
        """Return 1 if any rank found an unusable gradient in this step, else 0; None if gradients are not checked."""
        largest, topology = self._pool.largest, self._pool.gradients.topology
        if largest is None:
            return None
        self.fill()
        overflow = (~(torch.stack(self._magnitudes).max() <= largest)).float()
        if topology.size > 1:
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group=topology.group)
        return overflow


def _forget_gradients(slots: Sequence[ParamSlot]) -> None:
    for slot in slots:
        slot.param.grad = None
