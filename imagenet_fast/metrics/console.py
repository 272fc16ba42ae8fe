"""Terminal output of a run: a line for each log interval and evaluation, and a summary at the end."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from imagenet_fast.metrics.events import Event
from imagenet_fast.metrics.tables import compact_table
from imagenet_fast.run.result import BEARABLE_WAIT_PCT, target_metric, verdict
from imagenet_fast.units import NOTHING, number


class ConsoleSink:
    """A sink that shows one run on a console."""

    def __init__(self, folder: Path, past: Sequence[Event] = (), console: Console | None = None) -> None:
        """Create the sink.

        Args:
            folder: The run directory, named in the summary.
            past: The events that ``take_back`` has kept, of a run that resumes.
            console: Where to print; None: standard output.
        """
        self._console = console or Console(highlight=False)
        self._folder = folder
        self._evaluations = [event for event in past if event["event"] == "eval"]
        self._last: defaultdict[str, Event] = defaultdict(dict)  # events by name

    def __call__(self, event: Event) -> None:
        """Print the event, if it is one that is shown; some are shown in the line of a later one."""
        self._last[event["event"]] = event
        match event["event"]:
            case "run":
                self._print(event["note"])
            case "resume":
                where = " on other ranks or with another layout" if event["moved"] else ""
                gap = _clock(event["gap_s"])
                self._print(f"resumed from the checkpoint of step {event['step']}{where}, {gap} after it was written")
            case "train":
                self._print(self._training_line(event))
            case "graph" if event["replayed"]:
                images, *_, side = event["images"]
                shown = f"{images} images of {side}x{side}"
                self._print(f"steps of {shown} are replayed from a CUDA graph after step {event['step']}")
            case "graph":
                self._print(f"steps are launched one by one, not replayed from a CUDA graph: {event['why']}")
            case "choice":
                predicted = sorted(event["predicted_ms"].items(), key=lambda item: item[1])  # of auto, fastest first
                notes = {engine: "" if exact else "not exact" for engine, exact in event["exact"].items()}
                notes[event["engine"]] = "taken"
                rows = [(engine, f"{ms:.1f}", notes[engine]) for engine, ms in predicted]
                self._console.print(compact_table(("engine",), ("predicted ms/step", ""), rows))
            case "eval":
                self._evaluations.append(event)
                self._print(self._evaluation_line(event))
            case "end":
                self._print_summary(event)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, emoji=False, soft_wrap=True)

    def _training_line(self, train: Event) -> str:
        run, sync, precision = (self._last[name] for name in ("run", "sync", "precision"))
        scale = {"loss scale": "loss_scale", "skipped steps": "skipped_steps"}  # as far as they are recorded
        figures = [
            f"epoch {train['epoch']}/{run['epochs']}",
            f"step {train['step']}/{run['steps']}",
            f"loss {number(train['loss'], '.4f')}",
            f"lr {number(train['lr'], '.4g')}",
            f"{number(self._last['speed'].get('images_per_s'), '.0f')} img/s",
            f"data wait {number(self._last['data'].get('wait_pct'), '.1f', ' %')}",
            f"exposed sync {number(sync.get('exposed_ms'), '.1f', ' ms')}",
            f"sent {number(sync.get('sent_MB'), '.2f', ' MB/step')}",
            *(f"{label} {precision[key]:g}" for label, key in scale.items() if key in precision),
        ]
        return "  ".join(figures)

    def _evaluation_line(self, event: Event) -> str:
        run = self._last["run"]
        tops = [e.get(target_metric(e, bool(run.get("target_mirrored")))) for e in self._evaluations]
        best = max(top1 for top1 in tops if isinstance(top1, int | float))
        aim = f", target {run['target_top1']:g} %" if run.get("target_top1") is not None else ""
        means = {"top1_mirror": "with mirror images", "top1_shift": "with shifts too"}
        averaged = "".join(f"{label} {event[key]:.2f} %  " for key, label in means.items() if key in event)
        bad = f" ({event['bad_images']} bad, and so wrong)" if "bad_images" in event else ""
        return (
            f"epoch {event['epoch']}/{run['epochs']}  top-1 {event['top1']:.2f} %  "
            f"top-5 {event['top5']:.2f} %  {averaged}(best {best:.2f} %{aim})  "
            f"{event['images']} images{bad} in {event['eval_s']:.1f} s, run {_clock(event['run_s'])}"
        )

    def _print_summary(self, outcome: Event) -> None:
        self._print(verdict(outcome))
        if outcome["status"] == "failed" and not outcome["steps"]:
            return  # nothing was measured
        folder = shlex.quote(str(self._folder))  # quoted, so that it can be pasted into a shell
        rows = {
            "time to accuracy": number(outcome["time_to_accuracy_s"], ".1f", " s"),
            "training only": f"{outcome['train_s']:.1f} s",
            "speed": f"{outcome['images_per_s']:.0f} img/s",
            "waited for data": f"{number(outcome['data_wait_pct'], '.1f')} % of training",
            "top-1 / top-5": f"{number(outcome['top1'], '.2f')} / {number(outcome['top5'], '.2f')} %",
            "mirror averaged": f"{number(outcome['top1_mirror'], '.2f')} / {number(outcome['top5_mirror'], '.2f')} %",
            "shifts averaged": f"{number(outcome['top1_shift'], '.2f')} / {number(outcome['top5_shift'], '.2f')} %",
            "sent": f"{outcome['sent_bytes_per_step'] / 1e6:.2f} MB per step and rank",
            "run": folder,
            "look at it": f"tensorboard --logdir {folder}",
        }
        if skipped := self._last["precision"].get("skipped_steps"):
            rows["skipped"] = f"{skipped} of {outcome['steps']} steps, since gradients overflowed"
        if outcome["resumed"]:
            rows["not counted"] = f"{_clock(outcome['gap_s'])} between checkpoints and resuming from them"
        for label, value in rows.items():
            if not value.startswith(NOTHING):
                self._print(f"  {label:<17} {value}")
        if (outcome["data_wait_pct"] or 0.0) > BEARABLE_WAIT_PCT:
            self._print("It waited for images: try another data.workers, or shrink or decode them once (data prepare).")


def _clock(seconds: float) -> str:
    """Return seconds as H:MM:SS."""
    return str(timedelta(seconds=round(seconds)))
