"""Every gradient of a model in one flat buffer, in the order backward produces them.

The buffer is what engines send: any run of neighbouring gradients is one contiguous slice of it, so fusing
tensors into one message (GradientFlow's lazy all-reduce, arXiv 1902.06855) costs no copy.
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
    """One flat buffer holding the gradient of every trainable parameter of ``model``, last layer first.

    During backward a hook moves each finished gradient into its place, which is a view with the parameter's own strides
    (channels_last survives). Autograd hands over a fresh tensor and we copy it, rather than letting autograd accumulate
    into the view: that costs two passes over memory instead of the four of a memset and an in-place add. Later
    micro-steps of one step do add in place.

    What ``p.grad`` holds: under :meth:`no_sync` this rank's own sum, as ever; between the last backward and
    :meth:`finish` or :meth:`step` a :class:`PendingGrad`, which nobody may use; after ``finish`` the mean over ranks,
    which the user may change; None where no rank has used the parameter. None is honoured: such a parameter is not
    updated. Gradients that come after a step and before the next :meth:`zero_grad` are this rank's own again.

    Gradients are averaged over the ranks of ``group``, by default all. Of a model whose parameters need several pools,
    each is given its named parameters, and the ``model`` whose forward reads them. Which ranks share a node is found by
    :class:`Topology` unless ``ranks_per_node`` says it, or a ``topology`` says all of that. All parameters must share
    one dtype and device.

    Spans reach the engine strictly in pool order, the same on every rank, although hooks fire in an order of their own.
    It is the reverse of the order of registration in the first step, and from the second on the order in which the
    first rank's backward produced them. Behind each gradient lies one element (``Span.flag``) that says whether a rank
    has used the parameter: one that nobody used is left alone by the update, as DDP does.
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
        model, named = named_parameters(parameters, model)
        compare_models(named, topology.group if topology else group)  # before what only one rank may refuse
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
        self._ready = [False] * len(spans)  # by span: whether its gradient may leave
        self._front = 0  # spans before this one have been handed to the engine
        self._unreached: dict[
            ParamSlot, None
        ] = {}  # by this rank, in the last step whose gradients are here or pending
        self._measured = 0  # spans before this one have been looked at
        self._largest: list[Tensor] = []  # magnitudes in this step
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
        self._stats: SyncStats | None = None  # of the step whose gradients are here, after its last backward
        self._came_late = False  # whether gradients have come since
        self._means_here = False  # whether they are all in p.grad, as the user may have changed them
        self._updated = False  # whether they have been applied, or will be
        self._stepped: list[Optimizer] = []  # in this step
        self._reached = False  # whether this step's last backward has reached any parameter
        self._cancelled: set[ParamSlot] = set()  # those whose p.grad was set to None on their way
        self._nulled: set[ParamSlot] = set()  # those whose p.grad was zeroed on its way
        self._flag_behind: set[ParamSlot] = set()  # those whose flag is not yet that of a gradient of this step
        self._last_ended = False  # whether nothing of the step before is pending any more
        self._end_awaited = False  # whether autograd will tell of the end of this backward
        self._residual_scale = ResidualScale(device)
        self.found_inf: Tensor | None = None
        """With :meth:`guard`: 1 where a gradient of the last step, on any rank, was not finite or too large for the
        wire, else 0."""

    @property
    def buffer(self) -> Tensor:
        """All gradients, 1-D."""
        return self._places.values

    @property
    def spans(self) -> list[ParamSlot]:
        """The gradients' places, in the order in which they leave."""
        return self._places.spans

    @property
    def line(self) -> int:
        """Elements: spans begin and end on multiples of it."""
        return self._places.line

    def attach(self, engine: SyncEngine) -> None:
        """Send the spans of every later backward to ``engine``, instead of to any before."""
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
        """From now on look at every gradient before it is sent: see :attr:`found_inf`. One above ``largest`` counts as
        infinite. Costs a pass over the gradients and a tiny all-reduce a step."""
        self._guard = largest

    def measure(self) -> None:
        """For an engine, before gradients that it was pushed leave: look at them, if they are to be guarded."""
        if self._guard is not None and self._measured < self._front:
            since = self.buffer[self.spans[self._measured].start : self.spans[self._front - 1].stop]
            self._largest.append(torch.linalg.vector_norm(since, math.inf))
            self._measured = self._front

    def zero_grad(self) -> None:
        """Start a step: forget the gradients of the last one. Touches no memory.

        A step in which a forward or a backward has run, and that was not finished, is dropped: after an exception, or
        because the user thought better of it. All ranks drop it together. What has left is waited for; nothing of that
        step may be applied on another rank, so what had not left is sent as NaN.
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
                        engine.wait(span)  # it may be on its way, where a step has not been applied
            self._start()
            self._zeroed = True
        for span in self.spans:
            span.param.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally: a backward inside hands nothing to the engine (as DDP's ``no_sync``)."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> SyncStats:
        """Wait until every ``p.grad`` is the mean over all ranks, or None where no rank has used the parameter.

        Gradients may be read, clipped, unscaled and replaced then, before :meth:`step` or the optimizer's own. A
        deferring engine has nothing left to hide its messages behind: leave this out where nothing is done here.
        Called again in a step it does nothing.
        """
        stats = self.end_backward()
        assert self._engine is not None
        if self._means_here:
            self._check_means()
        elif not (self._updated and self._engine.leaves_behind):
            self.settle()  # for another optimizer's step, after one by pool.step
            for span in self.spans:
                self._engine.wait(span)
            self.used(self.spans)
            self._means_here = True
        return stats

    def end_backward(self) -> SyncStats:
        """End the step's last backward: agree on every gradient that may not be deferred.

        For loops that call :meth:`update`, which knows what is still on its way; all others call :meth:`finish` or
        :meth:`step`. Parameters that backward did not reach take part with a gradient of zero, so an unused layer
        neither stalls the frontier nor makes ranks disagree. Called again in a step it does nothing.
        """
        assert self._engine is not None, "attach an engine before the first step"
        if self._stats is not None and not self._came_late:
            return self._stats
        in_time = self._stats is None
        with self._lock:
            if not in_time:  # without zero_grad: nothing has left, and nothing overlaps
                self._start()
            self._end_last_step()
            self._watch.check(self.spans, self._places.span_of)
            self._begin()
            engine = self._engine
            self._reached = any(self._ready)  # then all of p.grad has been hidden, and None is the user's
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
        """Have ``apply`` update the parameters it is given: all of them now, or each before it is read again.

        ``apply`` captures what belongs to this step, above all the learning rate. Several updates of a step are
        carried out in their order. One that needs all gradients ``at_once`` has an engine that defers wait for them.
        While a parameter's update is put off, ``p.grad`` is None. After :meth:`finish` all are updated now, from what
        ``p.grad`` holds.
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
        if self._engine.leaves_behind:  # what comes after the step must not be added to what is left behind
            for span in self.spans:
                span.param.grad = None

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None = None) -> SyncStats:
        """End the step: :meth:`end_backward`, unless :meth:`finish` was called, and ``optimizer.step()``.

        Under an engine that defers, each layer is updated just before it is read again, with the hyper-parameters of
        this moment: an ``lr_scheduler`` may step at once. ``optimizer.state_dict()`` carries out what is put off
        first. An optimiser that needs all gradients at once (:func:`needs_all`) waits for them here. Parameters of the
        optimiser that are in another pool are left alone.

        Args:
            optimizer: Of torch, or one like them.
            scaler: Unscales, skips a step that overflowed on any rank, and is updated: do not call its ``step`` and
                ``update`` as well. Nothing is deferred then.

        Raises:
            ValueError: The optimizer's step requires a closure; it has none of this pool's parameters, or one with a
                gradient that is in no pool; or the engine leaves a part of the gradients behind.
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
            self.settle()  # before it is copied what an optimiser counts in its groups
        apply = snapshot_step(optimizer)
        stats = self.end_backward()
        self._stepped.append(optimizer)
        settle_before_state(optimizer, self.settle)
        self.update(apply, at_once=needs_all(optimizer))
        return stats

    def set_loss_scale(self, scale: Tensor) -> None:
        """Read ``scale``, fp32 [] on the device, in every later step: the loss is multiplied by it. What an engine has
        left behind of earlier gradients is brought to the same scale."""
        self._residual_scale.follow(scale)

    def settle(self) -> None:
        """Carry out every update that an engine has put off. Forwards and ``state_dict`` of the model do it unasked;
        whoever reads parameters in another way calls this first."""
        if self._deferral is not None:
            self._deferral.settle()

    def used(self, spans: Sequence[ParamSlot]) -> list[nn.Parameter]:
        """Put the gradients of ``spans`` into ``p.grad``, and return the parameters that are to be updated.

        Those that no rank has used, and those whose ``p.grad`` the user set to None on its way, have None instead. Asks
        the device about those that this rank has not used.
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
        """A timetable of the next steps."""
        if self.model is None:
            raise ValueError(
                "an engine that plans needs to see the forward; give the pool model=..., or the engine a fixed number "
                "of MiB"
            )
        return LayerTimer(self.model, self.spans, self.topology, layers)

    def lengthen(self, multiple: int) -> None:
        """Make the buffer's length a multiple of so many elements. For an engine, before it begins."""
        self._places.multiple = multiple
        self._lay_out(self.spans)

    def align(self, elements: int) -> None:
        """Have spans begin and end on multiples of so many elements. For an engine, before it begins."""
        if self.line % elements:
            self._places.line = math.lcm(self.line, elements)
            self._lay_out(self.spans)

    def order(self, names: Collection[str]) -> None:
        """Lay the pool out in this order of its parameters, and learn no other; nothing happens where ``names`` are
        those of another model. The engine has to do so too."""
        by_name = {span.name: span for span in self.spans}
        if by_name.keys() != set(names):
            return
        self._order.fix()
        self._lay_out([by_name[name] for name in names])

    def state_dict(self) -> dict[str, Any]:
        """What later steps depend on besides parameters and optimiser; between steps, by every rank. Settles first.

        It differs between ranks."""
        assert self._engine is not None
        self.settle()
        with self._lock:
            if self._order.better is not None:
                self._learn_order(self._order.better)
            self._engine.begin()  # it may be about to hand the pool to another
            order = [span.name for span in self.spans] if self._order.is_known else None
            return {
                "order": order, "elected": self._engine.elected, "engine": self._engine.state_dict(),
                "loss_scale": self._residual_scale.state(),
            }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`'s value, which may be of another number of ranks.

        Raises ValueError for a state that the engine cannot go on from."""
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
        """Work in another buffer of the same layout. For an engine, before a step. Returns that of before."""
        return self._places.exchange(buffer)

    def close(self) -> None:
        """End the engine, its threads and its process groups, and leave the model to others. Settles first.

        In the middle of a step it waits for no other rank, which may have left the step earlier. Called while an
        exception is on its way, as in ``finally``, it raises none of its own.
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
        """Give the parameter of every span its place. Values in the buffer move with it. Settles first."""
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
        """The hook. Has autograd call :meth:`_hide_rest` at the end of this backward, as DDP does; it will not after an
        exception."""
        with self._lock:
            self._collect(param)
            if self._sync and not self._end_awaited and self._stats is None and self._engine is not None:
                torch.autograd.Variable._execution_engine.queue_callback(self._hide_rest)
                self._end_awaited = True

    def _collect(self, param: nn.Parameter) -> None:
        """``param`` has its gradient."""
        with self._lock:
            span = self._places.span_of[param]
            if self._deferral is not None and self._deferral.waits(span):
                raise RuntimeError(
                    f"{span.name} was read before its update: not by the forward of its own module or of one above, as "
                    "in the first step; call pool.settle() before such a forward"
                )
            if self._stats is not None:  # the step is over, and this gradient stays where autograd has put it
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
            elif self._sync or not self._engine.leaves_behind:  # which adds gradients to others, once a step
                self._begin()
                self._take(self._engine, span)
            if self._sync and self._engine is not None:
                self._hide(span)
                self._ready[span.index] = True
                self._order.note(span)
                self._advance(self._engine)

    def _hide_rest(self) -> None:
        """At the end of backward: parameters that it did not reach take part with what they have, or with a gradient
        of zero. If another backward of this step reaches them, autograd adds to it."""
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
        """Carry out the updates that this step's forward did not reach: their gradients lie where new ones come."""
        self.settle()
        if not self._last_ended:
            self._unreached, self._cancelled, self._nulled = {}, set(), set()
            self._last_ended = True

    def _take_rest(self, engine: SyncEngine, span: ParamSlot) -> None:
        """Of a parameter that the last backward has not reached."""
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
        """Bring ``p.grad`` into its place, unless autograd has added it up there."""
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
        """At the end of backward: what has not left, and what the user has made of it."""
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
        """Raise where gradients may be those of another step, which nobody would average."""
        for span, view in zip(self.spans, self._places.views, strict=True):
            if span.param.grad is not None and span.param.grad is not view:
                raise RuntimeError(
                    f"the gradient of {span.name} was replaced since pool.finish(), and it is called again; begin each "
                    "step with pool.zero_grad()"
                )

    def _start(self) -> None:
        """Nothing has come of this step yet."""
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
        """Before the first gradient of a step."""
        if self._open or self._engine is None:
            return
        if self._engine.leaves_behind or self._residual_scale.applies_to(self._engine):
            self.settle()
            for span in self.spans:
                self._engine.wait(span)
        self._engine.begin()  # it may hand the pool to another
        self._residual_scale.apply(self._engine)
        self._engine.start_step()
        self._flag_behind = {span for span in self.spans if self._deferral is not None and self._deferral.waits(span)}
        self._places.mark_used(but=self._flag_behind)  # their update has yet to look, or they are still on their way
        self._open = True

    def _advance(self, engine: SyncEngine) -> None:
        """Move the frontier past every leading span that is ready, handing each to the engine."""
        while self._front < len(self.spans) and self._ready[self._front]:
            span = self.spans[self._front]
            self._front += 1
            engine.push(span)

    def _drop(self) -> None:
        """Bring an unfinished step to its end, so that no rank waits for this one, and drop it."""
        self.settle()  # what the forward did not reach
        self._begin()
        engine = self._engine
        assert engine is not None
        for span in self.spans[self._front :]:
            engine.spoil(span, self._places.views[span.index])
        self._ready = [True] * len(self.spans)
        self._advance(engine)
        self._largest.append(self.buffer.new_full((), math.inf))  # also where everything had left by then
        self._any_overflow()
        self._front = self._measured = 0
        engine.finish(drop=True)
        for span in self.spans:
            engine.wait(span)
        self._order.agree(self.spans, self.topology, whole=False)

    def _any_overflow(self) -> Tensor | None:
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
        self._engine.begin()  # it may have sent what lies in the pool, and knows it by its place
        self._lay_out(order)
        self._engine.lay_out()


def _apply_to(apply: Update, elements: Elements, params: list[nn.Parameter]) -> None:
    apply(params, elements)
