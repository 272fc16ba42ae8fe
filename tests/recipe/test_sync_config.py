"""The properties of an engine's settings that other modules query."""

from __future__ import annotations

from typing import get_args

from imagenet_fast.recipe.engine_table import EngineTable
from imagenet_fast.recipe.sync_config import AutoSync, DdpSync, LazySync, PowerSgdSync, SparseSync, Sync

ALL: dict[str, EngineTable] = {engine.kind: engine for engine in (member() for member in get_args(get_args(Sync)[0]))}

PROPERTIES: list[tuple[EngineTable, str, str, str]] = [
    (ALL["allreduce"], "'allreduce'", "each", "exact ours"),
    (ALL["ring"], "'ring'", "backward", "exact learns ours"),
    (ALL["lazy"], "'lazy'", "backward", "exact learns ours"),
    (LazySync(threshold_mb=1), "'lazy'", "backward", "exact ours"),
    (LazySync(wire="int8"), "'lazy' in sync.wire 'int8'", "backward", "keeps learns ours"),
    (ALL["hybrid"], "'hybrid'", "read", "defers exact learns ours"),
    (ALL["dear"], "'dear'", "read", "defers exact learns ours"),
    (ALL["auto"], "'auto' with sync.defer", "read", "defers exact learns chooses ours"),
    (AutoSync(defer=False), "'auto'", "backward", "exact learns chooses ours"),
    (AutoSync(inexact=True), "'auto' with sync.defer and sync.inexact", "read", "defers keeps learns chooses ours"),
    (ALL["sparse"], "'sparse'", "backward", "keeps ours"),
    (SparseSync(timing="hybrid"), "'sparse' with sync.timing 'hybrid'", "read", "defers keeps ours"),
    (ALL["powersgd"], "'powersgd'", "backward", "keeps ours"),
    (PowerSgdSync(timing="allreduce"), "'powersgd'", "each", "keeps ours"),
    (PowerSgdSync(timing="dear"), "'powersgd' with sync.timing 'dear'", "read", "defers keeps learns ours"),
    (ALL["ddp"], "'ddp'", "backward", "exact"),
    (DdpSync(powersgd_rank=1), "'ddp' with sync.powersgd_rank 1", "backward", "keeps learns"),  # its hook begins later
]
"""Settings, as a recipe writes them, where they wait, and what is true of them."""


def test_an_engine_says_where_it_waits_and_what_it_does():
    for engine, written, awaits, true in PROPERTIES:
        asked = ("defers", "exact", "keeps", "learns", "chooses", "ours")
        assert engine.as_written == f"sync.kind {written}"
        assert engine.awaits == awaits
        assert [name for name in asked if getattr(engine, name)] == true.split(), written
    assert {engine.kind for engine, *_ in PROPERTIES} == set(ALL)


def test_all_send_everything_but_sparse_and_powersgd_of_matrices():
    assert {kind: engine.share for kind, engine in ALL.items() if engine.share < 1} == {"sparse": 0.125}
    shape = (32, 3, 5, 5)
    sent = {kind: engine.values_sent(shape) for kind, engine in ALL.items()}
    assert sent == dict.fromkeys(ALL, 2400) | {"sparse": 300, "powersgd": 4 * (32 + 75)}
    for settings in (PowerSgdSync(rank=2), DdpSync(powersgd_rank=2)):
        assert [settings.values_sent(shape) for shape in ((), (7,), (1, 9), (3, 9), (0, 4))] == [1, 7, 9, 24, 0]


def test_dense_epochs_are_derived_from_the_warmup():
    for engine in (*ALL.values(), SparseSync(dense_epochs=0), AutoSync(inexact=True)):
        derived = {"dense_epochs": 2.5} if getattr(engine, "dense_epochs", 0) is None and engine.keeps else {}
        assert engine.derived(2.5) == engine.model_copy(update=derived)
