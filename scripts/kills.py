"""Kill small trainings on three ranks at random moments, let the same command finish them, and print a table of whether
they ended with the bytes of a run that was left alone. A row takes about half a minute on two cores.

    .venv/bin/python scripts/kills.py [--count 50] [--seed 1] [--out DIR]

Exit code 1 if a run ended otherwise. Engines, wires and loaders come in turn, and so do those who are killed: a rank,
the launcher, all; half of all moments are drawn from the second after a checkpoint has begun. What was measured in DIR
at this commit and with this seed is not measured again.
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
_EVERY = 4  # steps from one checkpoint to the next, as in SMALL
_STEPS = 20
_ATTEMPTS = 6
"""To have ``auto`` choose as it did in another run, on a machine that may be busy."""


def main() -> int:
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
    """Each setting with another victim in each turn."""
    for turn in cycle(range(len(get_args(Victim)))):
        for number, setting in enumerate(_SETTINGS):
            yield setting, get_args(Victim)[(turn + number) % len(get_args(Victim))]


def _measured(out: Path, number: int, setting: str, victim: Victim, seed: int) -> dict[str, str | int]:
    """A row, as it was measured before or is now."""
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
    """The digest of the run that nobody kills. Where ``auto`` chooses by what it measures, of one that chose ``engine``
    too: over three ranks engines add up in other orders."""
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
    """The engine that ``auto`` chose in a run; nothing where the recipe names one."""
    return next((str(event["engine"]) for event in events_of(folder, "choice")), "")


def _job(out: Path, setting: str) -> tuple[str, ...]:
    """What is trained: on images where it is a loader that is tried."""
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
