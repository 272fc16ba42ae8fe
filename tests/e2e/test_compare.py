"""One command trains a recipe with several engines, each on hosts of its own, and says who was first."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from imagenet_fast.bench import compare
from imagenet_fast.bench.compare import Ended
from imagenet_fast.record import Event
from imagenet_fast.record.jsonl import JsonLines
from imagenet_fast.record.past_runs import report_table
from tests.e2e.command import COMMAND, environment, events_of, in_process, outcome_of, wait_for


@pytest.mark.usefixtures("own_signals")
def test_engines_are_compared_over_a_network_of_ones_own(root: None, tmp_path: Path):
    out = tmp_path / "runs"
    printed = in_process(
        "compare", "--recipe", "smoke", "--sync", "lazy,sparse", "--hosts", "2", "--rate", "1gbit", "--out", str(out),
        "--set", "data.train_images=64", "--set", "epochs=1", "--set", "sparse.dense_epochs=0",
        "--set", "sparse.ramp_epochs=0", "--set", "sparse.sparsity=0.5",
    )  # fmt: skip
    outcomes = {name: json.loads((out / name / "outcome.json").read_text()) for name in ("lazy", "sparse")}
    assert all(outcome["status"] == "finished" and outcome["steps"] == 2 for outcome in outcomes.values())
    assert 0.4 < outcomes["sparse"]["sent_bytes_per_step"] / outcomes["lazy"]["sent_bytes_per_step"] < 0.6
    assert (out / "compare.png").stat().st_size > 10_000
    assert all(list((out / name / "tb").iterdir()) for name in outcomes)
    table = printed[printed.index("run ") :]
    assert "lazy" in table
    assert "sparse" in table


@pytest.mark.long
def test_what_has_finished_is_shown_though_one_run_fails_and_another_is_interrupted(tmp_path: Path):
    out = tmp_path / "my runs"
    (out / "allreduce" / ".job.json").mkdir(parents=True)  # so it fails before it can record anything
    process = subprocess.Popen(
        [*COMMAND, "compare", "--recipe", "smoke", "--hosts", "2", "--sync", "allreduce,lazy,ring,dear",
         "--set", "data.train_images=64", "--set", "epochs=4", "--set", "log_every=1", "--set", "target_top1=0.999",
         "--set", "first_eval=4", "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment(),
    )  # fmt: skip
    wait_for(lambda: (out / "ring" / "events.jsonl").exists() and len(events_of(out / "ring", "train")) > 1)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    os.killpg(process.pid, signal.SIGINT)
    printed, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert not any(child.is_running() for child in started)
    table, _, rest = printed[printed.rindex("run  ") :].partition("allreduce ended")
    allreduce, lazy, ring = (line.split() for line in table.splitlines()[1:])
    assert allreduce == ["allreduce", "nothing", "recorded", *"––––––"]
    assert lazy[:3] == ["lazy", "reached", f"{outcome_of(out / 'lazy')['top1']:.2f}"]
    assert ring[:2] == ["ring", "interrupted"]
    assert f" with exit code 1; what there is of it lies in {out / 'allreduce'}\n" in rest
    assert f"ring ended with exit code 1; what there is of it lies in {out / 'ring'}\n" in rest
    assert "lazy ended" not in rest
    assert "dear" not in table + rest
    assert f"tensorboard --logdir '{out}'\n" in rest
    assert (out / "compare.png").stat().st_size > 10_000
    assert errors.count("warning: target_top1 is 0.999 %; did you mean 99.9?\n") == 1, "once, not once a run"
    assert errors.count("Traceback") <= 1, "that of the run that fails"


def compared(monkeypatch: pytest.MonkeyPatch, folder: Path, codes: dict[str, int]) -> list[Ended]:
    """Runs that end with these exit codes and record nothing."""
    monkeypatch.setattr(compare, "_on_this_machine", lambda arguments, ranks: codes[Path(arguments[-1]).name])
    runs = compare.contestants(list(codes), [], [])
    return compare.compare("smoke", runs, data=None, hosts=2, rate=None, folder=folder)


@pytest.mark.usefixtures("own_signals")
def test_what_ranks_find_wrong_with_the_usage_ends_it_all_unless_a_run_has_succeeded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with pytest.raises(SystemExit) as end:
        compared(monkeypatch, tmp_path, {"lazy": 2, "ring": 0})
    assert end.value.code == 2
    ended = compared(monkeypatch, tmp_path, {"lazy": 1, "dear": 0, "ring": 2, "hybrid": 3})
    assert [(run.past.label, run.failed) for run in ended] == [
        ("lazy", True), ("dear", False), ("ring", True), ("hybrid", False),
    ]  # fmt: skip


@pytest.mark.usefixtures("own_signals")
def test_a_run_that_lost_its_rank_0_is_shown_with_what_it_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "lazy").mkdir()
    ended_by_force = JsonLines(tmp_path / "lazy")
    for step in (1, 2):
        ended_by_force.write(Event("train", step, 1.0, {"loss": 1.0, "epoch": 1}))
    ended_by_force.write(Event("eval", 2, 1.0, {"top1": 12.5, "top5": 50.0, "epoch": 1}))
    ended_by_force.close()
    monkeypatch.setattr(compare, "check_writable", lambda folder: None)  # the run is there already
    (run,) = compared(monkeypatch, tmp_path, {"lazy": 1})
    text = io.StringIO()
    Console(file=text, width=120).print(report_table([run.past]))
    assert re.search(r"lazy +failed +12\.50 +– +2 ", text.getvalue()), text.getvalue()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sync", "lazy,rng"), "sync.kind is 'rng'"),
        (("--sync", "lazy", "--rate", "fast"), "such as 250mbit"),
        (("--sync", "lazy", "--data", "photos"), "--data photos would not be read"),
        (("--sync", "lazy", "--seeds", "one"), "--seeds one is not a list of whole numbers; write for example 1,2,3"),
        (("--sync", "lazy", "--seeds", "0,-1"), "--seeds 0,-1 is not a list of whole numbers"),
        (("--sync", "lazy", "--seeds", "0,0"), "lazy-seed0 would be run twice"),
        (("--sync", "lazy", "--set", "sync.colective=ring"), "unknown key sync.colective"),
        (("--sync", "lazy", "--set", "ring.bucket_mb=1"), "is for ring, which is not in --sync lazy"),
        (("--sync", "lazy,ring,lazy"), "lazy would be run twice"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(
    arguments: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    refusal: Callable[..., str],
):
    runs = tmp_path / "runs"
    assert sentence in refusal("compare", "--recipe", "smoke", "--out", str(runs), *arguments)
    assert not runs.exists()
