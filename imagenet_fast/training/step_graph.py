"""Replay training steps from CUDA graphs: the host launches one graph instead of a step's thousands of kernels.

A step of 40 images of ResNet-50 takes a GPU less than half of the time in which the host can launch it. A graph holds
all of it: forward, backward, messages, update, averages. It is captured once steps repeat each other on the same
memory. What the host decides in a step, such as the seed of its random numbers and the learning rate, is written before
the graph is replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from imagenet_fast.distributed.reductions import gather_rows
from imagenet_fast.sync import GradientPool, SyncStats
from imagenet_fast.sync.captured_step import CapturedStep

Batch = tuple[Tensor, Tensor]
"""Images and labels of a micro-step, on the device."""
Launch = Callable[[Iterable[Batch]], SyncStats]
"""A function that takes a step on the micro-steps' batches, one operation after the other."""

MOST_MICRO_STEPS = 4
"""Micro-steps that a graph holds at most: each needs memory for its batch."""

_LAUNCHED = 3
"""Steps of each shape that repeat each other before one is captured: kernels are chosen, and memory is found."""
_KEPT = 2
"""Graphs that are kept, the last ones captured."""
_TRIES = 64
"""Steps that do not repeat the one before, until all stay launched."""
_NO_MEMORY = "there is no memory for a launched step beside a graph; with graph true none is compared"
_APART = 2.0**-5
"""Largest difference between a launched and a replayed step, as a share of its change; bf16 rounds by 2^-8."""


@dataclass
class _Graph:
    """A step of batches of one shape."""

    inputs: list[Batch]
    """The tensors that each batch is copied to before a replay."""
    graph: torch.cuda.CUDAGraph
    captured: CapturedStep
    stats: SyncStats
    """The messages and bytes of the step."""
    is_checked: bool


class _NotReplayable(Exception):
    """Some rank could not capture the step."""


class StepGraphs:
    """CUDA graphs of a training step, by the shape of its batches."""

    def __init__(
        self, pool: GradientPool, launch: Launch, changed: Callable[[], dict[str, list[Tensor]]],
        settings: Callable[[], object], tell: Callable[[dict[str, Any]], None], checks: bool,
    ) -> None:  # fmt: skip
        """Begin without a graph.

        Args:
            pool: The pool of the gradients.
            launch: Takes a step. It may change tensors, and nothing else that a later step depends on.
            changed: Returns the tensors that a step changes, by what they are.
            settings: Returns what a graph holds for besides the shapes: for others, another is captured.
            tell: Gets whether steps are ``replayed`` from now on, with the shape of ``images``; if not, ``why``.
            checks: Whether to compare each graph's second step with a launched one from the same state.
        """
        self.replays = 0
        """Steps that were replayed."""
        self._pool = pool
        pool.before_close = self.reset
        self._launch = launch
        self._changed = changed
        self._settings = settings
        self._tell = tell
        self._checks = checks
        self._memory: Any = None
        self._seen: Counter[object] = Counter()
        self._graphs: dict[object, _Graph] = {}
        self._generation = pool.generation
        self._tries = 0
        self.gave_up = False
        """True if all steps will be launched."""

    def take_step(self, batches: list[Batch]) -> SyncStats:
        """Take a step on ``batches``: from the graph of their shapes, or launched. All ranks do the same."""
        if self._generation != self._pool.generation:
            self.reset()
        shapes = self._settings(), tuple((x.shape, x.stride(), x.dtype) for batch in batches for x in batch)
        graph = self._graphs.get(shapes)
        if graph is not None and graph.is_checked:
            if not self._pool.repeats:  # as after an evaluation; others may replay this step meanwhile
                return self._launch(batches)
            graph.captured.prepare()
            return self._replay(graph, batches)
        if not gather_rows([self._pool.repeats]).all():
            self._tries += 1
            if self._tries == _TRIES:
                self._give_up("each differs from the one before, as where weights are read between steps")
            return self._launch(batches)
        self._seen[shapes] += 1
        if graph is not None:
            graph.captured.prepare()
            return self._check(graph, batches)
        if self._seen[shapes] <= _LAUNCHED:
            return self._launch(batches)
        if len(self._graphs) == _KEPT:
            self._graphs.pop(next(iter(self._graphs))).graph.reset()
        graph = self._capture(batches)
        if graph is not None:
            self._graphs[shapes] = graph
        return self._launch(batches) if graph is None else self._replay(graph, batches)

    def reset(self) -> None:
        """Let go of all graphs. The process groups whose messages they hold cannot end before."""
        for graph in self._graphs.values():
            graph.graph.reset()
        self._graphs.clear()
        self._seen.clear()
        self._memory = None
        self._generation = self._pool.generation

    def _capture(self, batches: list[Batch]) -> _Graph | None:
        """Capture a step, which runs nothing; return None if a rank could not."""
        inputs = [(images.clone(), labels.clone()) for images, labels in batches]
        graph, captured = torch.cuda.CUDAGraph(), CapturedStep(self._pool)
        try:
            with captured.capture():
                stats, why = self._record(graph, captured, inputs)
                if not self._agreed(why):
                    raise _NotReplayable
        except _NotReplayable:
            graph.reset()
            return None
        if not self._checks:
            self._tell({"replayed": True, "images": list(batches[0][0].shape)})
        return _Graph(inputs, graph, captured, replace(stats, exposed=None), not self._checks)

    def _record(self, graph: Any, captured: CapturedStep, inputs: list[Batch]) -> tuple[SyncStats, str]:
        """Record a step's operations in ``graph``; return its statistics, and why it cannot be."""
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream()  # which torch leaves behind where it cannot end the capture
        try:
            with torch.cuda.stream(here), torch.cuda.graph(graph, self._memory, capture_error_mode="thread_local"):
                captured.begin()
                stats = self._launch(inputs)
                captured.end()
        except Exception as error:
            with suppress(RuntimeError, AttributeError):  # before torch 2.14 one that broke goes on allocating
                torch._C._cuda_endAllocateToPool(here.device.index, self._memory)
            cause = error.__context__ or error  # what broke the capture, if ending it failed, too
            return SyncStats(None), f"one cannot be captured ({str(cause).partition(chr(10))[0]})"
        return stats, ""

    def _replay(self, graph: _Graph, batches: list[Batch]) -> SyncStats:
        for own, batch in zip(graph.inputs, batches, strict=True):
            for place, values in zip(own, batch, strict=True):
                place.copy_(values)
        graph.graph.replay()
        graph.captured.replayed()
        self.replays += 1
        return graph.stats

    def _check(self, graph: _Graph, batches: list[Batch]) -> SyncStats:
        """Take a step launched and, from the same state, replayed, and stay launched if that differs on any rank."""
        changed = self._changed()
        torch.cuda.synchronize()
        if not self._agreed(_NO_MEMORY if torch.cuda.mem_get_info()[0] < torch.cuda.max_memory_allocated() else ""):
            return self._launch(batches)
        with torch._C.DisableTorchFunctionSubclass():  # else whoever reads a weight has its update carried out
            before = _copies(changed)
        with torch.random.fork_rng([batches[0][0].device]):
            stats = self._launch(batches)
        self._pool.settle()
        launched = _copies(changed)
        _put_back(changed, before)
        self._replay(graph, batches)
        self._pool.settle()
        found = {kind: _distance(values, launched[kind], before[kind]) for kind, values in changed.items()}
        other = [kind for kind, distance in found.items() if not distance <= _APART]
        graph.is_checked = self._agreed(
            f"a replayed one ends with other {other[0]} than a launched one" if other else ""
        )
        if graph.is_checked:
            self._tell({"replayed": True, "images": list(batches[0][0].shape)})
        else:
            _put_back(changed, launched)
        return stats

    def _agreed(self, why: str) -> bool:
        """Return whether all ranks could do the same; else let go of all graphs for good."""
        failed = gather_rows([bool(why)])[:, 0].nonzero()[:, 0].tolist()
        if failed:
            self._give_up(why or f"rank {failed[0]} cannot replay them")
        return not failed

    def _give_up(self, why: str) -> None:
        self.reset()
        self.gave_up = True
        self._tell({"replayed": False, "why": why})


def _copies(tensors: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {kind: [x.detach().clone() for x in values] for kind, values in tensors.items()}


def _put_back(tensors: dict[str, list[Tensor]], values: dict[str, list[Tensor]]) -> None:
    for kind, ours in tensors.items():
        for x, value in zip(ours, values[kind], strict=True):
            x.detach().copy_(value)


def _distance(ours: list[Tensor], theirs: list[Tensor], before: list[Tensor]) -> float:
    """Return the L2 distance between two ends of a step, divided by the way there; what is not finite counts alike."""
    apart = way = 0.0
    for three in zip(ours, theirs, before, strict=True):
        one, other, begun = (x.detach().double().nan_to_num() for x in three)
        apart += float((one - other).square().sum())
        way += float((other - begun).square().sum())
    return (apart / way) ** 0.5 if way else float(apart > 0)
