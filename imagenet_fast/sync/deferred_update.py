"""Updates that wait for the next forward: each layer is updated just before it is read.

With an engine that defers, gradients are still in flight when the optimizer would step. So the update is kept, with the
learning rate it was made for, and applied layer by layer as the next forward gets there. After hybrid all-reduce (Kim
et al., KIPS Trans. 10(7), 2021, doi 10.3745/KTCCS.2021.10.7.191). The result is bit for bit that of updating at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

from imagenet_fast.sync.access_hooks import (
    Hook,
    Pending,
    outside_of_traces,
    remove_copy_hook,
    settle_before_access,
    settle_before_trace,
)
from imagenet_fast.sync.engine import SyncEngine
from imagenet_fast.sync.param_slot import ParamSlot, label_of

Update = Callable[..., object]
"""A function that applies the gradients of the parameters in a list, and needs no others to do so.

From an engine that sends only some elements it also gets the ``Elements`` that it may update (see ``sync.engine``).
"""


class DeferredUpdate:
    """The pending updates of ``model``, and the hooks that apply each in time.

    In training, a layer is updated just before the forward of a module that reads it. The first forwards show which
    modules do (``FirstUseTracker``). A parameter that no module reads is updated at once. Our hooks run before a
    module's other hooks, which may read its parameters (as those of ``nn.utils.prune`` do).

    Code that reads a parameter before any forward gets an error from autograd, which sees that the parameter has
    changed. Some operations keep nothing that autograd could check. So it is an error, too, if a module is called
    outside the one that called it at first and whose own parameters are not up to date yet.

    All updates are applied where this cannot be relied on:

    - before a forward in evaluation or without gradients;
    - before the forward of a module that the first forwards did not call;
    - before code outside the forward reads, converts, saves, loads, copies or pickles the model
      (``settle_before_access``).
    """

    def __init__(
        self,
        model: nn.Module,
        engine: SyncEngine,
        slots: Sequence[ParamSlot],
        used: Callable[[Sequence[ParamSlot]], list[nn.Parameter]],
        lockstep: bool = False,
    ) -> None:
        """Hook every module of ``model``.

        Args:
            model: The model whose forward reads the parameters.
            engine: The engine that sends the gradients.
            slots: The pool's slots.
            used: Puts the gradients of slots into ``p.grad``, and returns the parameters to be updated.
            lockstep: Whether updates wait for ranks outside the pool, as LARS does for the norms of shards. Then no
                update is applied early: other messages may have arrived there, and the ranks' calls would not match.
        """
        self.engine = engine
        self._used = used
        self._lockstep = lockstep
        self._pending: dict[ParamSlot, None] = {}
        self._updates: list[Update] = []
        self._unchanged: dict[ParamSlot, tuple[int, int]] = {}  # version and place of what is pending
        self._failed = ""  # the layers whose update ended in an exception that the user has not been told of again
        self._readers = FirstUseTracker(model, [slot.param for slot in slots])
        self._lock = threading.RLock()  # several threads may call the model, to evaluate it
        self._model = model
        self._thread = threading.local()
        self._called: set[nn.Module] = set()
        self.lay_out(slots)
        before_forward, settle = Hook(self._before_forward), Hook(lambda *_: self.settle())
        loading = Hook(lambda *_: self._settle_before_loading())
        self._modules = list(model.modules())
        self._hooks = [model.register_forward_hook(Hook(self._after_forward), always_call=True)]
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(before_forward, prepend=True))
            self._hooks.append(module.register_state_dict_pre_hook(settle))
            self._hooks.append(module.register_load_state_dict_pre_hook(loading))
            settle_before_access(module, Pending(self.settle, self._settle_one, self._is_inside))

    def close(self) -> None:
        """Apply all pending updates, and remove the hooks."""
        try:
            self.settle()
        finally:
            self._readers.close()
            for hook in self._hooks:
                hook.remove()
            for module in self._modules:
                remove_copy_hook(module, self.settle)

    def lay_out(self, slots: Sequence[ParamSlot]) -> None:
        """Take the pool's new slots. No update may be pending."""
        assert not self._pending
        self._slots = list(slots)
        self._read_by: dict[nn.Module, list[ParamSlot]] | None = None
        self._read_around: dict[nn.Module, list[ParamSlot]] = {}
        self._unread: list[ParamSlot] = []

    def update(self, apply: Update, at_once: bool) -> None:
        """Defer ``apply`` for every parameter that a forward hook will reach; with ``at_once``, defer nothing."""
        with self._lock:
            if self._read_by is None and self._readers.called:  # else there was no forward to learn from yet
                self._readers.close()
                self._called = set(self._readers.called)
                by_param = {slot.param: slot for slot in self._slots}
                readers = self._readers.by_module()
                self._read_by = {module: [by_param[param] for param in params] for module, params in readers.items()}
                self._read_around = self._readers.around(self._read_by)
                read = {slot for slots in self._read_by.values() for slot in slots}
                self._unread = [slot for slot in self._slots if slot not in read]
            if at_once or len(self._pending) < len(self._slots) - len(self._unread):
                self._bring_up_to_date(list(self._pending))  # a forward has read some since the last update
            now = self._slots if at_once or self._read_by is None else self._unread
            if not self._pending and not at_once:
                self._updates = []
                self._pending = dict.fromkeys(slot for slot in self._slots if slot not in set(now))
            if not at_once:
                self._updates.append(apply)
            for slot in now:
                self.engine.wait(slot)
            if now:
                self._apply([apply], now)
            self._unchanged = {slot: (slot.param._version, slot.param.data_ptr()) for slot in self._pending}
            for slot in self._pending:
                slot.param.grad = None  # still in flight, so zero_grad must not zero it in place

    def settle(self) -> None:
        """Apply every pending update."""
        if not self._pending:
            return
        with self._lock, outside_of_traces():
            self._bring_up_to_date(list(self._pending))

    def _settle_one(self, param: nn.Parameter) -> None:
        """Apply the pending update of ``param``, if there is one."""
        with self._lock:
            self._bring_up_to_date([slot for slot in self._pending if slot.param is param])

    def refuse_failed(self) -> None:
        """Raise RuntimeError, once, if an update has failed halfway: a loop that goes on has lost a part of a step."""
        failed, self._failed = self._failed, ""
        if failed:
            raise RuntimeError(
                f"an update of {failed} failed halfway, and its weights are of no step; go on from a checkpoint"
            )

    def _settle_before_loading(self) -> None:
        self.settle()
        self._failed = ""  # from now on the weights are of a checkpoint

    def waits(self, slot: ParamSlot) -> bool:
        """Return whether the update of ``slot`` is pending."""
        return slot in self._pending

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if not torch.compiler.is_compiling() and module is self._model:
            self._thread.inside = module.training and torch.is_grad_enabled()
        if not self._pending:
            return
        settle_before_trace(self.settle, inputs)
        with self._lock:
            if not self._pending or self._read_by is None:
                return
            inside = self._is_inside()
            trains = inside or (module.training and torch.is_grad_enabled())
            if trains and module in self._called:
                if not inside:
                    self._refuse_bypassed(module)
                self._bring_up_to_date(self._read_by.get(module, []))
            else:
                self._bring_up_to_date(list(self._pending))

    def _refuse_bypassed(self, module: nn.Module) -> None:
        """Raise RuntimeError if a module around ``module`` was not called that is up to date only if it is."""
        if stale := [slot for slot in self._read_around.get(module, ()) if slot in self._pending]:
            name = next(name for name, other in self._model.named_modules() if other is module)
            raise RuntimeError(
                f"{name} is called outside the module that called it in the first step, so {stale[0].name} may have "
                "been read before its update; call pool.settle() before"
            )

    def _after_forward(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._thread.inside = False

    def _is_inside(self) -> bool:
        """Return whether this thread is in a training forward of the whole model."""
        return getattr(self._thread, "inside", False)

    def _bring_up_to_date(self, slots: list[ParamSlot]) -> None:
        """Apply the pending updates of ``slots``, and set their ``p.grad`` to None."""
        late = [slot for slot in slots if slot in self._pending]
        if not late:
            return
        for slot in late:
            self.engine.wait(slot)
            del self._pending[slot]
            if self._unchanged[slot] != (slot.param._version, slot.param.data_ptr()):
                raise RuntimeError(
                    f"{slot.name} was written to while its update was pending; call pool.settle() before weights are "
                    "changed in another way than by pool.step()"
                )
        late += self._came_along(late)
        try:
            self._apply(self._updates, late)
        except BaseException:
            self._failed = label_of(late)
            raise
        for slot in late:
            slot.param.grad = None

    def _came_along(self, arrived: Sequence[ParamSlot]) -> list[ParamSlot]:
        """Return pending neighbours of ``arrived`` whose messages have been received, and mark them as not pending.

        One update of many parameters costs little more than one of a few.
        """
        others: list[ParamSlot] = []
        for slot in () if self._lockstep else arrived:
            for step in (1, -1):
                index = slot.index + step
                while 0 <= index < len(self._slots):
                    neighbour = self._slots[index]
                    if neighbour not in self._pending or not self.engine.has_arrived(neighbour):
                        break
                    del self._pending[neighbour]
                    others.append(neighbour)
                    index += step
        return others

    def _apply(self, updates: Sequence[Update], slots: Sequence[ParamSlot]) -> None:
        """Apply ``updates`` outside of autocast and inference mode, in either of which the forward may run."""
        device = slots[0].param.device.type
        infers = torch.is_inference_mode_enabled()
        casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        with (
            torch.inference_mode(False) if infers else nullcontext(),
            torch.no_grad(),
            outside_of_traces(),
            torch.autocast(device, enabled=False) if casts else nullcontext(),
        ):
            params = self._used(slots)
            for apply in updates:
                apply(params)
        increment_version(params)  # fused optimizers do not, and autograd would miss a stale read


class FirstUseTracker:
    """An observer of the forwards of ``model`` and its modules, until it is closed.

    A parameter is mostly read by the module that owns it. But ``nn.MultiheadAttention`` reads its ``out_proj``, and any
    forward may read a weight before it calls the layer. So the arguments of every torch function that a forward calls
    are inspected. A read that torch does not show, as in compiled code, counts as one by the owner. If the owner is not
    called, it counts as one by the nearest ancestor that is.
    """

    def __init__(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Hook every module of ``model``; only reads of ``params`` are recorded."""
        self._model = model
        self._params = set(params)
        self._reads: dict[nn.Parameter, dict[nn.Module, None]] = {}
        self._entered: set[nn.Module] = set()  # outside the forward of any other
        self._called: set[nn.Module] = set()
        self._thread = threading.local()
        enter, leave = Hook(self._enter), Hook(self._leave)
        self._hooks = []
        for module in model.modules():
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))

    @property
    def called(self) -> set[nn.Module]:
        """The modules whose forward has run."""
        return self._called

    def close(self) -> None:
        """Stop observing."""
        for hook in self._hooks:
            hook.remove()

    def by_module(self) -> dict[nn.Module, dict[nn.Parameter, None]]:
        """Return the parameters that must be up to date before each module's forward, without those never read."""
        readers: dict[nn.Module, dict[nn.Parameter, None]] = {}

        def visit(owner: nn.Module, reader: nn.Module | None) -> None:
            if owner in self._called:
                reader = owner
            for param in owner._parameters.values():
                owners = [reader] if reader is not None else []
                if param is None or param not in self._params:
                    continue
                for module in self._reads.get(param, owners):
                    readers.setdefault(module, {})[param] = None
            for child in owner.children():
                visit(child, reader)

        visit(self._model, None)
        at: dict[int, list[nn.Parameter]] = {}
        for param in self._params:
            at.setdefault(param.data_ptr(), []).append(param)
        at.pop(0, None)  # empty ones, and those on the meta device, lie nowhere
        for read in readers.values():  # some may share memory, as after dec.weight.data = enc.weight.data
            read |= {other: None for param in [*read] for other in at.get(param.data_ptr(), ())}
        above = self._above()
        passed = {outer for module in self._entered for outer in above[module]}  # their methods may have been called
        early = {param for outer in passed for param in readers.get(outer, ())}
        return {module: {param: None for param in read if param not in early} for module, read in readers.items()}

    def around(self, read_by: Mapping[nn.Module, Sequence[ParamSlot]]) -> dict[nn.Module, list[ParamSlot]]:
        """Return, by module, what the modules around it read, if it is never called outside their forwards."""
        around = {
            module: [slot for outer in outers if outer in self._called for slot in read_by.get(outer, ())]
            for module, outers in self._above().items()
            if module not in self._entered
        }
        return {module: slots for module, slots in around.items() if slots}

    def _above(self) -> dict[nn.Module, list[nn.Module]]:
        """Return the modules around each module; none if it has several places in the model."""
        above: dict[nn.Module, list[nn.Module]] = {}

        def visit(module: nn.Module, outers: list[nn.Module]) -> None:
            if module in above:
                outers = []
            above[module] = outers
            for child in module.children():
                visit(child, [*outers, module])

        visit(self._model, [])
        return above

    def _enter(self, module: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        inside: list[nn.Module] = vars(self._thread).setdefault("inside", [])
        if not inside:
            self._thread.reading = _Reading(self._note)
            self._thread.reading.__enter__()
            self._entered.add(module)
        inside.append(module)
        self._called.add(module)

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        inside: list[nn.Module] = vars(self._thread).get("inside", [])
        if inside and inside[-1] is module:
            inside.pop()
            if not inside:
                self._thread.reading.__exit__(None, None, None)

    def _note(self, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter) and tensor in self._params:
            self._reads.setdefault(tensor, {})[self._thread.inside[-1]] = None


class _Reading(TorchFunctionMode):
    """A mode that calls ``note`` with every tensor passed to a torch function."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            self._note(tensor)
        return function(*args, **(kwargs or {}))


def _tensors(value: object) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case list() | tuple():
            for part in value:
                yield from _tensors(part)
        case dict():
            for part in value.values():
                yield from _tensors(part)
