"""The outcome of a run: its accuracies, when it reached its target, its file and its exit code."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from imagenet_fast.metrics.past_run import read_run
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.run.result import Accuracy, RunResult, read_outcome
from tests.conftest import refusal_of, tables
from tests.metrics.past import leave_run, outcome


def test_the_outcome_follows_the_run_and_stands_for_an_exit_code(tmp_path: Path):
    assert outcome().exit_code == 1
    result = leave_run(tmp_path)
    assert (result.status, result.time_to_accuracy_s, result.exit_code) == ("reached", 140.0, 0)
    assert result.images_per_s == pytest.approx(800 * 3200 / 120)
    assert result.sent_bytes_per_step == 89_500_000
    assert read_outcome(tmp_path) == result
    promised = {
        "status", "top1", "top5", "target_top1", "time_to_accuracy_s", "train_s", "run_s", "epochs", "steps",
        "images_per_s", "sync", "world_size", "global_batch", "sent_bytes_per_step",
    }  # fmt: skip
    assert promised <= set(json.loads((tmp_path / "outcome.json").read_text()))
    for status, target, code in (("finished", 90.0, 3), ("finished", None, 0), ("interrupted", None, 1)):
        assert RunResult(status, "r", "lazy", 1, 1, target_top1=target).exit_code == code


def test_concurrent_launchers_leave_a_whole_outcome(tmp_path: Path):
    outcomes = [RunResult("failed", "r", "lazy", 1, 1, message=str(n) * 5000) for n in range(4)]
    with ThreadPoolExecutor(len(outcomes)) as launchers:
        for written in [launchers.submit(one.write, tmp_path) for one in outcomes * 50]:
            written.result()
    assert read_outcome(tmp_path) in outcomes
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]


def test_a_damaged_outcome_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    leave_run(tmp_path)
    path = tmp_path / "outcome.json"
    sound = json.loads(path.read_text())
    others = [json.dumps(sound | other) for other in ({"status": "won"}, {"steps": 4.0}, {"top1": "4"}, {"more": 1})]
    for content in ("", "{", "[]", "null", '{"status": "finished"}', '{"steps": NaN}', "[" * 9999, "\0", *others):
        path.write_text(content)
        sentence = f"{path} is damaged or of another version; remove it"
        assert sentence in refusal_of(read_outcome, tmp_path)
        assert read_run(tmp_path).status == "outcome damaged"
        assert f"warning: {sentence}" in capsys.readouterr().err


@pytest.mark.parametrize(("target", "reached_s"), [(97.0, 300.0), (95.0, 200.0), (98.0, 400.0)])
def test_the_first_evaluation_that_meets_the_target_counts(target: float, reached_s: float):
    """While a run trains, and where one resumes with a lower target."""
    recipe = parse_recipe("test", tables(target_top1=target))
    judged = RunResult.of("test", recipe, split_batch(recipe, 2))
    resumed = RunResult("reached", "r", "lazy", 2, 512, target_top1=target, time_to_accuracy_s=400.0)
    accuracies = ((90.0, 100.0), (96.0, 200.0), (97.5, 300.0), (98.0, 400.0))
    for top1, run_s in accuracies:
        judged.record_eval(Accuracy(top1=top1), run_s)
    resumed.judge({"run_s": run_s, "top1": top1} for top1, run_s in accuracies)
    assert judged.time_to_accuracy_s == resumed.time_to_accuracy_s == reached_s
    assert (judged.status, judged.top1) == ("reached", 98.0)
    lower = RunResult.of("test", parse_recipe("test", tables(target_top1=90.0)), split_batch(recipe, 2))
    lower.resume_from(asdict(judged))
    assert (lower.status, lower.time_to_accuracy_s) == ("reached", reached_s)
    lower.clear_target()
    assert (lower.status, lower.time_to_accuracy_s) == ("failed", None), "its checkpoint is of later weights"
    lower.record_eval(Accuracy(top1=89.0), 500.0)
    assert (lower.status, lower.time_to_accuracy_s) == ("failed", None)
