"""A CUDA graph of a step does what the step does when it is launched, and what may not be in one is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.distributed.groups import end_group, new_group
from tests.gpu_semantics import test_replayed_steps
from tests.gpu_semantics.pretended_gpu import CPU, CUDA, PretendedGpu
from tests.ranks import run, with_ranks


def recorded(sync: str) -> tuple[int, list[str]]:
    """How many steps were replayed, and what goes wrong where streams do all of it again in other orders."""
    gpu = PretendedGpu(records=True)
    with patch.object(test_replayed_steps, "PretendedGpu", lambda: gpu), patch.object(nn.functional, "dropout", _whole):
        replayed = test_replayed_steps.ended(sync, "auto", "4" * 12).replayed
    return replayed, [wrong for seed in range(3) if (wrong := gpu.recording.repeat(seed))]


def _whole(x: Tensor, *_: object) -> Tensor:
    """Random numbers would be others in another order."""
    return x


@pytest.mark.ci
@pytest.mark.parametrize("sync", ["ring", "dear"])
def test_replays_end_with_the_same_bits_in_any_order_that_waits_allow(sync: str):
    for replayed, wrong in run(2, recorded, sync):
        assert replayed > 0
        assert wrong == []


def forked(held: list[Tensor], _: object) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        held[0].mul_(2.0)
    held[0].add_(1.0)


WAITS, OUTSIDE = "the host waits for the GPU inside a capture: ", "an event that was recorded inside a capture is used"
FAULTS: list[tuple[str, Callable[[list[Tensor], Any], object], str]] = [
    ("inside", lambda held, _: held[0].sum().item(), f"{WAITS}aten::_local_scalar_dense"),
    ("inside", lambda held, _: held[0].copy_(torch.ones(8)), f"{WAITS}aten::copy_ between pageable memory"),
    ("inside", lambda *_: torch.cuda.synchronize(), f"{WAITS}torch.cuda.synchronize"),
    ("inside", lambda _, event: event.synchronize(), f"{WAITS}Event.synchronize"),
    ("inside", lambda _, event: event.query(), f"{WAITS}Event.query"),
    ("inside", lambda _, event: event.wait(), "a captured stream waits for what is not captured"),
    ("inside", lambda *_: torch.empty(8, pin_memory=True, device=CPU), "pinned memory is allocated inside a capture"),
    ("inside", forked, "a stream that was forked into a capture is not joined"),
    ("inside", forked, "which has written the same memory"),
    ("after", lambda _, event: event.wait(), OUTSIDE),
    ("after", lambda _, event: event.synchronize(), OUTSIDE),
    ("after", lambda _, event: event.elapsed_time(event), OUTSIDE),
    ("after", lambda held, _: held.clear(), "memory from before its capture that has been freed since"),
]


@pytest.mark.parametrize(("when", "act", "told"), FAULTS)
def test_what_a_graph_cannot_do_is_found(when: str, act: Callable[[list[Tensor], Any], object], told: str):
    with PretendedGpu() as gpu:
        held, graph = [torch.zeros(8, device=CUDA)], torch.cuda.CUDAGraph()
        before, event = torch.cuda.current_stream().record_event(), torch.cuda.Event()
        with torch.cuda.graph(graph):
            ended = held[0] + 1.0
            event.record()
            if when == "inside":
                act(held, before)
        assert held[0].tolist() == [0.0] * 8 != ended.tolist() != [1.0] * 8
        if when == "after":
            act(held, event)
        graph.replay()
        assert told in "".join(gpu.detector.found)
        assert ended.tolist() == [1.0] * 8


@pytest.mark.parametrize("strict", [False, True])
def test_a_capture_that_fails_changes_nothing(strict: bool):
    with PretendedGpu() as gpu:
        x, graph, gpu.strict_capture = torch.zeros(8, device=CUDA), torch.cuda.CUDAGraph(), strict
        told = "operation not permitted when stream is capturing" if strict else "division by zero"
        with pytest.raises((RuntimeError, ZeroDivisionError), match=told), torch.cuda.graph(graph):
            x.add_(1.0).mul_(1 / x.mul(0.0).sum().item())
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()
        assert x.tolist() == [0.0] * 8


@pytest.mark.parametrize("told", [True, False])
def test_external_events_order_a_graph_and_streams_beside_it(told: bool):
    with PretendedGpu() as gpu:
        came, done = torch.cuda.Event(external=True), torch.cuda.Event(external=True)
        x, y, graph, side = *torch.zeros(2, 8, device=CUDA), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            came.wait()
            y.copy_(x)
            done.record()
        for number in range(2):
            with torch.cuda.stream(side):
                if told:
                    done.wait()
                x.fill_(number)
                came.record()
            graph.replay()
        assert bool(gpu.detector.found) is not told
        assert y.tolist() == [1.0] * 8


@with_ranks(2)
def test_a_group_that_ends_before_its_graph_is_found() -> None:
    with PretendedGpu() as gpu:
        group, x, graph = new_group(CUDA, [0, 1]), torch.ones(8, device=CUDA), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x, group=group)
        graph.replay()
        assert x.tolist() == [2.0] * 8
        end_group(group)
        assert "a process group is destroyed while" in "".join(gpu.detector.found)
