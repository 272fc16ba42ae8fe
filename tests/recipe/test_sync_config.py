"""The properties of an engine's settings that other modules query."""

from __future__ import annotations

from typing import get_args

from imagenet_fast.recipe.engine_table import EngineTable
from imagenet_fast.recipe.sync_config import (
    AllReduceSync,
    AutoSync,
    DdpSync,
    DearSync,
    HybridSync,
    LazySync,
    PowerSgdSync,
    RingSync,
    SparseSync,
    Sync,
)

ALL: list[EngineTable] = [member() for member in get_args(get_args(Sync)[0])]
EAGER_AUTO = AutoSync(defer=False)
INEXACT_AUTO = AutoSync(inexact=True)


def kinds(engines: list[EngineTable]) -> list[str]:
    return [engine.kind for engine in engines]


def test_every_engine_says_where_it_waits():
    assert {engine.kind: engine.awaits for engine in ALL} == {
        "allreduce": "each", "ring": "backward", "lazy": "backward", "sparse": "backward", "powersgd": "backward",
        "hybrid": "read", "dear": "read", "auto": "read", "ddp": "backward",
    }  # fmt: skip


def test_engines_that_defer():
    assert kinds([engine for engine in ALL if engine.defers]) == ["hybrid", "dear", "auto"]
    assert [PowerSgdSync(timing=timing).awaits for timing in ("allreduce", "lazy", "hybrid", "dear")] == [
        "each", "backward", "read", "read",
    ]  # fmt: skip
    assert SparseSync(timing="hybrid").defers
    assert (EAGER_AUTO.awaits, EAGER_AUTO.defers) == ("backward", False)


def test_engines_that_are_not_exact():
    assert kinds([engine for engine in ALL if not engine.exact]) == ["sparse", "powersgd"]
    assert kinds([engine for engine in ALL if engine.keeps]) == ["sparse", "powersgd"]
    assert not DdpSync(powersgd_rank=1).exact
    assert not INEXACT_AUTO.exact


def test_engines_learn_that_measure_before_they_plan():
    assert kinds([engine for engine in ALL if engine.learns]) == ["ring", "lazy", "hybrid", "dear", "auto"]
    assert not LazySync(threshold_mb=1).learns
    assert PowerSgdSync(timing="dear").learns
    assert EAGER_AUTO.learns
    assert DdpSync(powersgd_rank=1).learns, "its hook begins after a few steps"


def test_all_send_everything_but_sparse_and_powersgd_of_matrices():
    assert kinds([engine for engine in ALL if engine.share < 1]) == ["sparse"]
    assert SparseSync(sparsity=0.875).share == 0.125
    shape = (32, 3, 5, 5)
    assert {engine.kind: engine.values_sent(shape) for engine in ALL if engine.values_sent(shape) != 2400} == {
        "sparse": 300, "powersgd": 4 * (32 + 75),
    }  # fmt: skip
    for settings in (PowerSgdSync(rank=2), DdpSync(powersgd_rank=2)):
        assert [settings.values_sent(shape) for shape in ((), (7,), (1, 9), (3, 9), (0, 4))] == [1, 7, 9, 24, 0]


def test_engines_that_keep_unsent_values():
    assert kinds([engine for engine in (*ALL, INEXACT_AUTO) if engine.keeps]) == ["sparse", "powersgd", "auto"]


def test_ddp_is_not_ours_and_auto_takes_anothers_place():
    assert kinds([engine for engine in ALL if not engine.ours]) == ["ddp"]
    assert kinds([engine for engine in ALL if engine.chooses]) == ["auto"]


def test_dense_epochs_are_derived_from_the_warmup():
    assert SparseSync().derived(2.5) == SparseSync(dense_epochs=2.5)
    assert PowerSgdSync().derived(2.5) == PowerSgdSync(dense_epochs=2.5)
    for engine in (*ALL, SparseSync(dense_epochs=0)):
        if engine not in (SparseSync(), PowerSgdSync()):
            assert engine.derived(2.5) is engine
    assert INEXACT_AUTO.derived(2.5) == AutoSync(inexact=True, dense_epochs=2.5)


def test_an_engine_is_told_apart_as_a_recipe_writes_it():
    assert RingSync().as_written == "sync.kind 'ring'"
    assert AutoSync().as_written == "sync.kind 'auto' with sync.defer"
    assert EAGER_AUTO.as_written == "sync.kind 'auto'"
    assert INEXACT_AUTO.as_written == "sync.kind 'auto' with sync.defer and sync.inexact"
    assert PowerSgdSync(timing="dear").as_written == "sync.kind 'powersgd' with sync.timing 'dear'"


def test_what_is_asked_is_no_setting():
    """So that no recipe can say it, and no recipe written out in full does."""
    asked = {
        "awaits", "defers", "exact", "learns", "share", "ours", "keeps", "chooses", "as_written", "values_sent",
        "velocity_momentum",
    }  # fmt: skip
    for engine in ALL:
        assert not asked & set(engine.model_dump())
    assert list(AllReduceSync().model_dump())[:4] == ["kind", "wire", "max_ctas", "bf16_steps"]
    assert list(HybridSync().model_dump())[:2] == list(DearSync().model_dump())[:2] == ["kind", "wire"]
