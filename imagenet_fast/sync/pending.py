"""Updates that wait for the next forward: each parameter is updated just before it is used.

With an engine that defers, gradients are still in flight when the optimizer would step. So the update is kept, with the
learning rate it was made for. Until a parameter is updated, its class is one of ``Pending``: the first torch function
that is called with it, in a forward or anywhere else, carries out its update. After hybrid all-reduce (Kim et al., KIPS
Trans. 10(7), 2021, doi 10.3745/KTCCS.2021.10.7.191). The result is bit for bit that of updating at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.jit import ScriptModule
from torch.optim.optimizer import _foreach_supported_types

from imagenet_fast.sync import contract
from imagenet_fast.sync.engine import SyncEngine
from imagenet_fast.sync.param_slot import ParamSlot

Update = Callable[..., object]
"""A function that applies the gradients of the parameters in a list, and needs no others to do so.

From an engine that sends only some elements it also gets the ``Elements`` that it may update (see ``sync.engine``).
"""

_SET_GRAD: Any = Tensor.grad.__set__  # type: ignore[union-attr]
_METADATA = frozenset({
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "grad", "requires_grad", "is_leaf", "grad_fn", "ndim", "_version",
        "is_cuda", "is_cpu", "is_sparse", "is_meta", "is_nested", "is_quantized", "itemsize", "nbytes",
    )),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.__len__, Tensor.nelement, Tensor.storage_offset,
    _SET_GRAD, _SET_GRAD.__self__.__delete__,
})  # fmt: skip
"""The functions that do not depend on a tensor's values, and do not change them."""


class Pending(Tensor):
    """A parameter whose update is pending. Whatever is done with its values, the update is carried out first."""

    _pending_update: PendingUpdate

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out the updates of all parameters among the arguments, unless ``func`` only reads metadata."""
        if func not in _METADATA:
            settle = _break_graph if torch.compiler.is_compiling() else _settle_in
            if settle(args, kwargs):
                return func(*args, **(kwargs or {}))
        elif func == _SET_GRAD and args[1] is not None:
            contract.refuse("unseen read", args[0]._pending_update._slot_of[id(args[0])])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what unpickles as the parameter after the update."""
        settle_all([self])
        return self.__reduce_ex__(protocol)


def settle_all(params: Iterable[Tensor]) -> None:
    """Carry out the pending updates of ``params``."""
    for param in params:
        if (pending := getattr(param, "_pending_update", None)) is not None:
            pending.settle([param])


def _settle_in(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Carry out the pending updates of all parameters among the arguments; return False in such an update itself."""
    params = _find(kwargs.values() if kwargs else (), _find(args, []))
    settle_all(params)
    return not any(isinstance(param, Pending) for param in params)


_break_graph: Any = torch._disable_dynamo(_settle_in)  # type: ignore[attr-defined]  # torch.compiler's loads dynamo
_break_graph._torchdynamo_disable = True  # so that where no graph may be broken, it tells why:
_break_graph._torchdynamo_disable_msg = (
    "an update of this model is pending; call pool.settle() in front of a function that is compiled with "
    "fullgraph=True, or compile the model instead, before its pool is made"
)


@cache
def _pending_class(kind: type[Tensor]) -> type[Tensor]:
    """Return the class of parameters of ``kind`` while their update is pending. Calling it makes one of ``kind``."""
    made = type(f"Pending{kind.__name__}", (Pending, kind), {"__new__": lambda _, *args, **named: kind(*args, **named)})
    if kind in _foreach_supported_types:  # else torch's optimizers update tensor by tensor on GPUs
        _foreach_supported_types.append(made)  # type: ignore[arg-type]
    return made


class PendingUpdate:
    """A step's update of a pool's parameters, carried out part by part."""

    def __init__(
        self,
        engine: SyncEngine,
        slots: Sequence[ParamSlot],
        used: Callable[[Sequence[ParamSlot]], list[nn.Parameter]],
        apply: Update,
        lock: threading.RLock,
        lockstep: bool,
    ) -> None:
        """Put off ``apply`` for every parameter.

        Args:
            engine: The engine that sends the gradients.
            slots: The pool's slots.
            used: Puts the gradients of slots into ``p.grad``, and returns the parameters to be updated.
            apply: The update.
            lock: Held while a part is carried out: several threads may read the parameters, to evaluate the model.
            lockstep: Whether updates wait for ranks outside the pool, as LARS does for the norms of shards. Then no
                update is carried out early: other messages may have arrived there, and the calls would not match.
        """
        self._engine, self._slots, self._used, self._apply = engine, slots, used, apply
        self._lock, self._lockstep = lock, lockstep
        self._slot_of = {id(slot.param): slot for slot in slots}
        first = slots[0].param
        self.stream = torch.cuda.current_stream(first.device) if first.is_cuda else None
        """The stream of the step, on which parts are carried out; None on a CPU."""
        self._begun: dict[ParamSlot, object] = {}  # what has begun: the part at work, the version where it failed, None
        for slot in slots:
            slot.param.grad = None  # still in flight
            slot.param._pending_update = self  # type: ignore[attr-defined]
            slot.param.__class__ = _pending_class(type(slot.param))  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        """Leave nothing of it in a parameter that a signal's handler pickles as it begins to wait, or ends."""
        return type(None), ()

    @property
    def unread(self) -> set[ParamSlot]:
        """The slots whose parameters nothing has been seen to use since the step, be they updated or not."""
        return {slot for slot in self._slots if isinstance(slot.param, Pending)}

    @property
    def is_whole(self) -> bool:
        """True if nothing has been carried out."""
        return not self._begun

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors of its step that it reads, besides gradients, such as learning rates."""
        return list(getattr(self._apply, "inputs", ()))

    def again(self, last: PendingUpdate) -> PendingUpdate:
        """Return this update of another step, which parameters wait for instead of this one's and of ``last``."""
        for slot in self._slots:
            self._set_back(slot.param)
            last._set_back(slot.param)
        return PendingUpdate(self._engine, self._slots, self._used, self._apply, self._lock, self._lockstep)

    def take_failed(self) -> dict[ParamSlot, int]:
        """Return, once, the slots whose part ended in an exception, with the version of each parameter then."""
        failed = {slot: at for slot, at in [*self._begun.items()] if at is not None}
        self._begun.update(dict.fromkeys(failed))
        return {slot: at if isinstance(at, int) else slot.param._version for slot, at in failed.items()}

    def settle(self, params: Sequence[Tensor] | None = None) -> None:
        """Carry out the update of ``params``, or of all that are left, and of arrived neighbours.

        It may be called again while it is at work, by a signal's handler. A parameter that waits for a newer update is
        left alone. The class of neighbours stays: who read them before, unseen, has read old weights (see ``unread``).

        Raises:
            RuntimeError: Operations are being recorded, as by torch.export, and the update would be among them.
        """
        with self._lock:
            waiting = (slot.param for slot in self._slots if isinstance(slot.param, Pending))
            asked = list(waiting) if params is None else params
            if len(self._begun) < len(self._slots):
                slots = [self._slot_of[id(param)] for param in asked]
                if due := [slot for slot in slots if slot not in self._begun]:
                    self._settle(due)
            for param in asked:
                self._set_back(param)

    def _settle(self, due: list[ParamSlot]) -> None:
        """Wait for the messages of ``due``, and carry out their part and that of arrived neighbours.

        A GPU does so on the stream that has ended the step. Another one that reads waits for it, and for all parts.
        """
        _refuse_recording(self._engine.captures)
        if self.stream is not None and (reader := torch.cuda.current_stream(self.stream.device)) != self.stream:
            with torch.cuda.stream(self.stream):
                self._settle([slot for slot in self._slots if slot not in self._begun])
            reader.wait_stream(self.stream)
            return
        for slot in [self._slots[-1], *due]:  # the last one tells that all ranks have ended their backward
            self._engine.wait(slot)
        for slot in () if self._lockstep else self._arrived_neighbours(due):
            self._engine.wait(slot)  # which counts its messages
            due.append(slot)
        part = [slot for slot in due if self._begun.setdefault(slot, due) is due]  # others went with a handler's part
        try:
            self._carry_out(part)
        except BaseException:
            for slot in part:
                self._begun[slot] = slot.param._version
                self._set_back(slot.param)
            raise
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for slot in part:
                    slot.param.grad = None
        self._begun.update(dict.fromkeys(part))

    def _set_back(self, param: Tensor) -> None:
        """Give a parameter the class that it had before, unless it waits for the update of another step."""
        kind = type(param)
        if issubclass(kind, Pending) and getattr(param, "_pending_update", None) is self:
            with torch._C.DisableTorchFunctionSubclass():  # for an audit hook that shows what is assigned
                param.__class__ = kind.__mro__[2]
            vars(param).pop("_pending_update", None)

    def _arrived_neighbours(self, due: Sequence[ParamSlot]) -> list[ParamSlot]:
        """Return neighbours of ``due`` whose messages have been received: a larger update costs little more."""
        taken, others = set(due), []
        for slot in due:
            for step in (1, -1):
                index = slot.index + step
                while 0 <= index < len(self._slots):
                    other = self._slots[index]
                    if other in taken or other in self._begun or not self._engine.has_arrived(other):
                        break
                    taken.add(other)
                    others.append(other)
                    index += step
        return others

    def _carry_out(self, slots: Sequence[ParamSlot]) -> None:
        """Apply the update, outside of autocast and inference mode, in either of which a forward may run."""
        if not slots:
            return
        device = slots[0].param.device.type
        casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(),
            torch.no_grad(),
            torch.autocast(device, enabled=False) if casts else nullcontext(),
        ):
            params = self._used(slots)
            self._apply(params)
            increment_version(params)  # fused optimizers do not, and autograd would miss a stale read


class PendingGrad(Tensor):
    """A placeholder for a gradient between backward and ``pool.finish()``.

    Any use except of its metadata (shape, dtype, ...) raises RuntimeError. With DDP, ``p.grad`` holds means at this
    time. Here messages may still be in flight: a read would give neither the local gradient nor the mean, and a write
    might reach some ranks and not others.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow metadata, and raise RuntimeError for everything else."""
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func is Tensor.__repr__:
            return "PendingGrad(on its way to the other ranks)"
        raise RuntimeError(
            "a gradient was used while it is on its way to the other ranks; call pool.finish() after backward, before "
            "gradients are read, clipped, unscaled, zeroed or applied, and begin steps with pool.zero_grad()"
        )


class Readers:
    """Who may read a pool's parameters without a torch function that is called with them: their memory tells."""

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        """Look at the memory of the parameters of ``slots``."""
        self._params = [slot.param for slot in slots]
        self._scripted = [slot.param for slot in slots if isinstance(slot.module, ScriptModule)]
        on_cpu = slots[0].param.device.type == "cpu"
        self._is_shared = torch.UntypedStorage.is_shared if on_cpu else lambda _: False  # a GPU's always says so
        self._look()

    def unseen(self) -> list[nn.Parameter]:
        """Return the parameters of scripted modules, and those whose memory somebody else holds.

        That is another parameter, a view or a ``state_dict`` that was kept, or another process.
        """
        if {*map(_uses, self._ids)} == {2} and not any(map(self._is_shared, self._storages)):
            return self._scripted
        self._look()
        held = [_uses(id) > 2 or self._is_shared(of) for id, of in zip(self._ids, self._storages, strict=True)]
        return self._scripted + list(compress(self._params, held))

    def _look(self) -> None:
        self._storages = [param.untyped_storage() for param in self._params]  # each is held by its parameter and here
        self._ids = [storage._cdata for storage in self._storages]


_uses: Callable[[int], int] = torch._C._storage_Use_Count


def _find(values: Iterable[Any], found: list[Pending]) -> list[Pending]:
    """Add the pending parameters in nested lists, tuples and dicts to ``found``, and return it."""
    for value in values:
        if isinstance(value, Pending):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _find(value, found)
        elif isinstance(value, dict):
            _find(value.values(), found)
    return found


def _refuse_recording(captures: bool) -> None:
    """Raise RuntimeError if operations are recorded: an update would become a part of the program.

    ``captures`` tells whether the pool captures its own step.
    """
    if (
        torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or get_proxy_mode() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (not captures and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    ):
        raise RuntimeError(
            "an update of this model is pending, and would become a part of what is traced, exported or captured here; "
            "call pool.settle() before"
        )
