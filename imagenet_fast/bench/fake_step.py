"""Run an engine's step on fake ranks and meta tensors, to count its backend calls and kernels.

torch's fake process group has any number of ranks, and its operations complete at once. Tensors on the meta device have
shapes and no values. The engine treats that device as a GPU: no threads issue operations, and messages are cut into
pieces as on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch._dynamo  # else the first meta operation imports it, in every process
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from imagenet_fast.bench.replay import replay
from imagenet_fast.cost_model.layer_profile import Profile
from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.recipe.sync_config import SparseSync
from imagenet_fast.recipe.sync_table import Collective
from imagenet_fast.sync import EngineSettings, GradientPool, SyncEngine, declare
from imagenet_fast.sync.all_reduce import wire_dtype, wire_for
from imagenet_fast.sync.bucket_scheduler import Scheduler, step_model
from imagenet_fast.sync.comm_stream import CommOp, CommStream, Wait
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.network_benchmark import NetworkProbe
from imagenet_fast.sync.sparse import Sparse
from imagenet_fast.sync.topology import Topology

Result = TypeVar("Result")
_META = torch.device("meta")
_WARM_STEPS = 4  # after these, layers' readers are known and `sparse` is past its ramp


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


@dataclass(frozen=True)
class StepCount:
    """A step of one rank, counted."""

    calls: Sequence[Call]
    """Its backend calls."""
    kernels: int
    """Number of operations that compute or copy."""
    updates: int
    """Number of the optimizer's updates; a deferring engine updates what came together at once."""
    collective: Collective
    """The collective that carries most of the values."""
    averaged_bytes: int
    """Wire bytes that it averages: elements of parameters, without padding, and norms."""


def count_step(profile: Profile, settings: EngineSettings, ranks_per_node: int, link: LinkModel) -> StepCount:
    """Count a step of one engine over layers with a profile's shapes, after warm-up steps, inside ``fake_ranks``.

    Gradients are passed to the hooks without autograd, in the pool's order.

    Args:
        profile: The layer profile that provides shapes, and the times that the engine plans with.
        settings: The engine.
        ranks_per_node: Ranks in each node.
        link: Assumed cost of a message.
    """
    shapes = [[torch.empty(shape, device=_META) for shape in layer.shapes] for layer in profile.layers]
    model = replay(profile.scaled_to(0.0), shapes)  # without a sleep
    gradients = {param: torch.empty_like(param) for param in model.parameters()}
    calls: list[Call] = []
    topology = _CountedTopology(ranks_per_node, calls)
    wire = wire_for(torch.float32, wire_dtype(settings.wire), topology)
    declaration = declare(settings)  # type: ignore[arg-type]  # none that chooses
    network = NetworkProbe(topology, wire, link)

    def engine(buffer: GradientBuffer) -> SyncEngine:
        if isinstance(settings, SparseSync):
            return _Spread(settings, buffer)
        return Scheduler(declaration, buffer, network, profile.timing)

    pool = GradientPool(model, engine, topology=topology)
    pool.knows_order = True  # ranks without values can't agree on another one
    plan = step_model(declaration, pool.gradients, network)
    size: Counter[Collective] = Counter()
    for message in plan.messages(plan.best(profile.timing)[0]):
        size[message.collective] += message.part.stop - message.part.start
    updates: list[object] = []

    def step() -> None:
        """Run one step, from the update of the step before, if it was deferred."""
        updates.clear()
        calls.clear()
        pool.zero_grad()
        model(torch.zeros(1))
        for slot in pool.slots:
            slot.param.grad = gradients[slot.param]
            pool.current.on_gradient(slot)
        pool.end_backward()
        pool.update(lambda *part: updates.append(part))

    for _ in range(_WARM_STEPS):
        step()
    with _Kernels() as kernels:
        step()
    elements = pool.engine.sent_slices()
    if elements is None:
        averaged = round(sum(settings.values_sent(param.shape) for param in model.parameters()))
    else:
        averaged = sum(part.stop - part.start for parts in elements.values() for part in parts)
    norms_bytes = pool.engine.norms_bytes if isinstance(pool.engine, _Spread) else 0
    return StepCount(
        calls, kernels.seen, len(updates), max(size, key=size.__getitem__), wire.itemsize * averaged + norms_bytes
    )


class _Spread(Sparse):
    """``sparse`` after its ramp, for norms without values.

    The chunks that it sends are spread over the pool, as in real training; adjacent chunks would need no packing.
    """

    def __init__(self, settings: SparseSync, buffer: GradientBuffer) -> None:
        # Its first step sends all chunks.
        past = settings.model_copy(update={"dense_epochs": 1.0, "ramp_epochs": 0.0})
        super().__init__(past, buffer, steps_per_epoch=1)

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

    def __init__(self, ranks_per_node: int, calls: list[Call]) -> None:
        super().__init__(_META, ranks_per_node=ranks_per_node)
        self._calls = calls

    def _new_stream(self, ranks: tuple[int, ...]) -> CommStream:
        return _CountedStream(ranks, self._calls)


class _CountedStream(CommStream):
    """A stream of the meta device, on which operations are done at once."""

    def __init__(self, ranks: tuple[int, ...], calls: list[Call]) -> None:
        super().__init__(_META, ranks)
        self._calls = calls

    def submit(self, op: CommOp, after: Sequence[Wait] = (), label: str = "") -> Wait:
        op.start()
        return lambda: None

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
        """Make a backend call, and record its messages."""
        self._calls.append(tuple(messages))
        return call(*arguments)


class _Kernels(TorchDispatchMode):
    """A dispatch mode that counts the operations on the meta device that would be kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not typed it
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and "empty" not in func.__name__:
            leaves = tree_leaves((args, kwargs, result))
            if any(isinstance(leaf, Tensor) and leaf.device == _META for leaf in leaves):
                self.seen += 1
        return result
