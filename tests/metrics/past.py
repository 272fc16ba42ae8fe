"""Runs that are over, without running one."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from imagenet_fast.compare.report import summaries
from imagenet_fast.metrics.events import MetricLogger, take_back
from imagenet_fast.metrics.past_run import PastRun
from imagenet_fast.metrics.tables import table
from imagenet_fast.run.result import Accuracy, RunResult
from imagenet_fast.training.clock import Clock


def outcome() -> RunResult:
    return RunResult("failed", "resnet50-8gpu", "lazy", 8, 3200, target_top1=75.9)


def pretend_run(
    record: MetricLogger, result: RunResult, losses: tuple[float, float] = (3.0, 1.5), last_top1: float = 76.0,
    scale: float | None = None, wait_s: float = 0.9,
) -> None:  # fmt: skip
    """The events of a two-epoch run, as train.py sends them; where there is a loss ``scale``, three steps an epoch are
    skipped."""
    record(
        "run", 0, recipe="resnet50-8gpu", sync="lazy", world_size=8, layout="dp8", global_batch=3200, epochs=37,
        steps_per_epoch=400, steps=14800, target_top1=75.9, train_images=1281167, val_images=50000,
        note="recipe written for 8 ranks",
    )  # fmt: skip
    for epoch, loss, top1 in zip((1, 2), losses, (50.0, last_top1), strict=True):
        step = 400 * epoch
        record("epoch", step - 400, epoch=epoch)
        record("data", step, wait_pct=1.5)
        result.add_wait(wait_s, of_s=60.0)
        record("speed", step, images_per_s=20000.0)
        record("sync", step, exposed_ms=2.5, sent_MB=89.5, launches=4.0)
        if scale is not None:
            record("precision", step, loss_scale=scale, skipped_steps=3 * epoch)
        record("train", step, epoch=epoch, loss=loss, lr=1.0)
        result.advance(epoch, step, train_s=60.0 * epoch, sent_bytes=step * 89_500_000)
        result.record_eval(Accuracy(top1=top1, top5=90.0), run_s=70.0 * epoch)
        record("eval", step, epoch=epoch, top1=top1, top5=90.0, images=50000, eval_s=9.0, train_s=60.0 * epoch)
    record("end", result.steps, **vars(result))


def leave_run(folder: Path, resumed: int | None = None, **pretended: Any) -> RunResult:
    """The record of a run, and its outcome."""
    folder.mkdir(exist_ok=True, parents=True)
    result = outcome()
    if resumed is not None:
        take_back(folder, resumed)
    pretend_run(MetricLogger(Clock().run_s, folder=folder), result, **pretended)
    result.write(folder)
    return result


def shown(runs: Sequence[PastRun], width: int = 120) -> str:
    """Their table, as `report` prints it."""
    text = io.StringIO()
    Console(file=text, width=width).print(table(summaries(runs)))
    return text.getvalue()


def strict(text: str) -> Any:
    """As a reader has it that holds to RFC 8259: NaN and infinities are no JSON, and a KeyError."""
    return json.loads(text, parse_constant={}.__getitem__)
