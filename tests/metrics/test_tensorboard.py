"""What TensorBoard itself reads of runs: their names, curves, layout of charts and table of hyper-parameters."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagenet_fast.launch.job_setup import plan_job
from imagenet_fast.metrics.events import MetricLogger, take_back
from imagenet_fast.metrics.tensorboard import TensorBoard
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import load_recipe
from imagenet_fast.run.result import Accuracy, RunResult, Status

CURVES = {
    "compare/step_s", "compare/time_to_accuracy_s", "compare/top1_best", "data/wait_pct", "eval/top1",
    "eval/top5", "speed/images_per_s", "sync/exposed_ms", "sync/sent_MB", "train/loss",
    "train/lr",
}  # fmt: skip


def the_job(folder: Path, *overrides: str, sync: str | None = None) -> Job:
    recipe = load_recipe("resnet50-8gpu", sync, overrides)
    job = Job("resnet50-8gpu", recipe, split_batch(recipe, 8), None, folder)
    return replace(job, overrides=tuple(key.partition("=")[0] for key in overrides))


class Trained:
    """A run of four epochs of 100 steps, in the directory of ``job``, whose clock ticks 0.5 s a step."""

    def __init__(self, job: Job, resumed: int | None = None) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        self.step = resumed or 0
        past = [] if resumed is None else take_back(job.folder, resumed)
        self.record = MetricLogger(lambda: 3.0 + self.step / 2, [TensorBoard(job, resumed, past)], job.folder)
        self.result = RunResult("failed", job.name, job.recipe.sync.kind, 8, 3200, target_top1=75.9)
        self.record("run", self.step, recipe=job.name, sync=job.recipe.sync.kind, world_size=8, global_batch=3200)

    def train(self, to: int, top1: float = 50.0, loss: float = 2.0) -> Trained:
        """Go on to step ``to``, with a log line every 50 steps and an evaluation every 100."""
        while self.step < to:
            self.step += 50
            self.record("data", self.step, wait_pct=1.5)
            self.record("speed", self.step, images_per_s=6400.0)
            self.record("sync", self.step, exposed_ms=2.5, sent_MB=89.5)
            self.record("train", self.step, epoch=1, loss=loss, lr=1.0)
            if self.step % 100 == 0:
                self.result.record_eval(Accuracy(top1=top1, top5=90.0), run_s=3.0 + self.step / 2)
                self.record("eval", self.step, epoch=1, top1=top1, top5=90.0, images=9, eval_s=9.0, train_s=1.0)
        return self

    def end(self, status: Status) -> None:
        """Record how the run ended."""
        self.result.status = status
        self.record("end", self.step, **vars(self.result))


def curves_of(logdir: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The points of every curve that TensorBoard shows: by run and tag."""
    events = events_of(logdir)
    return {
        run: {tag: [(e.step, e.value) for e in events.Scalars(run, tag)] for tag in told["scalars"]}
        for run, told in events.Runs().items()
    }


def events_of(logdir: Path) -> Any:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    return EventMultiplexer().AddRunsFromDirectory(str(logdir)).Reload()


def context_of(logdir: Path) -> Any:
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer as PluginMultiplexer
    from tensorboard.plugins.base_plugin import TBContext

    events = PluginMultiplexer(tensor_size_guidance={"scalars": 1000})
    events.AddRunsFromDirectory(str(logdir))
    events.Reload()
    return TBContext(data_provider=MultiplexerDataProvider(events, str(logdir)), plugin_name_to_instance={})


def table_of(logdir: Path) -> tuple[list[str], list[str], dict[str, dict[str, Any]]]:
    """Keys and metrics of the table of hyper-parameters, in its order; its rows by run: all these, and the status."""
    from tensorboard.context import RequestContext
    from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

    backend = backend_context.Context(context_of(logdir))
    table = get_experiment.Handler(RequestContext(), backend, "", api_pb2.GetExperimentRequest()).run()
    every = list(api_pb2.Status.values())
    request = api_pb2.ListSessionGroupsRequest(allowed_statuses=every, start_index=0, slice_size=100)
    rows = {}
    for group in list_session_groups.Handler(RequestContext(), backend, "", request).run().session_groups:
        (session,) = group.sessions
        keys = {key: getattr(value, value.WhichOneof("kind")) for key, value in group.hparams.items()}
        metrics = {value.name.tag: value.value for value in session.metric_values}
        rows[session.name] = keys | metrics | {"status": api_pb2.Status.Name(session.status)}
    return [info.name for info in table.hparam_infos], [info.name.tag for info in table.metric_infos], rows


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs as ``compare`` leaves them."""
    for sync in ("ddp", "lazy", "hybrid"):
        run = Trained(the_job(tmp_path / "runs" / sync, sync=sync)).train(to=300, top1=60.0)
        run.train(to=400, top1=76.0).end("reached")
    return tmp_path / "runs"


def test_runs_have_their_directories_names_and_curves_are_those_that_they_are_judged_by(runs: Path):
    assert set(curves_of(runs.parent)) == {"runs/ddp", "runs/lazy", "runs/hybrid"}
    assert set(curves_of(runs)) == {"ddp", "lazy", "hybrid"}
    curves = curves_of(runs)["lazy"]
    assert set(curves) == CURVES
    assert curves["eval/top1"] == [(100, 60.0), (200, 60.0), (300, 60.0), (400, 76.0)]
    assert curves["compare/time_to_accuracy_s"] == [(400, 203.0)]
    assert curves["compare/step_s"] == [(step, 0.5) for step in (100, 200, 300, 400)]


def test_layout_has_charts_of_curves_that_all_runs_have(runs: Path):
    from tensorboard.context import RequestContext
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin

    layout = CustomScalarsPlugin(context_of(runs)).layout_impl(RequestContext(), "")
    (category,) = json.loads(layout)["category"] if isinstance(layout, str) else layout["category"]
    tags = [tag.strip("^$") for chart in category["chart"] for tag in chart["multiline"]["tag"]]
    assert len(tags) == 6
    assert set(tags) <= CURVES


def test_table_begins_with_what_differs_and_shows_the_result(runs: Path):
    keys, metrics, rows = table_of(runs)
    assert keys == [
        "sync.kind", "data.loader", "epochs", "global_batch", "layout", "micro_batch", "model.kind", "optim.kind",
        "optim.lr", "precision.kind", "recipe", "seed", "sync.wire", "world_size",
    ]  # fmt: skip
    shown = ["compare/step_s", "compare/time_to_accuracy_s", "compare/top1_best", "data/wait_pct", "eval/top1"]
    assert metrics[:5] == shown, "TensorBoard shows five unless asked"
    assert {name: row["sync.kind"] for name, row in rows.items()} == {name: name for name in ("ddp", "lazy", "hybrid")}
    lazy = rows["lazy"]
    assert (lazy["recipe"], lazy["world_size"], lazy["layout"], lazy["seed"]) == ("resnet50-8gpu", 8.0, "dp8", "1")
    assert [lazy[tag] for tag in shown] == [0.5, 203.0, 76.0, 1.5, 76.0]
    assert lazy["status"] == "STATUS_SUCCESS"


def test_table_has_what_the_user_set(tmp_path: Path):
    changes = {"one": "sync.threshold_mb=8", "other": "sync.threshold_mb=32", "sizes": "data.sizes=[[1, 128]]"}
    for name, change in changes.items():
        Trained(the_job(tmp_path / name, change)).train(to=100).end("finished")
    keys, _, rows = table_of(tmp_path)
    assert keys[0] == "sync.threshold_mb"
    assert "data.sizes" in keys
    assert (rows["one"]["sync.threshold_mb"], rows["other"]["sync.threshold_mb"]) == (8.0, 32.0)
    assert rows["sizes"]["data.sizes"] == "[[1.0, 128]]"


def test_keys_that_were_set_are_those_of_the_command(tmp_path: Path):
    recipe = load_recipe("smoke")
    job = plan_job("smoke", recipe, 2, folder=tmp_path, overrides=["optim.lr=0.1", " seed =2"])
    assert job.overrides == ("optim.lr", "seed")


def test_status_is_that_of_the_last_end(tmp_path: Path):
    ends: dict[Status, str] = {"reached": "SUCCESS", "finished": "SUCCESS", "failed": "UNKNOWN", "preempted": "UNKNOWN"}
    Trained(the_job(tmp_path / "trains")).train(to=100)
    for status in ends:
        Trained(the_job(tmp_path / status)).train(to=100).end("failed")
        Trained(the_job(tmp_path / status), resumed=100).end(status)
    assert {name: row["status"] for name, row in table_of(tmp_path)[2].items()} == {
        name: f"STATUS_{shown}" for name, shown in {"trains": "UNKNOWN", **ends}.items()
    }


@pytest.mark.parametrize("set_back_s", [-86400, 100])
def test_a_resumed_run_has_one_curve_by_the_runs_time_whatever_the_clock_says(set_back_s, tmp_path: Path, monkeypatch):
    """Also of losses that are not finite, and of a loss scale."""
    begun = int(time.time())
    for part, (resumed, loss) in enumerate([(None, math.nan), (100, 60.0), (200, 70.0)]):
        now = begun - part * set_back_s
        monkeypatch.setattr(time, "time", lambda now=now: now)
        run = Trained(the_job(tmp_path / "run"), resumed).train(to=300, top1=10.0 * part, loss=loss)
        run.record("precision", run.step, loss_scale=0.5, skipped_steps=3)
        run.end("failed")
    monkeypatch.undo()
    ((run, curves),) = curves_of(tmp_path).items()
    assert run == "run"
    assert curves["eval/top1"] == [(100, 0.0), (200, 10.0), (300, 20.0)]
    assert (curves["precision/loss_scale"], curves["precision/skipped_steps"]) == ([(300, 0.5)], [(300, 3.0)])
    losses = curves["train/loss"]
    assert losses[2:] == [(150, 60.0), (200, 60.0), (250, 70.0), (300, 70.0)]
    assert [(step, math.isnan(loss)) for step, loss in losses[:2]] == [(50, True), (100, True)]
    events = events_of(tmp_path).Scalars("run", "train/loss")
    assert [e.wall_time - events[0].wall_time for e in events] == pytest.approx([25.0 * n for n in range(6)], abs=1e-3)


def test_what_is_written_when_a_run_resumes_does_not_grow_with_the_run(tmp_path: Path):
    written = []
    for steps in (200, 16_000):
        job = the_job(tmp_path / f"{steps}")
        Trained(job).train(to=steps, top1=70.0).end("preempted")
        run = Trained(job, resumed=steps)
        *_, last = sorted(job.folder.glob("events.out.tfevents.*"))
        written.append(last.stat().st_size)
        run.train(to=steps + 100, top1=60.0).end("preempted")
        assert curves_of(job.folder)["."]["compare/top1_best"][-1] == (steps + 100, 70.0)
    assert written[0] == written[1]
