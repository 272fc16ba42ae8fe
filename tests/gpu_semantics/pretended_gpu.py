"""A GPU of which every operation is done at once on the CPU, while a detector is told on which stream it would run.

The code under test takes its CUDA paths: its tensors say that they are on ``cuda:1``, and ``torch.cuda``'s streams and
events, the caching allocator and process groups with a stream of their own each are stand-ins that order nothing but
what CUDA and NCCL do. Several ranks exchange real values, by gloo.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from imagenet_fast.sync import comm_stream
from tests.gpu_semantics.accesses import asks_for_values, inner_of, positions, tensors_in, touched
from tests.gpu_semantics.captured import Graph, graph_stand_ins
from tests.gpu_semantics.pretended_nccl import collectives
from tests.gpu_semantics.race_detector import HOST, Access, RaceDetector
from tests.gpu_semantics.random_orders import Place, Recording

CUDA = torch.device("cuda", 1)
"""Not the first: in new threads that is the current one."""
CPU = torch.device("cpu")
PACKAGE = str(Path(comm_stream.__file__).parents[1])


class OnGpu(Tensor):
    """A tensor that says it is on the GPU. Its values are in ``held``, on the CPU; to C++ it is on ``meta``."""

    held: Tensor

    @staticmethod
    def __new__(cls: type[Tensor], inner: Tensor) -> OnGpu:
        tensor: OnGpu = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta",
        )  # fmt: skip
        tensor.held = inner
        return tensor

    device = property(lambda _: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda _: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def as_subclass(self, cls: type[Tensor]) -> Any:
        return OnGpu.__new__(type(cls.__name__, (cls, OnGpu), {}), self.held)

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = self.detach().clone()
        is_param = isinstance(self, nn.Parameter)
        return memo.setdefault(id(self), nn.Parameter(copy, self.requires_grad) if is_param else copy)

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        gpu().order(stream, lambda own, x: gpu().detector.share(_block_of(x.held), own.number), self)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return gpu().carry_out(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class Mark:
    """What is recorded of a stream; of one that is captured for a ``graph``, in its last replay."""

    def __init__(self, stream: Stream) -> None:
        self.graph = gpu().capturing(stream)
        gpu().order(stream, self._set)

    def _set(self, stream: Stream) -> None:
        self.moment = gpu().detector.moment(stream.number)


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, *, external: bool = False) -> None:
        self.external = external
        self.mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or gpu().current
        if self.external and (graph := gpu().capturing(stream)):
            graph.add(self.record, stream)
        else:
            self.mark = Mark(stream)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or gpu().current
        if gpu().deaf("wait_event"):
            return
        if self.external and (graph := gpu().capturing(stream)):
            graph.external[self] = None
            graph.add(lambda own: gpu().wait_for(own, graph.external[self]), stream)
        else:
            gpu().wait_for(stream, self.mark)

    def synchronize(self) -> None:
        gpu().host_waits("Event.synchronize")
        if gpu().current_device() != CUDA.index:
            gpu().detector.report("an event is waited for while another GPU is current, which gets a context for it")
        if gpu().may_use(self.mark):
            gpu().detector.wait(HOST, self.mark.moment)

    def query(self) -> bool:
        gpu().host_waits("Event.query", asks=True)
        gpu().may_use(self.mark)
        return True

    def elapsed_time(self, other: Event) -> float:
        gpu().may_use(self.mark)
        gpu().may_use(other.mark)
        return 1.0


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = CUDA
        self._number = gpu().detector.add_stream()

    @property
    def number(self) -> int:
        """To the detector; of a stream that is captured, that of the graph's stream in its place."""
        graph = gpu().capturing(self)
        return self._number if graph is None else graph.streams[self]._number

    cuda_stream = property(lambda self: self.number)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        if not gpu().deaf("wait_stream"):
            self.follow(other)

    def follow(self, other: Stream) -> None:
        """Wait for it in any case."""
        gpu().wait_for(self, Mark(other))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        gpu().host_waits("Stream.synchronize")
        gpu().detector.wait(HOST, gpu().detector.moment(self.number))


class PretendedGpu:
    """One rank's GPU. Inside ``with`` its tensors can be made and used.

    ``allowed``: where the host may wait for the GPU inside :meth:`step`, as it is told otherwise.
    ``without``: "wait_event" or "wait_stream", which then do nothing: for tests of the detector.
    """

    def __init__(
        self, allowed: frozenset[str] = frozenset(), harmless: frozenset[str] = frozenset(), without: str = "",
        records: bool = False,
    ) -> None:  # fmt: skip
        self.detector = RaceDetector(harmless)
        self.recording = Recording() if records else None
        self.met: set[str] = set()
        """Of ``allowed``, where it has waited."""
        self._allowed = allowed
        self._without = without
        self._in_step = False
        self._pinned: set[int] = set()
        self._storages: dict[int, StorageWeakRef] = {}
        self.wrap, self.place = OnGpu, _place
        self.group_limits: list[int | None] = []
        """Thread blocks that NCCL may take, by group that was made."""
        self._communicators: dict[Any, Stream] = {}
        self._threads = threading.local()
        self._stack = ExitStack()
        self.capture: Graph | None = None
        """The graph that is being captured."""
        self.strict_capture = False
        """Whether a host that waits inside a capture gets an exception, as from a real GPU."""
        self.graphs: WeakSet[Graph] = WeakSet()

    def __enter__(self) -> PretendedGpu:
        global _gpu
        assert _gpu is None
        _gpu = self
        self.default = self.current = Stream()
        self._threads.device = CUDA.index
        for target, name, stand_in in self._stand_ins():
            self._stack.enter_context(patch.object(target, name, stand_in, create=True))
        self._stack.enter_context(_Factories())
        self._stack.enter_context(_Dispatch())
        return self

    def __exit__(self, *_: object) -> None:
        global _gpu
        self._stack.close()
        _gpu = None

    def move(self, model: nn.Module) -> nn.Module:
        """``model.cuda()``."""
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    module._parameters[name] = nn.Parameter(self.take(param.detach()), param.requires_grad)
            for name, values in module._buffers.items():
                if values is not None:
                    module._buffers[name] = self.take(values)
        return model

    def take(self, values: Tensor) -> OnGpu:
        """A copy on the GPU, made before everything else."""
        inner = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype).copy_(values)
        self.note(inner, self.default, made_before=True)
        return OnGpu(inner)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Where the host must not wait for the GPU."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def current_device(self) -> int:
        """This thread's."""
        return getattr(self._threads, "device", 0)

    def deaf(self, what: str) -> bool:
        return self._without == what

    def capturing(self, stream: Stream) -> Graph | None:
        """The graph for which ``stream`` is captured."""
        return self.capture if self.capture is not None and stream in self.capture.streams else None

    def order(self, stream: Stream, act: Callable[..., None], *tensors: Any) -> None:
        """Do ``act`` on ``stream`` with ``tensors``; where it is captured, in each replay as well."""
        act(stream, *tensors)
        if graph := self.capturing(stream):
            graph.add(act, stream, *tensors)

    def wait_for(self, stream: Stream, mark: Mark | None) -> None:
        """``stream`` goes on after ``mark``, and joins the capture that this is in."""
        if mark is None or not self.may_use(mark):
            return
        if mark.graph is not None and not self.capturing(stream):
            mark.graph.join(stream)
        if self.capturing(stream) is mark.graph:
            self.order(stream, lambda own: self.detector.wait(own.number, mark.moment))
        else:
            self.detector.report(f"a captured stream waits for what is not captured, in {_caller()}")

    def may_use(self, mark: Mark | None) -> bool:
        """Whether anything has been recorded, and not in a capture that is over."""
        if mark is not None and mark.graph is not None and mark.graph is not self.capture:
            self.detector.report(f"an event that was recorded inside a capture is used outside of it, in {_caller()}")
            return False
        return mark is not None

    def host_waits(self, how: str, asks: bool = False) -> None:
        """``asks``: it only looks, which captures do not allow either."""
        where = f"{how} in {_caller()}"
        if self.capture is not None:
            self.detector.report(f"the host waits for the GPU inside a capture: {where}")
            if self.strict_capture:
                self.capture.failed = True
                raise RuntimeError("operation not permitted when stream is capturing")
        if asks or self.capture is not None or self.detector.place is not None:
            return
        if self._in_step and where in self._allowed:
            self.met.add(where)
        elif self._in_step:
            self.detector.report(f"the host waits for the GPU inside a step: {where}")

    def communicator(self, group: Any) -> Stream:
        """The stream of a process group."""
        group = group or dist.group.WORLD
        if group not in self._communicators:
            self._communicators[group] = Stream()
        return self._communicators[group]

    def carry_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation of torch's, on the current stream."""
        if func is torch.ops.aten.scalar_tensor.default:  # C++ makes it where it takes us to be
            kwargs = kwargs | {"device": CUDA}
        asked = dict(kwargs)
        tensors = tensors_in((args, kwargs))
        arrives = kwargs.get("device")
        here = [x for x in tensors if isinstance(x, OnGpu)]
        if not here and (arrives is None or torch.device(arrives).type != "cuda"):
            return self._on_host(func, args, kwargs, tensors)
        on_gpu = torch.device(arrives).type == "cuda" if arrives is not None else True
        leaves = func is torch.ops.aten._local_scalar_dense.default or torch.device(arrives or CUDA).type == "cpu"
        if leaves and not kwargs.get("non_blocking"):
            self._read_by_host(here, func.name())
            return tree_map(_copied, func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs)))
        if arrives is not None and torch.device(arrives).type == "cuda":
            kwargs = kwargs | {"device": CPU}
        kwargs.pop("pin_memory", None)
        self._look_for_crossings(func, args, kwargs, tensors)
        inners = {id(x.held): x for x in here}
        given = tree_map(self._given, (args, kwargs)) if self.recording is not None else ()
        if (how := asks_for_values(func, args)) is not None:
            self.host_waits(how)
        uses = list(touched(func, args, kwargs))
        result = func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs))
        accesses = []
        for x, rows, writes in uses:
            inner = x.held if isinstance(x, OnGpu) else x
            if isinstance(x, OnGpu) or self.is_pinned(x):
                accesses.append(Access(self.note(inner), positions(inner, rows), writes))
        fresh = [
            x for x in tensors_in(result)
            if id(x) not in inners and not self._knows(x) and x.device.type != "meta"
        ]  # fmt: skip
        for x in fresh:
            accesses.append(Access(self.note(x, self.current), positions(x), True))
        if accesses:
            self.detector.launch(self.current.number, func.name(), accesses)
            if self.recording is not None:
                self.recording.add(self.detector.last, func, *given, [_place(x) for x in fresh])
        results = tree_map(lambda x: self._wrapped(x, inners, on_gpu), result)
        if accesses and (graph := self.capturing(self.current)):
            graph.add_operation(func, args, asked, results)
        return results

    def launch(
        self, stream: Stream, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], before: dict[int, Tensor]
    ) -> None:
        """An operation that torch does not dispatch, and that has been done; ``before``: what it read then, by number,
        where it has changed."""
        read, written = ([x.held for x in some if isinstance(x, OnGpu)] for some in (reads, writes))
        accesses = [
            Access(self.note(x), positions(x), changed)
            for some, changed in ((read, False), (written, True))
            for x in some
        ]
        self.detector.launch(stream.number, name, accesses)
        if self.recording is not None:
            self.recording.add_transfer(
                self.detector.last,
                [(_place(x), before.get(id(x), x).clone()) for x in read],
                [(_place(x), x.clone()) for x in written],
            )

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        for x, _, writes in touched(func, args, kwargs):
            if self.is_pinned(x):
                self.detector.launch(HOST, f"{func.name()} of the host", [Access(_block_of(x), positions(x), writes)])
        result = func(*args, **kwargs)
        if self.recording is not None:
            changed = [x for x, _, writes in touched(func, args, kwargs) if writes and self.is_pinned(x)]
            if changed:
                self.recording.add_transfer(self.detector.last, [], [(_place(x), x.clone()) for x in changed])
        if pinned:
            self._pin(result)
        return result

    def blocks(self) -> list[int]:
        """All that are still there."""
        self.look_for_freed()
        return list(self._storages)

    def _pin(self, values: Tensor) -> None:
        if self.capture is not None:
            self.detector.report(f"pinned memory is allocated inside a capture, in {_caller()}")
        self._pinned.add(self.note(values))

    def _given(self, x: Any) -> Any:
        """An argument, for a recording."""
        if not isinstance(x, Tensor):
            return x
        inner = inner_of(x)
        if isinstance(x, OnGpu) or self.is_pinned(x):
            self.note(inner)
            return _place(inner)
        return inner.clone()

    def read_pinned(self, x: Tensor, how: str) -> None:
        """The host looks at memory that the GPU can write."""
        if not isinstance(x, OnGpu) and self.is_pinned(x):
            self.detector.launch(HOST, f"{how} of the host", [Access(_block_of(x), positions(x), False)])
            if self.recording is not None:
                self.recording.add_transfer(self.detector.last, [(_place(x), x.clone())], [])

    def _read_by_host(self, tensors: Sequence[OnGpu], how: str) -> None:
        self.host_waits(how)
        self.launch(self.current, how, tensors, [], {})
        self.detector.wait(HOST, self.detector.moment(self.current.number))

    def _look_for_crossings(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Values go between host and GPU without waiting only where that is asked, from or to pinned memory. A number
        goes with the kernel."""
        crossing = func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
        others = [x for x in tensors if not isinstance(x, OnGpu)]
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))
        if crossing and others and (waits or not all(map(self.is_pinned, others))):
            self.host_waits(f"{func.name()} between pageable memory and the GPU")

    def _wrapped(self, x: Any, inners: dict[int, OnGpu], on_gpu: bool) -> Any:
        if not isinstance(x, Tensor) or x.device.type == "meta":
            return x
        return inners[id(x)] if id(x) in inners else OnGpu(x) if on_gpu else x

    def _knows(self, inner: Tensor) -> bool:
        return _block_of(inner) in self._storages

    def is_pinned(self, x: Tensor) -> bool:
        return x.device.type == "cpu" and not isinstance(x, OnGpu) and _block_of(x) in self._pinned

    def note(self, inner: Tensor, stream: Stream | None = None, made_before: bool = False) -> int:
        """The block of a tensor's storage; a new one has been allocated on ``stream``, or long ago."""
        block = _block_of(inner)
        if block not in self._storages:
            self.look_for_freed()
            storage = inner.untyped_storage()
            self._storages[block] = StorageWeakRef(storage)
            self.detector.allocate(block, max(1, storage.nbytes()), HOST if stream is None else stream.number)
            if self.recording is not None:
                values = storage.clone() if stream is None or made_before else None
                self.recording.allocate(self.detector.last, block, storage.nbytes(), values)
        return block

    def look_for_freed(self) -> None:
        for block in [block for block, storage in self._storages.items() if _expired(storage.cdata)]:
            del self._storages[block]
            self._pinned.discard(block)
            self.detector.free(block)
            if self.capture is not None:
                self.capture.freed(block)
            if self.recording is not None:
                self.recording.free(block)

    def _stand_ins(self) -> Iterator[tuple[Any, str, Any]]:
        @contextmanager
        def stream(other: Stream | None) -> Iterator[None]:
            before, self.current = self.current, other or self.current
            try:
                yield
            finally:
                self.current = before

        @contextmanager
        def other_device(number: torch.device) -> Iterator[None]:
            before, self._threads.device = self.current_device(), number.index
            try:
                yield
            finally:
                self._threads.device = before

        def synchronize(device: object = None) -> None:
            self.host_waits("torch.cuda.synchronize")
            self.detector.wait(HOST, self.detector.everything())

        cuda = torch.cuda
        yield cuda, "_lazy_init", lambda: None
        yield cuda, "is_available", lambda: True
        yield cuda, "device_count", lambda: 2
        yield cuda, "device", other_device
        yield cuda, "current_device", self.current_device
        yield cuda, "set_device", lambda _: None
        for name, stand_in in graph_stand_ins(self):
            yield cuda, name, stand_in
        yield cuda, "Stream", Stream
        yield cuda, "Event", Event
        yield cuda, "current_stream", lambda device=None: self.current
        yield torch._C, "_cuda_getCurrentRawStream", lambda device: self.current.number
        yield cuda, "default_stream", lambda device=None: self.default
        yield cuda, "stream", stream
        yield cuda, "synchronize", synchronize
        yield dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda **_: SimpleNamespace(config=SimpleNamespace()))
        groups = collectives(self)
        for name, stand_in in groups.items():
            yield dist, name, stand_in
        yield comm_stream, "all_gather_single", groups["all_gather_into_tensor"]
        yield comm_stream, "_reduce_scatter", groups["reduce_scatter_tensor"]


_gpu: PretendedGpu | None = None


def gpu() -> PretendedGpu:
    """The one in use."""
    assert _gpu is not None
    return _gpu


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return gpu().carry_out(func, args, dict(kwargs or {}))


class _Factories(TorchFunctionMode):
    """What never comes to dispatch with its device, or at all."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            with self:  # torch has put this mode aside, and hooks make tensors too
                return torch.autograd.Variable._execution_engine.run_backward(
                    (args[0],), (torch.ones_like(args[0]),), False, False, (), True, True
                )
        if func in (torch.tensor, torch.empty) and kwargs.get("pin_memory"):
            assert "device" in kwargs, "on the default device, of which a GPU's is not pinned"
            values = func(*args, **kwargs | {"pin_memory": False})
            gpu()._pin(values)
            return values
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            rest = {name: value for name, value in kwargs.items() if name != "device"}
            return func(*args, **rest).to(_with_index(kwargs["device"]))
        if func is Tensor.is_pinned:
            return gpu().is_pinned(args[0])
        if func in (Tensor.tolist, Tensor.numpy):
            gpu().read_pinned(args[0], func.__name__)
        if func is Tensor.to:
            args = [_with_index(x) for x in args]
        if "device" in kwargs and func is not torch.device:
            kwargs = kwargs | {"device": _with_index(kwargs["device"])}
        return func(*args, **kwargs)


def _caller() -> str:
    return next(_functions(), "a test")


def _functions() -> Iterator[str]:
    """The package's functions that have led here, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            yield frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def _with_index(x: Any) -> Any:
    """Without one, torch would ask the driver for it."""
    return CUDA if isinstance(x, str | torch.device) and str(x) == "cuda" else x


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _place(x: Tensor) -> Place:
    inner, on_gpu = inner_of(x), isinstance(x, OnGpu)
    return Place(_block_of(inner), x.dtype, tuple(x.shape), tuple(inner.stride()), inner.storage_offset(), on_gpu)


_expired = torch.UntypedStorage._expired


def _block_of(inner: Tensor) -> int:
    return int(inner.untyped_storage()._cdata)
