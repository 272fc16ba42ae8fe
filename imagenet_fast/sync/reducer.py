"""The state machine of one step: from the gradients that backward produces to the engine that sends them.

Backward's hooks fire in an order of their own. The reducer copies each gradient into the pool, and pushes slots to the
engine strictly in pool order, which is the same on every rank.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from imagenet_fast.sync import loop_checks
from imagenet_fast.sync.deferred_update import DeferredUpdate
from imagenet_fast.sync.engine import SyncEngine, SyncStats
from imagenet_fast.sync.gradient_buffer import ArrivalOrder, GradientBuffer
from imagenet_fast.sync.param_slot import USED, ParamSlot
from imagenet_fast.sync.topology import Topology


class Reducer:
    """The gradients of one step after another, from backward to the engine. ``GradientPool`` is its interface.

    Autograd produces a fresh tensor that is copied, rather than accumulating into the pool. That costs two passes over
    memory instead of four for a memset and an in-place add. Later micro-steps of one step do add in place.
    """

    def __init__(self, buffer: GradientBuffer, topology: Topology, model: nn.Module | None) -> None:
        """Start before the first step.

        Args:
            buffer: The buffer and its slots.
            topology: The ranks to agree with on the order and on overflows.
            model: The model whose parameters must stay those of ``buffer``; None: not known.
        """
        self.buffer, self.topology = buffer, topology
        self.engine: SyncEngine | None = None
        self.deferral: DeferredUpdate | None = None
        self.order = ArrivalOrder()
        self.largest: float | None = None
        """The magnitude above which a gradient counts as infinite; None: gradients are not checked."""
        self.found_inf: Tensor | None = None
        """1 if a gradient of the last step could not be used on any rank, else 0; None if gradients are not checked."""
        self.sync = True
        """True if a backward pushes its gradients, as outside of ``no_sync``."""
        self.lock = threading.RLock()  # autograd may run several threads
        self.stats: SyncStats | None = None
        """The last step's cost, after its last backward and until the next step starts."""
        self.came_late = False
        """True if backward has produced gradients since the step's last one."""
        self.is_open = False
        """True if the engine has begun this step."""
        self.means_here = False
        """Whether ``p.grad`` holds the means, which the user may have changed."""
        self.updated = False
        """True if this step's gradients have been applied, or will be."""
        self.stepped: list[Optimizer] = []
        """The optimizers that have stepped in this step."""
        self.begun_at = 0
        """When this step's backward began, as ``loop_checks.now`` counts."""
        self.scaled = False
        """True once a ``GradScaler`` has stepped an optimizer in this step."""
        self._watch = loop_checks.ModelWatch(model)
        self._ready = [False] * len(buffer.slots)  # by slot: whether its gradient may be sent
        self._front = 0  # slots before this index have been pushed to the engine
        self._measured = 0  # slots before this index have been measured
        self._magnitudes: list[Tensor] = []  # the largest magnitudes found in this step
        # Slots that this rank's backward did not reach, in the last step whose gradients are here or pending.
        self._unreached: dict[ParamSlot, None] = {}
        self._zeroed = False  # whether zero_grad has begun this step
        self._forwarded = False  # whether a training forward has run since zero_grad
        self._reached = False  # whether this step's last backward has reached any parameter
        self._cancelled: set[ParamSlot] = set()  # slots whose p.grad was set to None while in flight
        self._nulled: set[ParamSlot] = set()  # slots whose p.grad was zeroed while in flight
        self._flag_behind: set[ParamSlot] = set()  # slots whose flag is not yet marked for this step's gradient
        self._last_ended = False  # whether nothing of the previous step is pending any more
        self._end_awaited = False  # whether a callback at the end of this backward is queued

    @property
    def slots(self) -> list[ParamSlot]:
        """The slots of the gradients, in the order in which they are pushed."""
        return self.buffer.slots

    def zero_grad(self, drop: bool) -> None:
        """Start a step, and drop an unfinished one, as ``GradientPool.zero_grad`` describes."""
        with self.lock:
            engine = self.engine
            if drop and self.stats is not None and not self.updated:
                loop_checks.refuse_late_drop(self.topology, self.found_inf)
            if drop and self.updated:
                self._start()  # the last step is over, so it is a new one that other ranks may have begun
            if engine is not None and self.stats is None and (drop or self._forwarded or any(self._ready)):
                if all(self._ready) and not drop:
                    warnings.warn(
                        "pool.zero_grad() drops gradients that had all been sent: end each step with "
                        "pool.step(optimizer) or pool.finish()",
                        stacklevel=3,
                    )
                self._drop()
            elif self.deferral is not None and engine is not None:
                for slot in self.slots:
                    if not self.deferral.waits(slot):
                        engine.wait(slot)  # it may be in flight, if the step was not applied
            self._start()
            self._zeroed = True
        for slot in self.slots:
            slot.param.grad = None
        if self.deferral is not None:
            self.deferral.refuse_failed()

    def before_forward(self, *_: object) -> None:
        """Note that a training forward has run. Registered as a pre-forward hook on the model."""
        loop_checks.refuse_ddp()
        if self._zeroed and self.stats is None and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._forwarded = True

    def on_gradient(self, param: nn.Parameter) -> None:
        """Handle a gradient that backward has produced. Registered as a hook on every parameter.

        Queue ``_hide_rest`` for the end of this backward, as DDP does. Autograd does not call it after an exception.
        """
        with self.lock:
            self.collect(param)
            if self.sync and not self._end_awaited and self.stats is None and self.engine is not None:
                torch.autograd.Variable._execution_engine.queue_callback(self._hide_rest)
                self._end_awaited = True

    def collect(self, param: nn.Parameter) -> None:
        """Copy the gradient of ``param`` into the pool, and push every slot that is due."""
        with self.lock:
            slot = self.buffer.slot_of[param]
            if self.deferral is not None and self.deferral.waits(slot):
                raise RuntimeError(
                    f"{slot.name} was read before its update: not by the forward of its own module or of one above, as "
                    "in the first step; call pool.settle() before such a forward"
                )
            if self.stats is not None:  # the step is over, so this gradient stays where autograd has put it
                self.came_late = True
                return
            if self._ready[slot.index]:
                raise RuntimeError(
                    f"a second backward reached {slot.name} in one step, after its gradient had left; wrap all but "
                    "the last in pool.no_sync(), begin steps with pool.zero_grad(), checkpoint without use_reentrant"
                )
            loop_checks.refuse_gradient(slot.name, param.grad)
            if self.engine is None:
                self._take(None, slot)
            # An engine that leaves elements behind adds to its residual, so it takes a gradient only once a step.
            elif self.sync or not self.engine.sends_part:
                self._begin()
                self._take(self.engine, slot)
            if self.sync and self.engine is not None:
                self._hide(slot)
                self._ready[slot.index] = True
                self.order.note(slot)
                self._advance(self.engine)

    def end_backward(self) -> SyncStats:
        """End the step's last backward, as ``GradientPool.end_backward`` describes."""
        assert self.engine is not None, "attach an engine before the first step"
        if self.stats is not None and not self.came_late:
            return self.stats
        in_time = self.stats is None
        with self.lock:
            if not in_time:  # no zero_grad since the last step: nothing has been sent, and nothing overlaps
                self._start()
            self._end_last_step()
            self._watch.check(self.slots, self.buffer.slot_of)
            self._begin()
            engine = self.engine
            # Then every p.grad was a placeholder, and None was set by the user.
            self._reached = any(self._ready) and not engine.sends_part
            for slot in self.slots:
                self._take_last(engine, slot)
            self._ready = [True] * len(self.slots)
            self._advance(engine)
            self.found_inf = self._any_overflow()
            self._front = self._measured = 0
            self.is_open = False
            self.stats = engine.finish()
            if in_time:
                self.order.agree(self.slots, self.topology, whole=True)
            if not engine.defers:
                for slot, view in zip(self.slots, self.buffer.views, strict=True):
                    slot.param.grad = None if slot in self._cancelled else view
        return self.stats

    def check_step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Raise the errors of ``GradientPool.step`` if ``optimizer`` may not step now, by ``scaler`` if any."""
        if self.engine is not None:
            loop_checks.refuse_unfit(self.engine, optimizer, scaler is not None)
        if not self.came_late:
            loop_checks.refuse_second_step(optimizer, self.stepped, scaler is not None, self.scaled)
            if scaler is not None and (self.is_open or self.stats is not None):  # else this step has no backward yet
                loop_checks.refuse_updated(scaler, self.begun_at)

    def step_scaled(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Step ``optimizer`` by ``scaler`` with gradients that are here, and update the scaler."""
        self.updated = self.scaled = True
        self.stepped.append(optimizer)
        scaler.step(optimizer)
        scaler.update()
        loop_checks.note_update(scaler)

    def measure(self) -> None:
        """Check the gradients pushed so far, if ``largest`` is set."""
        if self.largest is not None and self._measured < self._front:
            since = self.buffer.values[self.slots[self._measured].start : self.slots[self._front - 1].stop]
            self._magnitudes.append(torch.linalg.vector_norm(since, math.inf))
            self._measured = self._front

    def used(self, slots: Sequence[ParamSlot]) -> list[nn.Parameter]:
        """Put the gradients of ``slots`` into ``p.grad``, and return the parameters to update.

        ``p.grad`` is None instead where no rank has used the parameter, or where the user set it to None while it was
        in flight. Costs a device synchronisation for each parameter that this rank has not used.
        """
        for slot in slots:
            if slot in self._nulled:
                self.buffer.views[slot.index].zero_()
            slot.param.grad = self.buffer.gradient(slot)
        left_out = {slot for slot in slots if slot in self._unreached and not self.buffer.values[slot.flag].item()}
        left_out |= self._cancelled.intersection(slots)
        for slot in left_out:
            slot.param.grad = None
        return [slot.param for slot in slots if slot not in left_out]

    def settle(self) -> None:
        """Carry out every deferred update."""
        if self.deferral is not None:
            self.deferral.settle()

    def lay_out(self, order: Sequence[ParamSlot]) -> None:
        """Lay the buffer out in ``order``, moving its values along. Carry out deferred updates first."""
        self.settle()
        self.buffer.lay_out(order)
        self._unreached, self._magnitudes = {}, []
        self._ready, self._front, self._measured = [False] * len(self.slots), 0, 0
        if self.deferral is not None:
            self.deferral.lay_out(self.slots)

    def learn_order(self, order: Sequence[ParamSlot]) -> None:
        """Adopt ``order`` between steps, with the engine's messages."""
        assert self.engine is not None
        self.order.better = None
        self.settle()
        self.engine.start()  # it may still have to clear what it has sent, which it knows by its place in the pool
        self.lay_out(order)
        self.engine.rebuild_buckets()

    def _start(self) -> None:
        """Reset the state of a step, and adopt a better pool order if one was learned."""
        self.buffer.release()
        self.stepped, self.stats = [], None
        self.is_open = self._zeroed = self._forwarded = self.came_late = self.means_here = self.updated = False
        self._end_awaited = self._last_ended = self.scaled = False
        self._ready, self._front, self._measured = [False] * len(self.slots), 0, 0
        if self.order.better is not None:
            self.learn_order(self.order.better)
        if self.engine is not None:
            self.engine.begin()
            if self.buffer.has_moved():
                self.learn_order(self.slots)

    def _begin(self) -> None:
        """Prepare the engine and the flags before the first gradient of a step."""
        if self.is_open or self.engine is None:
            return
        loop_checks.refuse_late_group(self.topology)
        if self.engine.sends_part:
            self.settle()
            for slot in self.slots:
                self.engine.wait(slot)
        self.engine.begin()  # for loops that start a step without pool.zero_grad
        self.engine.start()
        self._flag_behind = {slot for slot in self.slots if self.deferral is not None and self.deferral.waits(slot)}
        # The flags of deferred slots are left out: their update still has to read them, or they are still in flight.
        self.buffer.mark_used(but=self._flag_behind)
        self.is_open, self.begun_at = True, loop_checks.now()

    def _take(self, engine: SyncEngine | None, slot: ParamSlot) -> None:
        """Copy ``p.grad`` into its place, unless autograd has accumulated it there."""
        gradient, view = slot.param.grad, self.buffer.views[slot.index]
        assert gradient is not None
        if gradient is not self.buffer.pending[slot.index] and gradient is not view:
            if engine is None:
                view.copy_(gradient)
            elif engine.is_local and self.largest is None and gradient.stride() == view.stride():
                self.buffer.adopt(slot, gradient)
                view = gradient
            else:
                engine.store_gradient(view, gradient)
        slot.param.grad = view
        self._unreached.pop(slot, None)
        if slot in self._flag_behind:
            self.buffer.values[slot.flag] = USED

    def _take_rest(self, engine: SyncEngine, slot: ParamSlot) -> None:
        """Take in the gradient of a parameter that the last backward has not reached; zero if there is none."""
        if slot.param.grad is not None:
            self._take(engine, slot)
        elif slot not in self._unreached:
            engine.store_gradient(self.buffer.values[slot.start : slot.flag + 1], None)
            self._unreached[slot] = None
            self._flag_behind.add(slot)

    def _take_last(self, engine: SyncEngine, slot: ParamSlot) -> None:
        """Take in a gradient that has not been pushed by the end of backward, and note changes that the user made.

        Raises:
            RuntimeError: The user replaced the gradient while it was in flight.
        """
        gradient, pending, ready = slot.param.grad, self.buffer.pending[slot.index], self._ready[slot.index]
        if pending.zeroed:
            self._nulled.add(slot)
        if gradient is None and (ready or self._reached):
            self._cancelled.add(slot)
        if not ready and gradient is not pending:
            self._take_rest(engine, slot)
        elif gradient is not pending and gradient is not None:
            raise RuntimeError(
                f"the gradient of {slot.name} was replaced while it was on its way to the other ranks; call "
                "pool.finish() after backward, before gradients are replaced"
            )

    def _hide(self, slot: ParamSlot) -> None:
        pending = self.buffer.pending[slot.index]
        pending.zeroed = False
        slot.param.grad = pending

    def _hide_rest(self) -> None:
        """Take in the parameters that this backward did not reach, with the gradient they have or with zero.

        Called at the end of backward. If another backward of this step reaches them, autograd adds to that gradient. An
        engine that leaves elements behind takes a gradient only once a step, so it takes these at the step's end.
        """
        with self.lock:
            self._end_awaited = False
            if self.engine is None or self.engine.sends_part or self.stats is not None:
                return
            self._end_last_step()
            for slot in self.slots:
                if not self._ready[slot.index] and slot.param.grad is not self.buffer.pending[slot.index]:
                    self._take_rest(self.engine, slot)
                    self._hide(slot)

    def _advance(self, engine: SyncEngine) -> None:
        """Push to the engine every slot that is ready and has no unready slot before it."""
        while self._front < len(self.slots) and self._ready[self._front]:
            slot = self.slots[self._front]
            self._front += 1
            engine.gradient_ready(slot)

    def _end_last_step(self) -> None:
        """Carry out the updates that this step's forward did not reach: new gradients would overwrite theirs."""
        self.settle()
        if not self._last_ended:
            self._unreached, self._cancelled, self._nulled = {}, set(), set()
            self._last_ended = True

    def _any_overflow(self) -> Tensor | None:
        """Return 1 if any rank found an unusable gradient in this step, else 0; None if gradients are not checked."""
        if self.largest is None:
            self._magnitudes = []
            return None
        self.measure()
        largest, self._magnitudes = torch.stack(self._magnitudes).max(), []
        overflow = (~(largest <= self.largest)).float()
        if self.topology.size > 1:
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self.topology.group)
        return overflow

    def _drop(self) -> None:
        """Complete an unfinished step, so that no rank waits for this one, and drop it."""
        self.settle()  # updates that the forward did not reach
        self._begin()
        engine = self.engine
        assert engine is not None
        for slot in self.slots[self._front :]:
            engine.store_gradient(self.buffer.values[slot.start : slot.flag + 1], None)
        self._ready = [True] * len(self.slots)
        self._advance(engine)
        self._magnitudes.append(self.buffer.values.new_full((), math.inf))  # also if everything had been sent by then
        self._any_overflow()
        self._front = self._measured = 0
        engine.finish()
        for slot in self.slots:
            engine.wait(slot)
        engine.forget_nonfinite()
        self.order.agree(self.slots, self.topology, whole=False)
