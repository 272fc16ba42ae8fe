"""Two runs with one directory at once: one trains, and of the other nothing is left but a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import events_of, outcome_of, setting, wait_for
from tests.faults.jobs import start

pytestmark = pytest.mark.weekly

TINY = (
    "--recipe", "smoke", "--nproc", "1",
    *setting("ranks=1", "global_batch=4", "micro_batch=4", "data.train_images=40", "data.val_images=4", "log_every=1"),
    *setting("epochs=3"),
)  # fmt: skip


@pytest.mark.parametrize("resume", [(), ("--resume", "auto")])
def test_of_two_at_once_one_trains_and_the_other_changes_nothing(resume: tuple[str, ...], tmp_path: Path):
    out = tmp_path / "run"
    first, second = (start(out, *resume, "--seed", seed, job=TINY) for seed in "12")
    codes = first.ended(240), second.ended(240)
    log = first.printed
    assert sorted(codes) == [0, 2], log
    assert log.count("error: ") == 1
    refusals = ("is being trained by another process", "already holds a run", "was begun with another recipe")
    assert any(why in log for why in refusals), log
    seed = 1 + codes.index(0)
    assert outcome_of(out)["status"] == "finished"
    assert json.loads((out / "job.json").read_text())["recipe"]["seed"] == seed
    assert f"seed = {seed}\n" in (out / "recipe.toml").read_text()
    assert len(events_of(out, "train")) == 30
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.log"}


def test_a_second_run_beside_one_that_trains_changes_none_of_its_files(tmp_path: Path):
    out = tmp_path / "run"
    first = start(out, *setting("eval_every=1000", "epochs=1000"), job=TINY)
    wait_for(lambda: first.step > 2)
    kept = ("job.json", "recipe.toml", "environment.json")
    before = [(out / name).stat().st_mtime_ns for name in kept]
    second = start(out, "--resume", "auto", "--seed", "2", job=TINY)
    assert second.ended(120) == 2
    assert [(out / name).stat().st_mtime_ns for name in kept] == before
    assert not (out / "outcome.json").exists()
    assert first.command.poll() is None
    first.kill_at_once()
