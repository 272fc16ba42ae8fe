"""Every gradient of a model in one flat buffer, in the order in which backward produces them.

Engines send from this buffer. Neighbouring gradients are one contiguous slice of it, so fusing them into one message
(GradientFlow's lazy all-reduce, arXiv 1902.06855) costs no copy.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from imagenet_fast.sync.arrival_order import ArrivalOrder
from imagenet_fast.sync.consistency import compare_models
from imagenet_fast.sync.copy_hooks import Hook
from imagenet_fast.sync.deferred_update import DeferredUpdate, Update
from imagenet_fast.sync.engine import Elements, SyncEngine, SyncStats
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.layer_timer import LayerTimer
from imagenet_fast.sync.loop_checks import (
    named_parameters,
    refuse_choice,
    refuse_engine_state,
    refuse_gradient,
    refuse_state,
)
from imagenet_fast.sync.param_slot import USED, ParamSlot
from imagenet_fast.sync.per_param_step import needs_all, settle_before_state, snapshot_step
from imagenet_fast.sync.pooled_params import ModelWatch, check_optimizer, forget, register
from imagenet_fast.sync.residual_scale import ResidualScale
from imagenet_fast.sync.topology import Topology


class GradientPool:
    """One flat buffer that holds the gradient of every trainable parameter of a model, last layer first.

    During backward a hook copies each finished gradient into its place, a view with the parameter's own strides (so
    channels_last is kept). Autograd produces a fresh tensor that is copied, rather than accumulating into the view.
    That costs two passes over memory instead of four for a memset and an in-place add. Later micro-steps of one step do
    add in place.

    ``p.grad`` holds:

    - Under ``no_sync``: this rank's own sum, as usual.
    - Between the last backward and ``finish`` or ``step``: a ``PendingGrad``, which must not be used.
    - After ``finish``: the mean over ranks, which the user may change, or None where no rank has used the parameter.
      A parameter whose gradient is None is not updated.
    - After a step, until the next ``zero_grad``: this rank's own gradient again, if a backward runs.

    Hooks fire in an order of their own, but slots are pushed to the engine strictly in pool order. Pool order is the
    same on every rank. In the first step it is the reverse of the order of registration. From the second step on, it is
    the order in which the first rank's backward produced the gradients.

    Behind each gradient is one element (``ParamSlot.flag``) that is nonzero if any rank has used the parameter. The
    update skips a parameter that no rank has used, as DDP does.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        *,
        model: nn.Module | None = None,
        ranks_per_node: int | None = None,
        topology: Topology | None = None,
    ) -> None:
        """Create a pool and register its hooks. Every rank must call it.

        Args:
            parameters: The model; or, where a model's parameters need several pools, the named parameters of this pool.
                All that are trainable must share one dtype and device.
            group: The ranks to average over; None: all.
            model: The model whose forward reads the parameters, where ``parameters`` are named parameters.
            ranks_per_node: The number of ranks on each node; None: ``Topology`` finds which ranks share a node.
            topology: The ranks and nodes, instead of ``group`` and ``ranks_per_node``.

        Raises:
            ValueError: No parameter is trainable; ranks have different parameters or values; two parameters have the
                same name; a parameter is in another pool; dtypes or devices differ or cannot be pooled; or
                ``ranks_per_node`` does not divide the number of ranks.
            TypeError: The parameters have no names.
        """
        model, named = named_parameters(parameters, model)
        # Compare before any check that may fail on one rank only: the other ranks would hang.
        compare_models(named, topology.group if topology else group)
        trainable = {name: p for name, p in named.items() if p.requires_grad}
        if not trainable:
            raise ValueError("the model has no trainable parameter")
        self.model = model
        device = next(iter(trainable.values())).device
        self.topology = topology or Topology(device, group, ranks_per_node)
        owners = {
            p: module for module in ([] if model is None else model.modules()) for p in module.parameters(recurse=False)
        }
        spans = [ParamSlot(0, name, p, owners.get(p), 0, 0) for name, p in reversed(trainable.items())]
        self._places = GradientBuffer(spans, self.topology.line)
        self._guard: float | None = None
        self._lock = threading.RLock()  # autograd may run several threads
        self._ready = [False] * len(spans)  # by slot: whether its gradient may be sent
        self._front = 0  # slots before this index have been pushed to the engine
        self._unreached: dict[
            ParamSlot, None
        ] = {}  # those this rank's backward did not reach, in the last step whose gradients are here or pending
        self._measured = 0  # slots before this index have been measured
        self._largest: list[Tensor] = []  # the largest magnitudes found in this step
        self._engine: SyncEngine | None = None
        self._deferral: DeferredUpdate | None = None
        register(self, trainable)
        self._watch = ModelWatch(model)
        self._hooks = [param.register_post_accumulate_grad_hook(self._on_gradient) for param in trainable.values()]
        if model is not None:
            self._hooks.append(model.register_forward_pre_hook(Hook(self._before_forward), prepend=True))
        self._sync = True
        self._order = ArrivalOrder()
        self._zeroed = False  # whether zero_grad has begun this step
        self._open = False  # whether the engine has begun this step
        self._forwarded = False  # whether a training forward has run since zero_grad
        self._stats: SyncStats | None = None  # set after a step's last backward, until the next step starts
        self._came_late = False  # whether backward has produced gradients since then
        self._means_here = False  # whether p.grad holds the means, which the user may have changed
        self._updated = False  # whether this step's gradients have been applied, or will be
        self._stepped: list[Optimizer] = []  # optimizers that have stepped in this step
        self._reached = False  # whether this step's last backward has reached any parameter
        self._cancelled: set[ParamSlot] = set()  # slots whose p.grad was set to None while in flight
        self._nulled: set[ParamSlot] = set()  # slots whose p.grad was zeroed while in flight
        self._flag_behind: set[ParamSlot] = set()  # slots whose flag is not yet marked for this step's gradient
        self._last_ended = False  # whether nothing of the previous step is pending any more
        self._end_awaited = False  # whether a callback at the end of this backward is queued
        self._residual_scale = ResidualScale(device)
        self.found_inf: Tensor | None = None
        """1 if a gradient of the last step was not finite or too large for the wire on any rank, else 0.

        None without ``guard``.
        """

    @property
    def buffer(self) -> Tensor:
        """The buffer of all gradients, 1-D."""
        return self._places.values

    @property
    def spans(self) -> list[ParamSlot]:
        """The slots of the gradients, in the order in which they are pushed."""
        return self._places.spans

    @property
    def line(self) -> int:
        """The number of elements of which the bounds of slots are multiples."""
        return self._places.line

    def attach(self, engine: SyncEngine) -> None:
        """Push the gradients of every later backward to ``engine``, and close the engine attached before.

        Raises:
            ValueError: The engine defers updates, and the pool has no model.
        """
        if engine.defers and self.model is None:
            raise ValueError("an engine that defers updates needs to see the forward; give the pool model=...")
        if self._engine is not None:
            self._engine.close()
        self._engine = engine
        if self._deferral is not None:
            self._deferral.engine = engine
        elif engine.defers and self.model is not None:
            self._deferral = DeferredUpdate(self.model, engine, self.spans, self.used)

    def guard(self, largest: float) -> None:
        """Check every later gradient before it is sent, and report in ``found_inf``.

        Costs one pass over the gradients and a tiny all-reduce a step.

        Args:
            largest: A gradient with a larger magnitude counts as infinite.
        """
        self._guard = largest

    def measure(self) -> None:
        """Check the gradients pushed so far, if ``guard`` was called. Engines call it before they send them."""
        if self._guard is not None and self._measured < self._front:
            since = self.buffer[self.spans[self._measured].start : self.spans[self._front - 1].stop]
            self._largest.append(torch.linalg.vector_norm(since, math.inf))
            self._measured = self._front

    def zero_grad(self) -> None:
        """Start a step: forget the gradients of the last one, without writing to memory.

        An unfinished step in which a forward or a backward has run is dropped. That is so after an exception, or where
        the user abandons the step. All ranks drop it together. What has been sent is waited for. What has not been
        sent is sent as NaN, so that no other rank can apply the step.
        """
        with self._lock:
            engine = self._engine
            if engine is not None and self._stats is None and (self._forwarded or any(self._ready)):
                if all(self._ready):
                    warnings.warn(
                        "pool.zero_grad() drops gradients that had all been sent: end each step with "
                        "pool.step(optimizer) or pool.finish()",
                        stacklevel=2,
                    )
                self._drop()
            elif self._deferral is not None and engine is not None:
                for span in self.spans:
                    if not self._deferral.waits(span):
                        engine.wait(span)  # it may be in flight, if the step was not applied
            self._start()
            self._zeroed = True
        for span in self.spans:
            span.param.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: a backward inside the context pushes nothing, as with DDP's ``no_sync``."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> SyncStats:
        """Wait until every ``p.grad`` is the mean over all ranks, or None where no rank has used the parameter.

        Afterwards gradients may be read, clipped, unscaled and replaced, before ``step`` or the optimizer's own step.
        Do not call it where none of this is needed: a deferring engine can then no longer overlap its messages with the
        next forward. A second call in a step does nothing.

        Returns:
            The cost of the step's synchronisation on this rank.

        Raises:
            RuntimeError: A gradient was replaced while it was sent, or between two calls in one step; or the model's
                parameters are no longer those of the pool.
        """
        stats = self.end_backward()
        assert self._engine is not None
        if self._means_here:
            self._check_means()
        elif not (self._updated and self._engine.leaves_behind):
            self.settle()  # another optimizer may step after one that pool.step deferred
            for span in self.spans:
                self._engine.wait(span)
            self.used(self.spans)
            self._means_here = True
        return stats

    def end_backward(self) -> SyncStats:
        """End the step's last backward: synchronise every gradient that is not deferred.

        For loops that call ``update``, which handles gradients still in flight. All others call ``finish`` or ``step``.
        Parameters that backward did not reach are sent with a gradient of zero. So an unused layer neither delays the
        others nor makes ranks disagree. A second call in a step does nothing.

        Returns:
            The cost of the step's synchronisation on this rank.

        Raises:
            RuntimeError: A gradient was replaced while it was sent, or the model's parameters are no longer those of
                the pool.
        """
        assert self._engine is not None, "attach an engine before the first step"
        if self._stats is not None and not self._came_late:
            return self._stats
        in_time = self._stats is None
        with self._lock:
            if not in_time:  # no zero_grad since the last step: nothing has been sent, and nothing overlaps
                self._start()
            self._end_last_step()
            self._watch.check(self.spans, self._places.span_of)
            self._begin()
            engine = self._engine
            self._reached = any(self._ready)  # then every p.grad was a placeholder, and None was set by the user
            for span in self.spans:
                self._take_last(engine, span)
            self._ready = [True] * len(self.spans)
            self._advance(engine)
            self.found_inf = self._any_overflow()
            self._front = self._measured = 0
            self._open = False
            self._stats = engine.finish()
            if in_time:
                self._order.agree(self.spans, self.topology, whole=True)
            if not engine.defers:
                for span, view in zip(self.spans, self._places.views, strict=True):
                    span.param.grad = None if span in self._cancelled else view
        return self._stats

    def update(self, apply: Update, at_once: bool = False) -> None:
        """Have ``apply`` update the parameters: all of them now, or each before it is read again if the engine defers.

        While a parameter's update is deferred, its ``p.grad`` is None. After ``finish`` all parameters are updated now,
        from what ``p.grad`` holds. Several updates of one step are carried out in the order of the calls.

        Args:
            apply: Updates the parameters it is given. It must capture what belongs to this step, above all the learning
                rate.
            at_once: Whether ``apply`` needs all gradients in one call. A deferring engine then waits for them here.
        """
        assert self._engine is not None
        self._updated = True
        elements = self._engine.elements()
        limited = apply if elements is None else partial(_apply_to, apply, elements)
        if self._means_here:
            limited([span.param for span in self.spans if span.param.grad is not None])
        elif self._engine.defers and self._deferral is not None:
            self._deferral.update(limited, at_once)
        else:
            limited(self.used(self.spans))
            self._means_here = True
        if self._engine.leaves_behind:  # a later backward must not add its gradients to the residual
            for span in self.spans:
                span.param.grad = None

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None = None) -> SyncStats:
        """End the step: call ``end_backward``, unless ``finish`` was called, and then ``optimizer.step()``.

        With a deferring engine, each layer is updated just before it is read again. The hyper-parameters are those of
        this call, so an ``lr_scheduler`` may step right after it. ``optimizer.state_dict()`` first carries out deferred
        updates. For an optimizer that needs all gradients at once (see ``needs_all``), the gradients are waited for
        here. Parameters of the optimizer that are in another pool are not updated.

        Args:
            optimizer: An optimizer of torch, or one with the same interface.
            scaler: Unscales gradients, skips a step that overflowed on any rank, and is updated: do not call its
                ``step`` and ``update`` as well. Nothing is deferred then.

        Returns:
            The cost of the step's synchronisation on this rank.

        Raises:
            ValueError: The optimizer's step requires a closure; it has none of this pool's parameters, or one with a
                gradient that is in no pool; or the engine sends only a part of the gradients.
            RuntimeError: The same optimizer has stepped already, with no backward since; or as for ``end_backward``.
        """
        assert self._engine is not None, "attach an engine before the first step"
        if self._engine.leaves_behind:
            raise ValueError(
                "the engine sends a part of the gradients, and optimisers of torch would apply the rest as well: "
                "take another engine, or pool.update() and an optimiser that takes the elements it may touch"
            )
        check_optimizer(optimizer, self._places.span_of)
        if optimizer in self._stepped and not self._came_late:
            raise RuntimeError(
                f"pool.step() was called twice with the same {type(optimizer).__name__}, and no backward between; "
                "begin each step with pool.zero_grad()"
            )
        if scaler is not None:
            stats = self.end_backward()
            if not self._means_here:
                self.finish()
            self._updated = True
            scale = scaler.get_scale()
            self._stepped.append(optimizer)
            scaler.step(optimizer)
            scaler.update()
            self._residual_scale.change(scaler.get_scale() / scale)
            return stats
        if not self._updated:
            self.settle()  # deferred updates may change counters in the optimizer's groups, which are copied next
        apply = snapshot_step(optimizer)
        stats = self.end_backward()
        self._stepped.append(optimizer)
        settle_before_state(optimizer, self.settle)
        self.update(apply, at_once=needs_all(optimizer))
        return stats

    def set_loss_scale(self, scale: Tensor) -> None:
        """Read the loss scale from ``scale`` in every later step, and rescale the engine's residual to match.

        Args:
            scale: An fp32 scalar tensor on the device, by which the caller multiplies the loss.
        """
        self._residual_scale.follow(scale)

    def settle(self) -> None:
        """Carry out every deferred update.

        The model's forward and ``state_dict`` do this by themselves. Call it before parameters are read in another way.
        """
        if self._deferral is not None:
            self._deferral.settle()

    def used(self, spans: Sequence[ParamSlot]) -> list[nn.Parameter]:
        """Put the gradients of ``spans`` into ``p.grad``, and return the parameters to update.

        ``p.grad`` is None instead where no rank has used the parameter, or where the user set it to None while it was
        in flight. Costs a device synchronisation for each parameter that this rank has not used.
        """
        for span in spans:
            if span in self._nulled:
                self._places.views[span.index].zero_()
            span.param.grad = self._places.gradient(span)
        left_out = {span for span in spans if span in self._unreached and not self.buffer[span.flag].item()}
        left_out |= self._cancelled.intersection(spans)
        for span in left_out:
            span.param.grad = None
        return [span.param for span in spans if span not in left_out]

    def watch(self, layers: bool) -> LayerTimer:
        """Return a timer of the next steps.

        Args:
            layers: Whether to record when each layer is called, too.

        Raises:
            ValueError: The pool has no model.
        """
        if self.model is None:
            raise ValueError(
                "an engine that plans needs to see the forward; give the pool model=..., or the engine a fixed number "
                "of MiB"
            )
        return LayerTimer(self.model, self.spans, self.topology, layers)

    def lengthen(self, multiple: int) -> None:
        """Pad the buffer's length to a multiple of ``multiple`` elements. Engines call it before their first step."""
        self._places.multiple = multiple
        self._lay_out(self.spans)

    def align(self, elements: int) -> None:
        """Have slots begin and end on multiples of ``elements``. Engines call it before their first step."""
        if self.line % elements:
            self._places.line = math.lcm(self.line, elements)
            self._lay_out(self.spans)

    def order(self, names: Collection[str]) -> None:
        """Lay the pool out in the order of ``names``, and keep this order. The caller must lay out the engine, too.

        Args:
            names: The names of the pool's parameters. Nothing happens where they are those of another model.
        """
        by_name = {span.name: span for span in self.spans}
        if by_name.keys() != set(names):
            return
        self._order.fix()
        self._lay_out([by_name[name] for name in names])

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps depend on besides the parameters and the optimizer. Carry out deferred updates first.

        Every rank must call it between steps, and keep its own result: they differ between ranks.
        """
        assert self._engine is not None
        self.settle()
        with self._lock:
            if self._order.better is not None:
                self._learn_order(self._order.better)
            self._engine.begin()  # `auto` may have to hand the pool to the engine it chose
            order = [span.name for span in self.spans] if self._order.is_known else None
            return {
                "order": order, "elected": self._engine.elected, "engine": self._engine.state_dict(),
                "loss_scale": self._residual_scale.state(),
            }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of ``state_dict``, which may be of another number of ranks.

        Raises:
            ValueError: The engine cannot resume from this state.
        """
        assert self._engine is not None
        refuse_state(state)
        if state["elected"] not in ("", self._engine.elected):
            refuse_choice(self._engine, state["elected"])
            self._engine.elect(state["elected"])
        refuse_engine_state(self._engine, state["engine"])
        if state["order"] is not None:
            self.order(state["order"])
            self._engine.lay_out()
        self._engine.load_state_dict(state["engine"])
        self._residual_scale.load(state.get("loss_scale"))

    def exchange_buffer(self, buffer: Tensor) -> Tensor:
        """Replace the buffer by another of the same layout, and return the old one. Engines call it before a step."""
        return self._places.exchange(buffer)

    def close(self) -> None:
        """Carry out deferred updates, close the engine with its threads and process groups, and remove all hooks.

        In the middle of a step it does not wait for other ranks, which may have left the step earlier. While another
        exception is being handled, as in ``finally``, it raises none of its own: a failure is added to that exception
        as a note.
        """
        users = sys.exc_info()[1]
        for hook in self._hooks:
            hook.remove()
        forget(self, self._places.span_of)
        deferral, self._deferral = self._deferral, None
        engine, self._engine = self._engine, None
        try:
            try:
                if deferral is not None:
                    deferral.close()
            finally:
                if engine is not None:
                    (engine.drop if self._open else engine.close)()
        except Exception as error:
            if users is None:
                raise
            users.add_note(f"closing the pool failed as well: {error}")

    def _lay_out(self, order: Sequence[ParamSlot]) -> None:
        """Lay the buffer out in ``order``, moving its values along. Carry out deferred updates first."""
        self.settle()
        self._places.lay_out(order)
        self._unreached = {}
        self._ready = [False] * len(self.spans)
        self._front = self._measured = 0
        self._largest = []
        if self._deferral is not None:
            self._deferral.lay_out(self.spans)

    def _before_forward(self, *_: object) -> None:
        if self._zeroed and self._stats is None and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._forwarded = True

    def _on_gradient(self, param: nn.Parameter) -> None:
        """Handle a gradient that backward has produced. Registered as a hook on every parameter.

        Queue ``_hide_rest`` for the end of this backward, as DDP does. Autograd does not call it after an exception.
        """
        with self._lock:
            self._collect(param)
            if self._sync and not self._end_awaited and self._stats is None and self._engine is not None:
                torch.autograd.Variable._execution_engine.queue_callback(self._hide_rest)
                self._end_awaited = True

    def _collect(self, param: nn.Parameter) -> None:
        """Copy the gradient of ``param`` into the pool, and push every slot that is due."""
        with self._lock:
            span = self._places.span_of[param]
            if self._deferral is not None and self._deferral.waits(span):
                raise RuntimeError(
                    f"{span.name} was read before its update: not by the forward of its own module or of one above, as "
                    "in the first step; call pool.settle() before such a forward"
                )
            if self._stats is not None:  # the step is over, so this gradient stays where autograd has put it
                self._came_late = True
                return
            if self._ready[span.index]:
                raise RuntimeError(
                    f"a second backward reached {span.name} in one step, after its gradient had left; wrap every "
                    "backward of a step but the last in pool.no_sync(), and begin each step with pool.zero_grad()"
                )
            assert param.grad is not None
            refuse_gradient(span.name, param.grad)
            if self._engine is None:
                self._take(None, span)
            # An engine that leaves elements behind adds to its residual, so it takes a gradient only once a step.
            elif self._sync or not self._engine.leaves_behind:
                self._begin()
                self._take(self._engine, span)
            if self._sync and self._engine is not None:
                self._hide(span)
                self._ready[span.index] = True
                self._order.note(span)
                self._advance(self._engine)

    def _hide_rest(self) -> None:
        """Take in the parameters that this backward did not reach, with the gradient they have or with zero.

        Called at the end of backward. If another backward of this step reaches them, autograd adds to that gradient.
        """
        with self._lock:
            self._end_awaited = False
            if self._engine is None or self._stats is not None:
                return
            self._end_last_step()
            for span in self.spans:
                if not self._ready[span.index] and span.param.grad is not self._places.pending[span.index]:
                    self._take_rest(self._engine, span)
                    self._hide(span)

    def _end_last_step(self) -> None:
        """Carry out the updates that this step's forward did not reach: new gradients would overwrite theirs."""
        self.settle()
        if not self._last_ended:
            self._unreached, self._cancelled, self._nulled = {}, set(), set()
            self._last_ended = True

    def _take_rest(self, engine: SyncEngine, span: ParamSlot) -> None:
        """Take in the gradient of a parameter that the last backward has not reached; zero if there is none."""
        if span.param.grad is not None:
            self._take(engine, span)
        elif span not in self._unreached:
            engine.take(self.buffer[span.start : span.flag + 1], None)
            self._unreached[span] = None
            self._flag_behind.add(span)

    def _hide(self, span: ParamSlot) -> None:
        pending = self._places.pending[span.index]
        pending.zeroed = False
        span.param.grad = pending

    def _take(self, engine: SyncEngine | None, span: ParamSlot) -> None:
        """Copy ``p.grad`` into its place, unless autograd has accumulated it there."""
        gradient, view = span.param.grad, self._places.views[span.index]
        assert gradient is not None
        if gradient is not view and gradient is not self._places.pending[span.index]:
            if engine is not None:
                engine.take(view, gradient)
            else:
                view.copy_(gradient)
        span.param.grad = view
        self._unreached.pop(span, None)
        if span in self._flag_behind:
            self.buffer[span.flag] = USED

    def _take_last(self, engine: SyncEngine, span: ParamSlot) -> None:
        """Take in a gradient that has not been pushed by the end of backward, and note changes that the user made.

        Raises:
            RuntimeError: The user replaced the gradient while it was in flight.
        """
        gradient, pending, ready = span.param.grad, self._places.pending[span.index], self._ready[span.index]
        if pending.zeroed:
            self._nulled.add(span)
        if gradient is None and (ready or self._reached):
            self._cancelled.add(span)
        if not ready and gradient is not pending:
            self._take_rest(engine, span)
        elif gradient is not pending and gradient is not None:
            raise RuntimeError(
                f"the gradient of {span.name} was replaced while it was on its way to the other ranks; call "
                "pool.finish() after backward, before gradients are replaced"
            )

    def _check_means(self) -> None:
        """Raise RuntimeError if a gradient was replaced since ``finish``: it would not be averaged."""
        for span, view in zip(self.spans, self._places.views, strict=True):
            if span.param.grad is not None and span.param.grad is not view:
                raise RuntimeError(
                    f"the gradient of {span.name} was replaced since pool.finish(), and it is called again; begin each "
                    "step with pool.zero_grad()"
                )

    def _start(self) -> None:
        """Reset the state of a step, and adopt a better pool order if one was learned."""
        self._stepped = []
        self._stats = None
        self._open = self._zeroed = self._forwarded = self._came_late = self._means_here = self._updated = False
        self._end_awaited = self._last_ended = False
        self._ready = [False] * len(self.spans)
        self._front = self._measured = 0
        if self._order.better is not None:
            self._learn_order(self._order.better)
        if self._places.has_moved() and self._engine is not None:
            self._learn_order(self.spans)

    def _begin(self) -> None:
        """Prepare the engine and the flags before the first gradient of a step."""
        if self._open or self._engine is None:
            return
        if self._engine.leaves_behind or self._residual_scale.applies_to(self._engine):
            self.settle()
            for span in self.spans:
                self._engine.wait(span)
        self._engine.begin()  # `auto` may hand the pool to another engine, which replaces self._engine
        self._residual_scale.apply(self._engine)
        self._engine.start_step()
        self._flag_behind = {span for span in self.spans if self._deferral is not None and self._deferral.waits(span)}
        # The flags of deferred slots are left out: their update still has to read them, or they are still in flight.
        self._places.mark_used(but=self._flag_behind)
        self._open = True

    def _advance(self, engine: SyncEngine) -> None:
        """Push to the engine every slot that is ready and has no unready slot before it."""
        while self._front < len(self.spans) and self._ready[self._front]:
            span = self.spans[self._front]
            self._front += 1
            engine.push(span)

    def _drop(self) -> None:
        """Complete an unfinished step, so that no rank waits for this one, and drop it."""
        self.settle()  # updates that the forward did not reach
        self._begin()
        engine = self._engine
        assert engine is not None
        for span in self.spans[self._front :]:
            engine.spoil(span, self._places.views[span.index])
        self._ready = [True] * len(self.spans)
        self._advance(engine)
        self._largest.append(self.buffer.new_full((), math.inf))  # also if everything had been sent by then
        self._any_overflow()
        self._front = self._measured = 0
        engine.finish(drop=True)
        for span in self.spans:
            engine.wait(span)
        self._order.agree(self.spans, self.topology, whole=False)

    def _any_overflow(self) -> Tensor | None:
        """Return 1 if any rank found an unusable gradient in this step, else 0; None without ``guard``."""
        if self._guard is None:
            self._largest = []
            return None
        self.measure()
        largest, self._largest = torch.stack(self._largest).max(), []
        overflow = (~(largest <= self._guard)).float()
        if self.topology.size > 1:
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self.topology.group)
        return overflow

    def _learn_order(self, order: Sequence[ParamSlot]) -> None:
        assert self._engine is not None
        self._order.better = None
        self.settle()
        self._engine.begin()  # it may still have to clear what it has sent, which it knows by its place in the pool
        self._lay_out(order)
        self._engine.lay_out()


def _apply_to(apply: Update, elements: Elements, params: list[nn.Parameter]) -> None:
    apply(params, elements)
