"""CUDA graphs: what streams are given during a capture, they are given again in each replay, on the same memory.

A capture carries everything out, so that Python goes on as in a step, and then puts memory back. The detector is told
of it on streams of the graph's own: at the capture once, and in each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from tests.gpu_semantics.accesses import inner_of, is_on_gpu, tensors_in
from tests.gpu_semantics.race_detector import here
from tests.gpu_semantics.random_orders import GARBAGE, Place


class Graph:
    """``torch.cuda.CUDAGraph``. Its pool is not shared: memory is the graph's own until it is reset."""

    device: Any
    pool = staticmethod(lambda: (0, 1))

    def __init__(self, keep_graph: bool = False) -> None:
        self.device.graphs.add(self)
        self.reset()

    def reset(self) -> None:
        self.failed = True  # until it is captured
        self.groups: set[Any] = set()
        """Whose collectives it has."""
        self.external: dict[Any, Any] = {}
        """By event that it waits for from outside, what had been recorded when it was launched."""
        self._acts: list[tuple[Any, Any, Callable[[Any], object]]] = []
        self._memory: dict[int, UntypedStorage | StorageWeakRef] = {}
        """Blocks, by numbers of ours: addresses come again. Those from before the capture are not kept alive."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert self.device.capture is None
        self.reset()
        self.failed = False
        self.streams: dict[Any, Any] = {}
        """By stream that is captured, the graph's own in its place."""
        self._ended = self.device.detector.everything()
        self._numbers: dict[int, int] = {}
        self._next = count()
        with _undispatched():
            self._random = torch.default_generator.get_state()
            self._before = [(x, x.clone()) for x in map(_alive, self.device.blocks()) if x is not None]
        self.device.capture, self._recording, self.device.recording = self, self.device.recording, None
        self._origin = self.join(self.device.current)

    def join(self, stream: Any) -> Any:
        """Capture what ``stream`` is given from now on."""
        own = self.streams[stream] = torch.cuda.Stream()
        self.device.detector.wait(own.number, self._ended)
        return own

    def capture_end(self) -> None:
        device, own = self.device, [stream.number for stream in self.streams.values()]
        end = device.detector.moment(self._origin.number)
        if any(device.detector.moment(number)[number] > end[number] for number in own) and not self.failed:
            device.detector.report("a stream that was forked into a capture is not joined to it at its end")
        device.look_for_freed()
        device.capture, device.recording = None, self._recording
        device.detector.forget(own)
        with _undispatched():
            torch.default_generator.set_state(self._random)
            for storage, values in self._before:
                storage.copy_(values)
            for block, number in self._numbers.items():
                if number not in self._memory:
                    self._memory[number] = _alive(block).fill_(GARBAGE)
                    if device.recording is not None:
                        device.recording.allocate(device.detector.last, block, self._memory[number].nbytes(), None)
        del self._before, self._numbers

    def add(self, act: Callable[..., object], stream: Any, *tensors: Any) -> None:
        """Have ``act`` done in each replay on the stream in place of ``stream``, with ``tensors``."""
        told = tree_map(self._told, tensors)
        self._acts.append((here(), self.streams[stream], lambda own: act(own, *tree_map(self._found, told))))

    def add_operation(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Have an operation of torch's done in each replay, with its results where they are now."""
        made: dict[int, Place] = {}

        def act(_: Any, args: Any, kwargs: Any) -> None:
            tensors = tensors_in(self.device.carry_out(func, args, kwargs))
            for n, place in made.items():
                if place.block in self._memory:
                    self.device.carry_out(torch.ops.aten.copy_.default, (self._found(place), tensors[n]), {})
                else:
                    self._memory[place.block] = inner_of(tensors[n]).untyped_storage()

        self.add(act, self.device.current, args, kwargs)
        for n, x in enumerate(tensors_in(results)):
            if is_on_gpu(x) and (block := self.device.note(inner_of(x))) not in self._numbers:
                self._numbers[block] = next(self._next)
                made[n] = self._told(x)

    def freed(self, block: int) -> None:
        """Nobody holds a block any longer."""
        if block in self._numbers and self._numbers[block] not in self._memory:
            number = self._numbers.pop(block)
            self._acts.append((here(), self._origin, lambda _: self._memory.pop(number)))

    def replay(self) -> None:
        device, detector, streams = self.device, self.device.detector, self.streams.values()
        assert device.capture is None
        if self.failed:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.external = {event: event.mark for event in self.external}
        launching, caller = device.current, here()
        begun = np.maximum(self._ended, detector.moment(launching.number))  # also behind its last replay
        for own in streams:
            detector.wait(own.number, begun)
        with _undispatched():
            for place, own, act in self._acts:
                device.current, detector.place = own, place + caller
                act(own)
        device.current, detector.place = launching, None
        self._ended = np.maximum.reduce([detector.moment(own.number) for own in streams])
        detector.wait(launching.number, self._ended)

    def _told(self, x: Any) -> Any:
        """What an argument is in replays: a place in memory, or as it is."""
        if not isinstance(x, Tensor):
            return x
        if not is_on_gpu(x) and not self.device.is_pinned(x):
            return x.clone()
        block = self.device.note(inner_of(x))
        if block not in self._numbers:
            self._numbers[block] = next(self._next)
            self._memory[self._numbers[block]] = StorageWeakRef(inner_of(x).untyped_storage())
        return replace(self.device.place(x), block=self._numbers[block])

    def _found(self, x: Any) -> Any:
        if not isinstance(x, Place):
            return x
        storage, inner = self._memory[x.block], torch.empty(0, dtype=x.dtype)
        if isinstance(storage, StorageWeakRef):
            storage = _alive(storage.cdata)
        if storage is None:
            self.device.detector.report("a graph uses memory from before its capture that has been freed since")
            inner = torch.empty_strided(x.shape, x.strides, dtype=x.dtype).zero_()
        else:
            inner.set_(storage, x.offset, x.shape, x.strides)
        return self.device.wrap(inner) if x.on_gpu else inner


@contextmanager
def _undispatched() -> Iterator[None]:
    """As below autograd, and below what torch does in Python."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


_alive = torch.UntypedStorage._new_with_weak_ptr


def graph_stand_ins(device: Any) -> Iterator[tuple[str, Any]]:
    """Those of ``torch.cuda`` for graphs, and for the random numbers that they draw: the CPU's."""

    side = cache(lambda: torch.cuda.Stream())

    @contextmanager
    def graph(
        cuda_graph: Graph, pool: object = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream or side()):
            cuda_graph.capture_begin(pool, capture_error_mode)
            try:
                yield
            except BaseException:
                cuda_graph.failed = True
                raise
            finally:
                cuda_graph.capture_end()

    yield "CUDAGraph", type("CUDAGraph", (Graph,), {"device": device})
    yield "graph", graph
    yield "mem_get_info", lambda device=None: (2, 2)
    yield "max_memory_allocated", lambda device=None: 1
    yield "graph_pool_handle", Graph.pool
    yield "is_current_stream_capturing", lambda: device.capturing(device.current) is not None
    yield "is_initialized", lambda: True
    yield "is_bf16_supported", lambda: True
    yield "default_generators", (torch.default_generator,) * 2
    yield "get_rng_state", lambda device=None: torch.default_generator.get_state()
    yield "set_rng_state", lambda state, device=None: torch.default_generator.set_state(state)
