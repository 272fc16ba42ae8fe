"""Every gradient of a model in one flat buffer, in the order in which backward produces them.

Engines send from this buffer. Neighbouring gradients are one contiguous slice of it, so fusing them into one message
(GradientFlow's lazy all-reduce, arXiv 1902.06855) costs no copy.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from imagenet_fast.cost_model.messages import Declaration
from imagenet_fast.distributed.consistency import compare_ranks
from imagenet_fast.recipe.sync_config import EngineSettings
from imagenet_fast.sync import contract
from imagenet_fast.sync.contract import StepState
from imagenet_fast.sync.engine import SyncEngine, SyncStats
from imagenet_fast.sync.factory import build_engine
from imagenet_fast.sync.fork import fork_settled
from imagenet_fast.sync.front import ForwardHook, fronts, is_compiled
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.gradient_step import GradientStep, Owner
from imagenet_fast.sync.param_slot import ParamSlot, slots_of
from imagenet_fast.sync.pending import Pending, Readers, Update, settle_all
from imagenet_fast.sync.per_param_step import InTurn, needs_all, settle_before_state, snapshot_step
from imagenet_fast.sync.topology import Topology


class GradientPool(Owner):
    """One flat buffer that holds the gradient of every trainable parameter of a model, last layer first.

    In backward a hook takes note of each gradient. Before they are sent, gradients are copied into their places, many
    at once: views with the parameters' own strides.

    ``p.grad`` holds:

    - Under ``no_sync``: this rank's own sum, as usual.
    - Between a backward that sends it and ``finish`` or ``step``: a ``PendingGrad``, which must not be used.
    - After ``finish``: the mean over ranks, which the user may change, or None where no rank has used the parameter.
      A parameter whose gradient is None is not updated. Of ``sparse``: the mean of what was sent, and zeros.
    - After a step: what ``finish`` would have left; None if the engine defers updates or sends a part.

    While an update is deferred, a parameter is of a class ``Pending``, and updated when it is first used.

    Pool order is the same on every rank: in the first step the reverse of the order of registration, from the second
    step on the order in which the first rank's backward produced the gradients.

    Behind each gradient is one element (``ParamSlot.flag``) that is nonzero if any rank has used the parameter. The
    update skips a parameter that no rank has used, as DDP does.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[tuple[str, nn.Parameter]],
        engine: EngineSettings | Declaration | Callable[[GradientBuffer], SyncEngine],
        group: dist.ProcessGroup | None = None,
        *,
        model: nn.Module | None = None,
        steps_per_epoch: int = 1,
        topology: Topology | None = None,
        lockstep: bool = False,
    ) -> None:
        """Create a pool with its engine, and register its hooks. Every rank must call it.

        Args:
            parameters: The model; or, where a model's parameters need several pools, the named parameters of this pool.
                All that are trainable must share one dtype and device.
            engine: The settings of an engine, an engine of one's own, or a function that builds what sends the
                gradients of a buffer. The same on every rank.
            group: The ranks to average over; None: all.
            model: The model whose forward reads the parameters, where ``parameters`` are named parameters.
            steps_per_epoch: Converts those settings of the engine that are given in epochs.
            topology: The ranks and their nodes, instead of ``group``. ``close`` does not end its streams.
            lockstep: Whether updates wait for ranks outside ``group``; see ``PendingUpdate``.

        Raises:
            ValueError: There are other ranks but no process group; no parameter is trainable; ranks have different
                parameters, values or engines; two parameters have the same name; one is in another pool; or dtypes or
                devices differ or cannot be pooled.
            TypeError: The parameters have no names, or the engine is none.
        """
        if topology is None:
            contract.refuse_missing_group()
        model, called, named = contract.named_parameters(parameters, model)
        ranks = topology.group if topology else group
        contract.check_engine(engine)
        settings = None if callable(engine) else engine
        compare_ranks(settings, steps_per_epoch, ranks, named, model)  # before checks that may fail on one rank
        trainable = contract.trainable(named)
        self.lockstep, self._own_topology = lockstep, topology is None
        self.topology = topology or Topology(next(iter(trainable.values())).device, group)
        self.gradients = GradientBuffer(slots_of(trainable, model), self.topology, called)
        self.gradients.before_layout = self.settle
        self.lock = threading.RLock()  # autograd may run several threads
        self.engine: SyncEngine = (
            engine(self.gradients) if callable(engine) else build_engine(engine, self.gradients, steps_per_epoch)
        )
        self.before_close: Callable[[], None] = lambda: None
        """Called first when the pool is closed: a graph that holds a process group's messages keeps it from ending."""
        self.generation = 0
        """Rises when the layout changes or a state is loaded, which gives gradients or messages other memory."""
        self.current = GradientStep(self)
        self.parameters = list(trainable.values())
        """Those whose gradients it holds."""
        self.readers = Readers(self.slots)
        itself = weakref.ref(self)  # Python's garbage collector does not see the hooks that autograd keeps
        self._hooks: list[RemovableHandle | ForwardHook] = [
            param.register_post_accumulate_grad_hook(partial(_on_gradient, itself, number))
            for number, param in enumerate(self.parameters)
        ]
        if model is not None and called is not None:
            self._hooks.append(ForwardHook(model, contract.refuse_ddp))
            for module in filter(is_compiled, dict.fromkeys(fronts(called).values())):  # it calls no torch functions
                self._hooks.append(ForwardHook(module, lambda module: settle_all(module.parameters())))
        contract.pools.add(self)
        fork_settled()

    @property
    def found_inf(self) -> Tensor | None:
        """1 if the last step had an unusable gradient on any rank, else 0; None without ``guard``."""
        return self.current.found_inf

    @property
    def is_open(self) -> bool:
        """True until the pool is closed."""
        return bool(self._hooks)

    @property
    def slots(self) -> list[ParamSlot]:
        """The slots of the gradients, in the order in which they are pushed."""
        return self.gradients.slots

    def guard(self, largest: float) -> None:
        """Check every later gradient before it is sent, and report in ``found_inf``. Every rank must call it.

        Costs one pass over the gradients and a tiny all-reduce a step.

        Args:
            largest: A gradient with a larger magnitude counts as infinite.
        """
        self.largest = largest

    def zero_grad(self) -> None:
        """Start a step: forget the gradients of the last one, without writing to memory.

        Raises:
            RuntimeError: Gradients of the last step are on their way; or an update that was deferred has failed.
        """
        with self.lock:
            contract.check(self.current.state, "zero_grad")
            failed, self.current.failed = self.current.failed, {}
            contract.refuse_failed(failed if self.pending is None else failed | self.pending.take_failed())
            self._adopt_learned()
            self.current = GradientStep(self)
            for slot in self.slots:
                if not isinstance(slot.param, Pending) and slot.param.grad is not None:
                    slot.param.grad = None

    def _adopt_learned(self) -> None:
        """Between steps, adopt what was learned of the order and of engines."""
        if self.learned is not None:
            self.settle()
            self.engine.start()  # it may still have to clear what it has sent, which it knows by its place in the pool
            self.gradients.lay_out(self.learned)
            self.learned = None
            self.engine.rebuild_buckets()
            self.generation += 1
        self.engine = self.engine.begin()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: a backward inside the context pushes nothing, as with DDP's ``no_sync``."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def end_backward(self) -> SyncStats:
        """End the step's last backward: synchronise every gradient that is not deferred.

        ``finish`` and ``step`` call it. Parameters that backward did not reach are sent with a gradient of zero. So an
        unused layer neither delays the others nor makes ranks disagree. A second call in a step does nothing.

        Returns:
            The cost of the step's synchronisation on this rank.

        Raises:
            RuntimeError: A gradient was changed while it was sent.
        """
        with self.lock:
            return self.current.end_backward()

    def finish(self) -> SyncStats:
        """Wait until every ``p.grad`` is the mean over all ranks, or None where no rank has used the parameter.

        Afterwards gradients may be read, clipped, unscaled and replaced, before ``step`` or the optimizer's own step.
        Do not call it where none of this is needed: a deferring engine can then no longer overlap its messages with the
        next forward. A second call in a step does nothing.

        Returns:
            The cost of the step's synchronisation on this rank.

        Raises:
            RuntimeError: As for ``end_backward``; or the step is over.
        """
        with self.lock:
            self.current.means()
            return self.current.end_backward()

    def step(self, *optimizers: Optimizer, then: Sequence[Update] = ()) -> SyncStats:
        """End the step, once: update all parameters with the mean of their gradients over the ranks.

        With a deferring engine, each layer is updated just before it is used again, with the hyper-parameters of this
        call: an ``lr_scheduler`` may step right after it. ``optimizer.state_dict()`` carries out deferred updates. An
        optimizer that needs all gradients at once (see ``needs_all``) waits for them here. Parameters that are in
        another pool are not updated.

        Args:
            *optimizers: Optimizers of torch, or with the same interface, in the order in which they step.
            then: Functions that get the list of parameters that were just updated, such as a moving average's.

        Returns:
            The cost of the step's synchronisation on this rank.

        Raises:
            ValueError: An optimizer's step requires a closure; it has none of this pool's parameters, or one with a
                gradient that is in no pool; or the engine sends only a part of the gradients, and the optimizer is not
                one of ``imagenet_fast.training.optimizers``.
            RuntimeError: The step is over; or as for ``end_backward``.
        """
        whole = [contract.check_optimizer(optimizer, self.gradients.slot_of) for optimizer in optimizers]
        contract.check_optimizers(optimizers, self.engine)
        at_once = all(whole) and not self.engine.defers
        apply = InTurn([snapshot_step(optimizer, at_once) for optimizer in optimizers], then)
        for optimizer in optimizers:
            settle_before_state(optimizer)
        self.update(apply, at_once=any(map(needs_all, optimizers)))
        return self.end_backward()

    def update(self, apply: Update, at_once: bool = False) -> None:
        """End the step as ``step`` does, for loops without an optimizer.

        Args:
            apply: Updates the parameters it is given, now or, if the engine defers, before each is used again. It must
                capture what belongs to this step, as the learning rate.
            at_once: Whether ``apply`` needs all gradients in one call. A deferring engine then waits for them here.
        """
        with self.lock:
            self.current.apply(apply, at_once)

    @property
    def repeats(self) -> bool:
        """True if the next step makes the calls of the last one on the same memory, until ``generation`` changes."""
        left = not self.engine.defers or (self.pending is not None and self.pending.is_whole)
        return left and self.knows_order and self.engine.is_steady

    def drop(self) -> None:
        """Drop the step, before ``finish`` or ``step``, as after an exception. All ranks must, or the next one fails.

        What a quantising, sparse or low-rank engine has sent of its residual is lost.
        """
        with self.lock:
            self.current.drop()

    def settle(self) -> None:
        """Carry out every deferred update.

        Whatever torch does with a parameter carries out its update first. Call this before parameters are read in
        another way: through views and detached tensors from before the step, by ``torch.func``, or in C++.
        """
        if self.pending is not None:
            self.pending.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps depend on besides the parameters and the optimizer. Carry out deferred updates first.

        Every rank must call it between steps, and keep its own result: they differ between ranks.
        """
        with self.lock:
            contract.check_save(self.current.state, self.engine)
            self.settle()
            self._adopt_learned()
            if self.current.state is StepState.OPEN:
                self.current = GradientStep(self)
            order = [slot.name for slot in self.slots] if self.knows_order else None
            elected = {"elected": self.engine.elected} if self.engine.elected else {}
            return {"order": order, "engine": self.engine.state_dict() | elected, "ranks": self.topology.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a value of ``state_dict``; from one of another number of ranks if it has no residual.

        Raises:
            ValueError: The engine cannot resume from this state.
            RuntimeError: Gradients are on their way.
        """
        contract.check_state(state, self.topology.size)
        contract.check(self.current.state, "load_state_dict")
        self.settle()
        if state["order"] is not None and self.gradients.set_order(state["order"]):
            self.knows_order, self.learned = True, None
            self.engine.rebuild_buckets()
        own = dict(state["engine"])
        self.engine = self.engine.go_on_as(own.pop("elected", ""))
        self.engine.load_state_dict(own)
        self.generation += 1
        self.current = GradientStep(self)

    def close(self) -> None:
        """Carry out deferred updates, close the engine with its threads and process groups, and remove all hooks.

        In the middle of a step it does not wait for other ranks, which may have left the step. While another exception
        is handled, as in ``finally``, it raises none of its own: a failure is added to that exception as a note. A fork
        of the process ends nothing that the other one uses.
        """
        if not self.is_open:
            return
        users = sys.exc_info()[1]
        self.before_close()
        while self._hooks:
            self._hooks.pop().remove()
        self.gradients.close()
        if self.current.state is StepState.FORKED:
            return
        try:
            try:
                self.settle()
            finally:
                self._end_engine()
        except Exception as error:
            if users is None:
                raise
            users.add_note(f"closing the pool failed as well: {error}")

    def _end_engine(self) -> None:
        state, self.current.state = self.current.state, StepState.CLOSED
        if state is StepState.SENDING:
            for param in self.parameters:
                param.grad = None  # it may be a placeholder
            self.topology.drop(self.engine)
            return
        self.engine.close()
        if self._own_topology:
            self.topology.close()


def _on_gradient(known: weakref.ref[GradientPool], number: int, _: object) -> None:
    """Handle a gradient; torch passes on what the hook before has returned in place of the parameter."""
    pool = known()
    if pool is None:
        return
    if pool.current.state is StepState.OPEN:
        contract.refuse_compiled_autograd()
    with pool.lock:
        pool.current.on_gradient(pool.gradients.slot_of[pool.parameters[number]])
