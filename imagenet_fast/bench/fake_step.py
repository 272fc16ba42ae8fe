"""Run an engine's step on fake ranks and meta tensors, to count its backend calls and kernels.

torch's fake process group has any number of ranks, and its operations complete at once. Tensors on the meta device have
shapes and no values. The engine treats that device as a GPU: no threads issue operations, and messages are cut into
pieces as on a GPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch._dynamo  # else the first meta operation imports it, in every process
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Work
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from imagenet_fast.bench.replay import timing_of
from imagenet_fast.cost_model.layer_profile import Layer, Profile
from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.recipe.engine_table import Collective
from imagenet_fast.recipe.sync_config import SparseSync
from imagenet_fast.sync import EngineSettings, GradientPool, SyncEngine, declare
from imagenet_fast.sync.all_reduce import wire_for
from imagenet_fast.sync.bucket_scheduler import Scheduler, step_model
from imagenet_fast.sync.comm_stream import CommStats, CommStream, PendingOp
from imagenet_fast.sync.factory import wire_dtype
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.pending import Update, settle_all
from imagenet_fast.sync.per_param_step import snapshot_step
from imagenet_fast.sync.sparse import Sparse
from imagenet_fast.sync.topology import Topology
from imagenet_fast.training.optimizers import LARS

Kernel = Callable[[], object]
"""A tensor operation with its arguments bound."""

Result = TypeVar("Result")
_META = torch.device("meta")
_WARM_STEPS, _STEPS = 4, 20  # after _WARM_STEPS, layers' readers are known and `sparse` is past its ramp


@contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[None]:
    """Initialise torch's fake process group with this process as ``rank`` of ``size``, and destroy it at exit.

    The other ranks do not exist. Operations complete at once and do nothing.
    """
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


Call = tuple[tuple[int, int, int], ...]
"""The messages that one backend call sends from this rank: (destination rank, number of messages, bytes of each)."""


@dataclass
class _Calls:
    """The backend calls of a step, and the CPU seconds that they took."""

    made: list[Call] = field(default_factory=list)
    seconds: float = 0.0


class CountedStep:
    """A step of one engine over layers with a profile's shapes.

    Gradients are passed to the hooks without autograd, in the pool's order.
    """

    def __init__(self, profile: Profile, settings: EngineSettings, ranks_per_node: int, link: LinkModel) -> None:
        """Attach the engine and run its warm-up steps, inside ``fake_ranks``.

        Args:
            profile: The layer profile that provides shapes, and the times that the engine plans with.
            settings: The engine.
            ranks_per_node: Ranks in each node.
            link: Assumed cost of a message.
        """
        self._model = nn.Sequential(*(_Layer(layer) for layer in profile.layers))
        self._alone = nn.Sequential(*(_Layer(layer) for layer in profile.layers))  # without a pool
        self._gradients = {p: torch.empty_like(p) for p in [*self._model.parameters(), *self._alone.parameters()]}
        self._x = torch.zeros(1)
        self._calls = _Calls()
        self.updates = 0
        """Number of the optimizer's updates in the last step; a deferring engine updates what came together at once."""
        self._update_s = 0.0  # their CPU time in the last step
        self._scalar = {param: nn.Parameter(torch.ones(())) for param in self._model.parameters()}
        for scalar in self._scalar.values():
            scalar.grad = torch.ones(())
        matrices = [scalar for param, scalar in self._scalar.items() if param.dim() > 1]
        vectors = [scalar for param, scalar in self._scalar.items() if param.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "trust_coefficient": 0.0}]
        self._lars = LARS(groups, lr=0.1)
        counted = _CountedTopology(ranks_per_node, self._calls)
        self._travelling = settings.values_sent
        wire = wire_dtype(settings.wire)
        self._wire = wire_for(torch.float32, wire, counted)
        declaration = declare(settings)  # type: ignore[arg-type]  # none that chooses
        network = NetworkProbe(counted, self._wire, link)

        def engine(gradients: GradientBuffer) -> SyncEngine:
            if isinstance(settings, SparseSync):
                return _Spread(settings, gradients, wire)
            return Scheduler(declaration, gradients, network, timing_of(profile, self._model, gradients.slots))

        self._pool = GradientPool(self._model, engine, topology=counted)
        self._pool.order.fix()  # ranks without values can't agree on another one
        model = step_model(declaration, self._pool.gradients, self._wire, network)
        timing = timing_of(profile, self._model, self._pool.slots)
        size: Counter[Collective] = Counter()
        for message in model.messages(model.best(timing)[0]):
            size[message.collective] += message.part.stop - message.part.start
        self.collective = max(size, key=size.__getitem__)
        """The collective that carries most of the values."""
        for _ in range(_WARM_STEPS):
            self._run()

    def calls(self) -> list[Call]:
        """Run one step and return its backend calls."""
        self._run()
        return self._calls.made

    def kernels(self) -> list[Kernel]:
        """Run one step and return its tensor operations, which can be called again."""
        kernels = _Kernels()
        with kernels:
            self._run()
        return kernels.seen

    def host_s(self, kernels: Sequence[Kernel]) -> tuple[float, float, float]:
        """Measure the CPU time of a step, without its backend calls and the optimizer's updates.

        Args:
            kernels: The step's tensor operations.

        Returns:
            CPU seconds of a step, the part of them that the kernels take by themselves, and those of the updates.
        """
        rows = []
        for _ in range(_STEPS):
            standing_in = _seconds(lambda: [kernel() for kernel in kernels])
            running = _seconds(self._run) - self._update_s - self._calls.seconds
            rows.append((running, _seconds(self._run_alone), standing_in, self._update_s))
        running_s, alone_s, meta_s, update_s = (min(column) for column in zip(*rows, strict=True))
        return running_s - alone_s, meta_s, update_s

    @property
    def averaged_bytes(self) -> int:
        """Wire bytes that the last step averaged: elements of parameters, without padding, and norms."""
        elements, wire = self._pool.engine.sent_slices(), self._wire.itemsize
        if elements is None:
            sent = round(sum(self._travelling(p.shape) for p in self._model.parameters()))
        else:
            sent = sum(part.stop - part.start for parts in elements.values() for part in parts)
        return wire * sent + (self._pool.engine.norms_bytes if isinstance(self._pool.engine, _Spread) else 0)

    def _run(self) -> None:
        """Run one step without autograd, from the update of the step before, if it was deferred."""
        self.updates, self._update_s = 0, 0.0
        self._calls.made, self._calls.seconds = [], 0.0
        self._pool.zero_grad()
        self._model(self._x)
        for slot in self._pool.slots:
            slot.param.grad = self._gradients[slot.param]
            self._pool.current.on_gradient(slot.param)
        self._pool.end_backward()
        begun = time.thread_time()
        apply = snapshot_step(self._lars)
        self._update_s += time.thread_time() - begun
        self._pool.update(partial(self._update, apply))

    def _update(self, apply: Update, params: list[nn.Parameter], elements: object = None) -> None:
        """Update one scalar on the CPU for each of ``params``, by LARS: what is left is the cost of launching."""
        begun = time.thread_time()
        apply([self._scalar[param] for param in params])
        self.updates += 1
        self._update_s += time.thread_time() - begun

    def _run_alone(self) -> None:
        """Run the part of a step that is not synchronisation."""
        self._alone(self._x)
        for param in self._alone.parameters():
            param.grad = self._gradients[param]


class _Layer(nn.Module):
    """A layer with parameters of a profile's shapes that computes nothing."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        for place, shape in enumerate(layer.shapes):
            self.register_parameter(f"param{place}", nn.Parameter(torch.empty(shape, device=_META)))

    def forward(self, x: Tensor) -> Tensor:
        settle_all(self.parameters())  # as the torch functions of a real layer do
        return x


class _Spread(Sparse):
    """``sparse`` after its ramp, for norms without values.

    The chunks that it sends are spread over the pool, as in real training; adjacent chunks would need no packing.
    """

    def __init__(self, settings: SparseSync, pool: GradientBuffer, wire: torch.dtype) -> None:
        # Its first step is dense, and needs no chunk ids.
        past = settings.model_copy(update={"dense_epochs": 1.0, "ramp_epochs": 0.0})
        super().__init__(past, pool, wire, steps_per_epoch=1)

    @property
    def norms_bytes(self) -> int:
        """Bytes of the chunks' norms in fp32, which are averaged as well."""
        return 4 * len(self._chunks)

    def _choose(self) -> None:
        """Choose evenly spaced chunks, such as every eighth, because there are no values to find the largest by."""
        chunks = len(self._chunks)
        self._here = torch.empty(chunks, dtype=torch.int64, device=_META)
        super()._choose()
        count = len(self._ids)
        self._here = torch.arange(count) * chunks // count


class _CountedTopology(Topology):
    """A topology of all ranks whose streams record their calls."""

    def __init__(self, ranks_per_node: int, calls: _Calls) -> None:
        super().__init__(_META, ranks_per_node=ranks_per_node)
        self._calls = calls

    def _new_stream(self, ranks: tuple[int, ...]) -> CommStream:
        return _CountedStream(ranks, self._calls)


class _CountedStream(CommStream):
    """A stream of the meta device, on which operations are done at once."""

    def __init__(self, ranks: tuple[int, ...], calls: _Calls) -> None:
        super().__init__(_META, ranks)
        self._calls = calls

    def enter(self, start: Callable[[], Work | None], after: Sequence[PendingOp], traffic: CommStats) -> PendingOp:
        self._traffic = traffic
        start()
        return PendingOp(_return_at_once)

    def all_to_all(
        self, arrived: Tensor, values: Tensor, arriving: Sequence[int] = (), leaving: Sequence[int] = ()
    ) -> Work | None:
        parts = leaving or [values.numel() // self.size] * self.size
        sent = {rank: n * values.element_size() for rank, n in zip(self.ranks, parts, strict=True) if n}
        sent.pop(self.ranks[self.place], None)
        messages = ((rank, 1, size) for rank, size in sent.items())
        return self._call(messages, super().all_to_all, arrived, values, arriving, leaving)

    def all_gather(self, values: Tensor, direct: bool = False) -> Work | None:
        return self._call(self._ring(self.size - 1, values), super().all_gather, values, direct)

    def reduce_scatter(self, values: Tensor) -> Work | None:
        return self._call(self._ring(self.size - 1, values), super().reduce_scatter, values)

    def all_reduce(self, values: Tensor, mean: bool = False) -> Work | None:
        return self._call(self._ring(2 * (self.size - 1), values), super().all_reduce, values, mean)

    def exchange(self, leaving: Sequence[tuple[int, Tensor]], arriving: Sequence[tuple[int, Tensor]]) -> None:
        messages = ((self.ranks[peer], 1, values.nbytes) for peer, values in leaving)
        self._call(messages, super().exchange, leaving, arriving)

    def _ring(self, hops: int, values: Tensor) -> Call:
        """Return the messages of a ring: all of them go to the next rank."""
        return ((self.ranks[(self.place + 1) % self.size], hops, values.nbytes // self.size),)

    def _call(self, messages: Iterable[tuple[int, int, int]], call: Callable[..., Result], *arguments: Any) -> Result:
        """Make a backend call, and record its messages and its time; the time of recording counts as the call's."""
        begun = time.thread_time()
        self._calls.made.append(tuple(messages))
        result = call(*arguments)
        self._calls.seconds += time.thread_time() - begun
        return result


def _return_at_once() -> None:
    """Do nothing: all operations are done."""


class _Kernels(TorchDispatchMode):
    """A dispatch mode that records the operations on the meta device that would be kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not typed it
        self.seen: list[Kernel] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        again = partial(func, *args, **(kwargs or {}))
        result = again()
        if func.namespace == "aten" and not func.is_view and "empty" not in func.__name__:
            leaves = tree_leaves((args, kwargs, result))
            if any(isinstance(leaf, Tensor) and leaf.device == _META for leaf in leaves):
                self.seen.append(again)
        return result


def _seconds(act: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread in ``act``; other load on the node does not count."""
    begun = time.thread_time()
    act()
    return time.thread_time() - begun
