"""Kill small runs at random moments, resume them, and report whether they end with the bytes of an undisturbed run.

    .venv/bin/python scripts/kills.py [--count 50] [--seed 1] [--out DIR]

Runs have three ranks, and the command that is killed also finishes the run. The result is a table; a row takes about
half a minute on two cores. The exit code is 1 if a run ends with other bytes. Engines, wire dtypes and loaders are
tested in turn. So are the victims: a rank, the launcher, or all. Half of the moments are within the second after a
checkpoint has started. Rows already measured in DIR at this commit with this seed are not measured again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import make_images
from tests.e2e.command import events_of
from tests.faults.jobs import SMALL, Victim, folder_of_commit, kept_row, kill_at, train

_SETTINGS: dict[str, tuple[str, ...]] = {
    "allreduce": ("--sync", "allreduce"),
    "ring": ("--sync", "ring"),
    "lazy": ("--sync", "lazy"),
    "hybrid": ("--sync", "hybrid"),
    "dear": ("--sync", "dear"),
    "ddp": ("--sync", "ddp"),
    "auto": ("--sync", "auto"),
    "sparse": ("--sync", "sparse", "--set", "sync.dense_epochs=0.2", "--set", "sync.ramp_epochs=0.2"),
    "powersgd": ("--sync", "powersgd"),
    "lazy fp16": ("--sync", "lazy", "--set", "sync.wire=fp16"),
    "lazy int8": ("--sync", "lazy", "--set", "sync.wire=int8"),
    "hybrid int8": ("--sync", "hybrid", "--set", "sync.wire=int8"),
    "dear int8": ("--sync", "dear", "--set", "sync.wire=int8"),
    "ring fp8": ("--sync", "ring", "--set", "sync.wire=fp8"),
    "lazy, average": ("--sync", "lazy", "--set", "ema_decay=0.9"),
    "folder": (),
    "dali": (),
    "folder, cached": (),
}
_EVERY = 4  # steps between checkpoints, as in SMALL
_STEPS = 20
_ATTEMPTS = 6
"""Maximum number of runs until ``auto`` chooses the same engine as in another run, on a node that may be busy."""


def main() -> int:
    """Measure the rows, print the table, and return the exit code."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    options.add_argument("--count", type=int, default=50)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--out", type=Path, default=Path("runs/kills"))
    chosen = options.parse_args()
    out = folder_of_commit(chosen.out)
    wrong = 0
    print(f"{'setting':<16}{'killed':<10}{'at step':>8}  {'alone':<18}{'killed and finished':<20}", flush=True)
    for number, (setting, victim) in enumerate(islice(_cases(), chosen.count)):
        row = _measured(out, number, setting, victim, chosen.seed)
        same = row["alone"] == row["finished"]
        wrong += not same
        said = "the same" if same else f"{row['finished']}  DIFFERENT"
        print(f"{setting:<16}{victim:<10}{row['step']:>8}  {row['alone']:<18}{said}", flush=True)
    print(f"{chosen.count - wrong} of {chosen.count} ended with the same bytes")
    return 1 if wrong else 0


def _cases() -> Iterator[tuple[str, Victim]]:
    """Yield all settings again and again, each with another victim every time."""
    for turn in cycle(range(len(get_args(Victim)))):
        for number, setting in enumerate(_SETTINGS):
            yield setting, get_args(Victim)[(turn + number) % len(get_args(Victim))]


def _measured(out: Path, number: int, setting: str, victim: Victim, seed: int) -> dict[str, str | int]:
    """Return a row from an earlier measurement, or measure it now."""
    folder = out / f"{seed}-{number:03}"

    def measure() -> dict[str, str | int]:
        choice = random.Random(f"{seed}/{number}")
        step = choice.randrange(_EVERY, _STEPS, _EVERY) if choice.random() < 0.5 else choice.randrange(1, _STEPS - 2)
        job, more = _job(out, setting), _SETTINGS[setting]
        reached = kill_at(folder, victim, step, choice.uniform(0, 1.0), choice, *more, job=job)
        finished = train(folder, *more, job=job)
        return {"step": reached, "alone": _alone(out, setting, chosen_in(folder)), "finished": finished}

    return kept_row(folder.with_suffix(".json"), measure)


def _alone(out: Path, setting: str, engine: str) -> str:
    """Return the digest of an undisturbed run.

    With ``auto``, use a run that chose ``engine`` too: with three ranks, engines add gradients in different orders.
    """
    name = setting.replace(", ", "-").replace(" ", "-")
    for attempt in range(_ATTEMPTS):
        folder = out / (name if not attempt else f"{name}-{attempt}")
        kept = out / f"{folder.name}.digest"
        if not kept.exists():
            kept.write_text(train(folder, *_SETTINGS[setting], job=_job(out, setting)), encoding="utf-8")
        if chosen_in(folder) == engine:
            return kept.read_text(encoding="utf-8")
    return f"none chose {engine}"


def chosen_in(folder: Path) -> str:
    """Return the engine that ``auto`` chose in a run; empty if the recipe names an engine."""
    return next((str(event["engine"]) for event in events_of(folder, "choice")), "")


def _job(out: Path, setting: str) -> tuple[str, ...]:
    """Return the command's arguments for a setting; settings of a loader train on image files."""
    loader = setting.partition(",")[0]
    if loader not in ("folder", "dali"):
        return SMALL
    images = out / "images"
    if not images.exists():
        make_images(images, train=120, val=12)
    recipe = out / f"{loader}.toml"
    recipe.write_text(_RECIPE.format(loader=loader), encoding="utf-8")
    cache = ("--set", f"data.cache={out.absolute() / 'cache'}") if setting.endswith("cached") else ()
    return ("--recipe", str(recipe), "--nproc", "3", "--data", str(images), *cache)


_RECIPE = """
ranks = 3
global_batch = 12
epochs = 2
log_every = 1
checkpoint = {{ every_steps = 4 }}
model = {{ kind = "resnet18" }}
data = {{ dataset = "digits", loader = "{loader}", image_size = 32, resize = 36 }}
precision = {{ kind = "fp32" }}
optim = {{ kind = "sgd", lr = 0.05, weight_decay = 1e-4 }}
schedule = {{ kind = "cosine" }}
sync = {{ kind = "lazy" }}
"""


if __name__ == "__main__":
    raise SystemExit(main())
