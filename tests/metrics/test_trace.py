"""The timeline shows compute, wire and waits of every layer, in a format that Perfetto reads."""

from __future__ import annotations

import gc
import json
import time
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imagenet_fast.compare.timeline import read_timeline
from imagenet_fast.distributed.device_timer import Stopwatch
from imagenet_fast.metrics.trace import Trace
from imagenet_fast.parallel.ddp import attach
from imagenet_fast.sync import DdpSync, DearSync, HybridSync, LazySync, SyncStats
from imagenet_fast.sync.comm_stream import Transfer
from tests.ranks import run, with_ranks
from tests.sync.given import pooled


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run(2, _trace, folder := tmp_path_factory.mktemp("traces"))
    return folder


def test_compute_communication_and_waits_of_every_layer_are_there(traces: Path):
    for kind in ("lazy", "hybrid", "ddp"):
        events = json.loads((traces / f"{kind}.json").read_text())["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        assert set(names.values()) == {"compute", "wait", "wire"}
        spans = [event for event in events if event["ph"] == "X"]
        by_track = {track: [e for e in spans if names[e["tid"]] == track] for track in ("compute", "wait", "wire")}
        for layer in ("0", "2"):
            for phase in ("forward", "backward"):
                assert sum(e["name"] == f"{phase} {layer}" for e in by_track["compute"]) >= 3, (kind, phase, layer)
        assert by_track["wait"]
        assert {e["name"] for e in by_track["wire"]} & {"0", "2", "2 to 0", "bucket 0"}
        assert all(e["args"]["sent_bytes"] > 0 for e in by_track["wire"])
        assert min(e["ts"] for e in spans) == 0
        assert all(e["dur"] >= 0 for e in spans)
        for tid in names:  # nothing overlaps on one row of the wire
            row = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == tid and e["cat"] == "wire")
            assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(row))
        marks = [event["name"] for event in sorted(events, key=lambda e: e.get("ts", 0)) if event["ph"] == "i"]
        assert marks == ["forward ends", "step ends"] * 4


def test_ddp_s_trace_has_its_messages_and_the_wait_inside_backward(traces: Path):
    step = read_timeline(traces / "ddp.json")
    assert {one.name for one in step.messages} == {"bucket 0"}
    (wait,) = step.waits
    assert wait.name == "inside backward"
    assert max(one.end_ms for one in step.backward) <= wait.begin_ms + 1e-6
    assert wait.end_ms <= min(one.begin_ms for one in step.forward)


def test_a_transfer_that_was_under_way_before_is_where_the_timeline_begins(tmp_path: Path):
    begun = time.perf_counter()
    time.sleep(0.01)
    model = nn.Linear(2, 2)
    trace = Trace(model, torch.device("cpu"), tmp_path / "trace.json", range(1, 2))
    trace.end_step(SyncStats(None))
    model(torch.ones(1, 2)).sum().backward()
    Transfer.record += [Transfer("early", begun, time.perf_counter()), Transfer("over", begun, begun)]
    trace.end_step(SyncStats(Stopwatch(torch.device("cpu"))))
    spans = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in spans] == ["early", "forward ", "backward ", "backward "]
    assert spans[0]["ts"] == 0
    assert all(e["ts"] > 10_000 and e["dur"] >= 0 for e in spans[1:])


@with_ranks(2)
def test_what_a_step_cost_holds_nothing_of_what_was_sent() -> None:
    """A loop may keep the figures of many steps, and gradients would add up."""
    model = nn.Linear(64, 64)
    pool = pooled(model, DearSync(wire="fp32"))
    pool.zero_grad()
    model(torch.ones(1, 64)).sum().backward()
    stats = pool.step(torch.optim.SGD(model.parameters(), 0.1))
    pool.settle()
    assert stats.sent_bytes > 0
    assert [held for held in held_by(stats) if isinstance(held, torch.Tensor | dist.Work)] == []


def held_by(root: object) -> list[object]:
    """All that lives as long as this does, but for what modules and classes hold."""
    held: dict[int, object] = {}
    found = [root]
    while found:
        held |= {id(one): one for one in found}
        inner = [one.__closure__ or () if isinstance(one, FunctionType) else gc.get_referents(one) for one in found]
        found = [
            one for all_of in inner for one in all_of if id(one) not in held and not isinstance(one, type | ModuleType)
        ]
    return list(held.values())


def _trace(folder: Path) -> None:
    for settings in (LazySync(), HybridSync(), DdpSync()):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 10))
        forward, sync = attach(model, settings)
        traced = Trace(model, torch.device("cpu"), folder / f"{settings.kind}{dist.get_rank() or ''}.json", range(2, 6))
        for _ in range(7):
            sync.zero_grad()
            forward(torch.ones(1, 3, 8, 8)).sum().backward()
            traced.end_step(sync.end_backward())
            sync.update(lambda params: None)
        sync.close()
