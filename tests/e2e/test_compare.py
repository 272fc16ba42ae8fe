"""One command trains a recipe with several engines or layouts, each on hosts of its own, and says who was first."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from imagenet_fast.compare import contest
from imagenet_fast.compare.contest import Ended
from imagenet_fast.compare.layouts import parse_layouts
from imagenet_fast.compare.report import summaries
from imagenet_fast.metrics import MetricLogger
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.metrics.tables import table
from tests.e2e.command import COMMAND, environment, events_of, in_process, outcome_of, setting, wait_for


@pytest.mark.ci
@pytest.mark.usefixtures("root", "own_signals")
def test_engines_are_compared_over_a_network_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "runs"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")  # of this node's network, where the hosts of the other have eth0
    changes = ("precision.kind=fp32", "data.train_images=32", "data.val_images=8", "epochs=1")
    sparse = ("sparse.dense_epochs=0", "sparse.ramp_epochs=0", "sparse.sparsity=0.5")
    options = ("--sync", "lazy,sparse", "--nproc", "2", "--rate", "1gbit", "--out", str(out))
    printed = in_process("compare", "--recipe", "smoke", *options, *setting(*changes, *sparse))
    outcomes = {name: outcome_of(out / name) for name in ("lazy", "sparse")}
    assert all(outcome["status"] == "finished" and outcome["steps"] == 1 for outcome in outcomes.values())
    assert 0.4 < outcomes["sparse"]["sent_bytes_per_step"] / outcomes["lazy"]["sent_bytes_per_step"] < 0.6
    table = printed[printed.index("run ") :]
    for name in outcomes:
        (sent,) = events_of(out / name, "sync")
        assert sent["link_MB"] == pytest.approx(sent["sent_MB"], rel=0.15), "acknowledgements and headers weigh little"
        assert list((out / name).glob("events.out.tfevents.*"))
        assert name in table
    assert (out / "compare.png").stat().st_size > 10_000


@pytest.mark.weekly
@pytest.mark.usefixtures("root", "own_signals")
def test_layouts_are_compared_in_one_table(tmp_path: Path):
    """With as few images as show what a step takes (ten steps are not shown), and those as small as AlexNet allows."""
    out = tmp_path / "runs"
    tiny = setting(
        "model={kind='alexnet', dropout=0.0}", "global_batch=8", "micro_batch=4", "epochs=1", "log_every=1",
        "data.image_size=63", "data.train_images=96", "data.val_images=8", "precision.kind=fp32",
        "optim={kind='sgd', lr=0.001, weight_decay=0.0}", "schedule={kind='cosine'}",
    )  # fmt: skip
    options = ("--layout", "dp2,tp2", "--nproc", "2", "--rate", "2gbit", "--out", str(out))
    printed = in_process("compare", "--recipe", "smoke", *options, *tiny)
    outcomes = {name: outcome_of(out / name) for name in ("dp2", "tp2")}
    assert all(outcome["sync"] == "hybrid" and outcome["steps"] == 12 for outcome in outcomes.values())
    losses = {name: [event["loss"] for event in events_of(out / name, "train")] for name in outcomes}
    assert losses["tp2"] == pytest.approx(losses["dp2"], rel=1e-3), "the same training"
    headings, *rows = printed[printed.rindex("\nrun  ") + 1 :].splitlines()[:3]
    assert re.split("  +", headings) == [
        "run", "status", "top-1 %", "loss", "steps", "s/step", "img/s", "MB/step", "link MB"
    ]  # fmt: skip
    sent = {}
    for row in rows:
        name, *_, ours, kernels = row.split()
        assert float(kernels) == pytest.approx(float(ours), rel=0.15), name
        sent[name] = float(kernels)
    assert 0 < sent["tp2"] < 0.2 * sent["dp2"], "activations instead of gradients"
    assert "every layout with the engine hybrid\n" in printed


@pytest.mark.weekly
def test_compare_shows_finished_runs_after_a_failure(tmp_path: Path):
    out = tmp_path / "my runs"
    process = subprocess.Popen(
        [*COMMAND, "compare", "--recipe", "smoke", "--nproc", "2", "--sync", "allreduce,lazy,ring,dear",
         "--out", str(out), *setting("data.train_images=64", "epochs=4", "log_every=1", "target_top1=0.999"),
         *setting("first_eval=4")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment(),
    )  # fmt: skip

    def trains(run: str) -> bool:
        return (out / run / "events.jsonl").exists() and len(events_of(out / run, "train")) > 1

    wait_for(lambda: trains("allreduce"), timeout_s=120)
    for rank in psutil.Process(process.pid).children():
        rank.kill()
    wait_for(lambda: trains("ring"), timeout_s=240)
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    printed, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert not any(child.is_running() for child in started)
    table, _, rest = printed[printed.rindex("run  ") :].partition("allreduce ended")
    allreduce, lazy, ring = (line.split() for line in table.splitlines()[1:])
    assert [*allreduce[:3], allreduce[4]] == ["allreduce", "failed", "–", "–"], "no top-1, no target"
    assert lazy[:3] == ["lazy", "reached", f"{outcome_of(out / 'lazy')['top1']:.2f}"]
    assert ring[:2] == ["ring", "preempted"], "it was saved"
    assert f" with exit code 1; its partial results are in {out / 'allreduce'}\n" in rest
    assert f"ring ended with exit code 4; its partial results are in {out / 'ring'}\n" in rest
    assert f"imagenet-fast train --resume '{out / 'ring'}' --nproc 2 goes on with it\n" in rest
    assert "lazy ended" not in rest
    assert "dear" not in table + rest
    assert f"tensorboard --logdir '{out}'\n" in rest
    assert (out / "compare.png").stat().st_size > 10_000
    assert errors.count("warning: target_top1 is 0.999 %; did you mean 99.9?\n") == 1, "once, not once a run"
    assert "Traceback" not in errors


def compared(monkeypatch: pytest.MonkeyPatch, folder: Path, codes: dict[str, int]) -> list[Ended]:
    """Runs that end with these exit codes and record nothing."""
    monkeypatch.setattr(contest, "_train", lambda job, _: codes[job.folder.name])
    runs = contest.contestants("smoke", 2, list(codes), [], [])
    return contest.compare("smoke", runs, data=None, ranks=2, rate=None, folder=folder)


@pytest.mark.usefixtures("own_signals")
def test_compare_ends_at_usage_errors_unless_a_run_succeeded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
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
    ended_by_force = MetricLogger(lambda: 1.0, folder=tmp_path / "lazy")
    for step in (1, 2):
        ended_by_force("train", step, loss=1.0, epoch=1)
    ended_by_force("eval", 2, top1=12.5, top5=50.0, epoch=1)
    monkeypatch.setattr(RunDir, "check_writable", lambda *_, **__: None)  # the run is there already
    (run,) = compared(monkeypatch, tmp_path, {"lazy": 1})
    text = io.StringIO()
    Console(file=text, width=120).print(table(summaries([run.past])))
    assert re.search(r"lazy +failed +12\.50 +1\.0000 +2$", text.getvalue().rstrip()), text.getvalue()


def test_names_tell_what_differs():
    """Engines, layouts and seeds, of which there are several."""
    both = ["lazy", "hybrid"]
    all_of_them = [f"{e}-{layout}-seed{s}" for e in both for layout in ("dp4", "pp2dp2") for s in (1, 2)]
    for recipe, engines, seeds, layouts, labels in (
        ("alexnet-8gpu", both, [1, 2], "dp4,pp2dp2", all_of_them),
        ("alexnet-8gpu", ["hybrid"], [], "tp2dp2,dp4", ["tp2dp2", "dp4"]),
        ("smoke", ["hybrid"], [7], "dp4", ["dp4-seed7"]),
    ):
        settings = ["hybrid.wire=fp32", "epochs=30"]
        *others, last = contest.contestants(recipe, 4, engines, seeds, settings, parse_layouts(layouts, 4))
        assert [run.label for run in (*others, last)] == labels
        assert last.overrides[:2] == ("sync.wire=fp32", "epochs=30")
        assert (last.recipe.sync.kind, last.recipe.sync.wire, last.recipe.epochs) == (engines[-1], "fp32", 30)
        assert (last.recipe.parallel.pipeline == 2) == ("pp2dp2" in labels[-1])
        assert not seeds or last.recipe.seed == seeds[-1]
