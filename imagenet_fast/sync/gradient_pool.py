"""Every gradient of a model in one flat buffer, in the order in which backward produces them.

Engines send from this buffer. Neighbouring gradients are one contiguous slice of it, so fusing them into one message
(GradientFlow's lazy all-reduce, arXiv 1902.06855) costs no copy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from imagenet_fast.sync import loop_checks
from imagenet_fast.sync.access_hooks import Hook, weak_hook
from imagenet_fast.sync.consistency import compare_models
from imagenet_fast.sync.deferred_update import DeferredUpdate, Update
from imagenet_fast.sync.engine import SyncEngine, SyncStats
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.layer_timer import LayerTimer
from imagenet_fast.sync.param_slot import ParamSlot, slots_of
from imagenet_fast.sync.per_param_step import needs_all, settle_before_state, snapshot_step
from imagenet_fast.sync.reducer import Reducer
from imagenet_fast.sync.topology import Topology


class GradientPool:
    """One flat buffer that holds the gradient of every trainable parameter of a model, last layer first.

    During backward a hook copies each finished gradient into its place, a view with the parameter's own strides.

    ``p.grad`` holds:

    - Under ``no_sync``: this rank's own sum, as usual.
    - Between the last backward and ``finish`` or ``step``: a ``PendingGrad``, which must not be used.
    - After ``finish``: the mean over ranks, which the user may change, or None where no rank has used the parameter.
      A parameter whose gradient is None is not updated. Of ``sparse``: the mean of what was sent, and zeros.
    - After a step, until the next ``zero_grad``: this rank's own gradient again, if a backward runs.

    Pool order is the same on every rank: in the first step the reverse of the order of registration, from the second
    step on the order in which the first rank's backward produced the gradients.

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
        lockstep: bool = False,
    ) -> None:
        """Create a pool and register its hooks. Every rank must call it.

        Args:
            parameters: The model; or, where a model's parameters need several pools, the named parameters of this pool.
                All that are trainable must share one dtype and device.
            group: The ranks to average over; None: all.
            model: The model whose forward reads the parameters, where ``parameters`` are named parameters.
            ranks_per_node: The number of ranks on each node; None: ``Topology`` finds which ranks share a node.
            topology: The ranks and nodes, instead of ``group`` and ``ranks_per_node``.
            lockstep: Whether updates wait for ranks outside ``group``; see ``DeferredUpdate``.

        Raises:
            ValueError: There are other ranks but no process group; no parameter is trainable; ranks have different
                parameters or values; two have the same name; one is in another pool; dtypes or devices differ or cannot
                be pooled; or ``ranks_per_node`` does not divide the number of ranks.
            TypeError: The parameters have no names.
        """
        if topology is None:
            loop_checks.refuse_missing_group()
        model, named, called = loop_checks.named_parameters(parameters, model)
        compare_models(named, model, topology.group if topology else group)  # before checks that may fail on one rank
        trainable = {name: p for name, p in named.items() if p.requires_grad}
        if not trainable:
            raise ValueError("the model has no trainable parameter")
        self.model, self._lockstep = model, lockstep
        device = next(iter(trainable.values())).device
        self.topology = topology or Topology(device, group, ranks_per_node)
        self.reducer = Reducer(
            GradientBuffer(slots_of(trainable, model), self.topology.alignment), self.topology, model
        )
        self._due: list[nn.Parameter] = []  # updated by the last update that was not deferred
        loop_checks.register(self.reducer, trainable)
        on_gradient = weak_hook(self.reducer.on_gradient)
        self._hooks = [p.register_post_accumulate_grad_hook(on_gradient) for p in trainable.values()]
        before = Hook(self.reducer.before_forward)
        self._hooks += [module.register_forward_pre_hook(before, prepend=True) for module in called]

    @property
    def found_inf(self) -> Tensor | None:
        """1 if the last step had an unusable gradient on any rank, else 0; None without ``guard``."""
        return self.reducer.found_inf

    @property
    def buffer(self) -> Tensor:
        """The buffer of all gradients, 1-D."""
        return self.reducer.buffer.values

    @property
    def slots(self) -> list[ParamSlot]:
        """The slots of the gradients, in the order in which they are pushed."""
        return self.reducer.buffer.slots

    @property
    def alignment(self) -> int:
        """The number of elements of which the bounds of slots are multiples."""
        return self.reducer.buffer.alignment

    def attach(self, engine: SyncEngine) -> None:
        """Push the gradients of every later backward to ``engine``, and close the engine attached before.

        Raises:
            TypeError: It is no engine.
            ValueError: The engine was built for another pool; or it defers updates, and the pool has no model.
        """
        loop_checks.refuse_engine_of_another(engine, self)
        if engine.defers and self.model is None:
            raise ValueError("an engine that defers updates needs to see the forward; give the pool model=...")
        if self.reducer.engine is not None:
            self.reducer.engine.close()
        self.reducer.engine = engine
        if self.reducer.deferral is not None:
            self.reducer.deferral.engine = engine
        self._defer()

    def _defer(self) -> None:
        """Make what defers updates, once the engine needs it: ``auto`` may choose one that does."""
        engine = self.reducer.engine
        if engine is not None and engine.defers and self.model is not None and self.reducer.deferral is None:
            self.reducer.deferral = DeferredUpdate(self.model, engine, self.slots, self.reducer.used, self._lockstep)

    def guard(self, largest: float) -> None:
        """Check every later gradient before it is sent, and report in ``found_inf``. Every rank must call it.

        Costs one pass over the gradients and a tiny all-reduce a step.

        Args:
            largest: A gradient with a larger magnitude counts as infinite.
        """
        self.reducer.largest = largest

    def measure(self) -> None:
        """Check the gradients pushed so far, if ``guard`` was called. Engines call it before they send them."""
        self.reducer.measure()

    def zero_grad(self, drop: bool = False) -> None:
        """Start a step: forget the gradients of the last one, without writing to memory.

        An unfinished step is dropped, as after an exception, if a forward or a backward has run in it, or with ``drop``
        in any case. All ranks drop it together: what has been sent is waited for, the rest is sent as zero, and all of
        it is thrown away. No residual is restored.
        """
        self.reducer.zero_grad(drop)
        self._defer()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: a backward inside the context pushes nothing, as with DDP's ``no_sync``."""
        before, self.reducer.sync = self.reducer.sync, False
        try:
            yield
        finally:
            self.reducer.sync = before

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
        assert self.reducer.engine is not None
        sent = self.reducer.engine.sent_slices()
        if self.reducer.means_here and sent is None:
            loop_checks.refuse_replaced(self.reducer.slots, self.reducer.buffer.views)
        elif not self.reducer.means_here and not (self.reducer.updated and self.reducer.engine.sends_part):
            self.settle()  # another optimizer may step after one that pool.step deferred
            for slot in self.slots:
                self.reducer.engine.wait(slot)
            self.reducer.used(self.slots)
            if sent is not None:
                self.reducer.buffer.show_only(sent)
            self.reducer.means_here = True
        return stats

    def end_backward(self) -> SyncStats:
        """End the step's last backward: synchronise every gradient that is not deferred.

        ``step`` and ``update`` call it. Parameters that backward did not reach are sent with a gradient of zero. So an
        unused layer neither delays the others nor makes ranks disagree. A second call in a step does nothing.

        Returns:
            The cost of the step's synchronisation on this rank.

        Raises:
            RuntimeError: A gradient was replaced while it was sent, or the model's parameters are no longer those of
                the pool.
        """
        return self.reducer.end_backward()

    def update(self, apply: Update, at_once: bool = False) -> None:
        """Have ``apply`` update the parameters: all of them now, or each before it is read again if the engine defers.

        While a parameter's update is deferred, its ``p.grad`` is None. After ``finish`` all parameters are updated now,
        from what ``p.grad`` holds. Several updates of one step are carried out in the order of the calls.

        Args:
            apply: Updates the parameters it is given. It must capture what belongs to this step, as the learning rate.
            at_once: Whether ``apply`` needs all gradients in one call. A deferring engine then waits for them here.
        """
        self.reducer.end_backward()
        assert self.reducer.engine is not None
        self._defer()
        again, self.reducer.updated = self.reducer.updated, True
        elements = self.reducer.engine.sent_slices()
        limited: Update = apply if elements is None else lambda params: apply(params, elements)
        if self.reducer.means_here:
            if not (again and self.reducer.engine.sends_part):  # else no p.grad is left, as below
                self._due = [slot.param for slot in self.slots if slot.param.grad is not None]
            limited(self._due)
        elif self.reducer.engine.defers and self.reducer.deferral is not None:
            self.reducer.deferral.update(limited, at_once)
        else:
            self._due = self.reducer.used(self.slots)
            limited(self._due)
            self.reducer.means_here = True
        if self.reducer.engine.sends_part:  # a later backward must not add its gradients to the residual
            for slot in self.slots:
                slot.param.grad = None

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None = None) -> SyncStats:
        """End the step: call ``end_backward``, unless ``finish`` was called, and then ``optimizer.step()``.

        With a deferring engine, each layer is updated just before it is read again, with the hyper-parameters of this
        call: an ``lr_scheduler`` may step right after it. ``optimizer.state_dict()`` carries out deferred updates. An
        optimizer that needs all gradients at once (see ``needs_all``) waits for them here. Its parameters that are
        in another pool are not updated.

        Args:
            optimizer: An optimizer of torch, or one with the same interface.
            scaler: Unscales gradients, skips a step that overflowed on any rank, and is updated: do not call its
                ``step`` and ``update`` as well. Nothing is deferred then.

        Returns:
            The cost of the step's synchronisation on this rank.

        Raises:
            ValueError: The optimizer's step requires a closure; it has none of this pool's parameters, or one with a
                gradient that is in no pool; the engine sends only a part of the gradients, and the optimizer is not
                one of ``imagenet_fast.training.optimizers``; or it is the second of the step, with a scaler.
            RuntimeError: The same optimizer has stepped already, with no backward since; or as for ``end_backward``.
        """
        assert self.reducer.engine is not None, "attach an engine before the first step"
        loop_checks.check_optimizer(optimizer, self.reducer.buffer.slot_of)
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.reducer.check_step(optimizer, scaler)
        if scaler is not None:
            stats = self.end_backward()
            if not self.reducer.means_here:
                self.finish()
            self.reducer.step_scaled(optimizer, scaler)
            return stats
        if not self.reducer.updated:
            self.settle()  # deferred updates may change counters in the optimizer's groups, which are copied next
        apply = snapshot_step(optimizer)
        stats = self.end_backward()
        self.reducer.stepped.append(optimizer)
        settle_before_state(optimizer, self.reducer.settle)
        self.update(apply, at_once=needs_all(optimizer))
        return stats

    def settle(self) -> None:
        """Carry out every deferred update.

        The model's forward and ``state_dict`` do this by themselves. Call it before parameters are read in another way.
        """
        self.reducer.settle()

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
        return LayerTimer(self.model, self.slots, self.topology, layers)

    def lengthen(self, multiple: int) -> None:
        """Pad the buffer's length to a multiple of ``multiple`` elements. Engines call it before their first step."""
        self.reducer.buffer.multiple = multiple
        self.reducer.lay_out(self.slots)

    def align(self, elements: int) -> None:
        """Have slots begin and end on multiples of ``elements``. Engines call it before their first step."""
        if self.alignment % elements:
            self.reducer.buffer.alignment = math.lcm(self.alignment, elements)
            self.reducer.lay_out(self.slots)

    def order(self, names: Collection[str]) -> None:
        """Lay the pool out in the order of ``names``, and keep this order. The caller must lay out the engine, too.

        Args:
            names: The names of the pool's parameters. Nothing happens where they are those of another model.
        """
        by_name = {slot.name: slot for slot in self.slots}
        if by_name.keys() != set(names):
            return
        self.reducer.order.fix()
        self.reducer.lay_out([by_name[name] for name in names])

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps depend on besides the parameters and the optimizer. Carry out deferred updates first.

        Every rank must call it between steps, and keep its own result: they differ between ranks.
        """
        assert self.reducer.engine is not None, "attach an engine before the pool's state is read"
        loop_checks.refuse_early_save(self.reducer.engine, self.reducer.means_here and not self.reducer.updated)
        self.settle()
        with self.reducer.lock:
            if self.reducer.order.better is not None:
                self.reducer.learn_order(self.reducer.order.better)
            self.reducer.engine.begin()  # `auto` may have to become the engine it chose
            order = [slot.name for slot in self.slots] if self.reducer.order.is_known else None
            return {"order": order, "engine": self.reducer.engine.state_dict(), "ranks": self.topology.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of ``state_dict``; from one of another number of ranks if it has no residual.

        Raises:
            ValueError: The engine cannot resume from this state.
        """
        assert self.reducer.engine is not None, "attach an engine before its state is loaded"
        loop_checks.refuse_state(state, self.topology.size)
        of_engine = state["engine"]
        if state.get("elected"):  # of an earlier version
            of_engine = of_engine | {"elected": state["elected"]}
        if state["order"] is not None:
            self.order(state["order"])
            self.reducer.engine.rebuild_buckets()
        self.reducer.engine.load_state_dict(of_engine)

    def close(self) -> None:
        """Carry out deferred updates, close the engine with its threads and process groups, and remove all hooks.

        In the middle of a step it does not wait for other ranks, which may have left the step. While another exception
        is handled, as in ``finally``, it raises none of its own: a failure is added to that exception as a note.
        """
        users = sys.exc_info()[1]
        for hook in self._hooks:
            hook.remove()
        loop_checks.forget(self.reducer, self.reducer.buffer.slot_of)
        deferral, self.reducer.deferral = self.reducer.deferral, None
        engine, self.reducer.engine = self.reducer.engine, None
        try:
            try:
                if deferral is not None:
                    deferral.close()
            finally:
                if engine is not None:
                    (engine.drop if self.reducer.is_open else engine.close)()
        except Exception as error:
            if users is None:
                raise
            users.add_note(f"closing the pool failed as well: {error}")
