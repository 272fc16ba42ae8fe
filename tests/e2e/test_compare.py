"""One command trains a recipe with several engines or layouts, each on hosts of its own, and says who was first."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagenet_fast.compare import contest
from imagenet_fast.compare.contest import Ended
from imagenet_fast.compare.layouts import parse_layouts
from tests.e2e.command import events_of, in_process, outcome_of, setting


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
