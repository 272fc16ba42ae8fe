"""What a round of the fuzzer does to a run: a program of disturbances, drawn from a seed."""

from __future__ import annotations

import random
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tests.e2e.command import setting

Who = Literal["rank 0", "rank 1", "launcher", "all"]
How = Literal["truncate", "delete", "flip", "directory"]

STEPS = 10
JOB = (
    "--recipe", "smoke", "--nproc", "2",
    *setting("global_batch=4", "micro_batch=2", "epochs=2", "schedule.warmup_epochs=0", "data.train_images=20"),
    *setting("data.val_images=4", "log_every=1", "checkpoint.every_steps=3", "precision.kind=fp32", "optim.lr=0.01"),
)  # fmt: skip
"""Five steps an epoch, an evaluation after each; about nine seconds on two cores, of which training takes three."""
THREE_RANKS = ("--nproc", "3", *setting("reference_ranks=3", "global_batch=6", "data.train_images=30"))
SETTINGS = {
    "lazy": "", "hybrid": "", "dear": "", "lazy int8": "sync.wire=int8", "lazy, average": "ema_decay=0.9",
    "allreduce": "", "ring": "", "ddp": "", "auto": "sync.wire=fp32", "powersgd": "",
    "sparse": "sync.dense_epochs=0.2 sync.ramp_epochs=0.2", "lazy fp16": "sync.wire=fp16",
    "hybrid int8": "sync.wire=int8", "dear int8": "sync.wire=int8", "ring int8": "sync.wire=int8",
    "hybrid, three ranks": "sync.fuse_mb=1", "lazy int8, three ranks": "sync.wire=int8",
    "sparse, three ranks": "sync.dense_epochs=0.2",
}  # fmt: skip
"""What is trained, and what that changes of the recipe. The first word is an engine.

Whichever engine ``auto`` chooses, two ranks add the same numbers.
"""
FILES = (
    "job.json", "recipe.toml", "outcome.json", "events.jsonl", "environment.json", "events.out*",
    "checkpoints", "checkpoints/final.safetensors", "checkpoints/step-* newest", "checkpoints/step-* newest/*.json",
    "checkpoints/step-* newest/shared*", "checkpoints/step-* newest/rank*", "checkpoints/step-* oldest",
    "checkpoints/step-* oldest/*.json", "checkpoints/step-* oldest/shared*",
)  # fmt: skip
"""Of a run directory; those with a star are looked up when the time has come."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class Send:
    number: signal.Signals
    who: Who
    again_after_s: float | None = None


@dataclass(frozen=True)
class Hurt:
    """Damage to one file or directory of the run."""

    how: How
    file: str
    part: float
    """Where in the file, as a share of its length."""


Disturbance = Send | Hurt


@dataclass(frozen=True)
class Command:
    """One launch, and what happens to it ``delay_s`` after ``step`` was recorded; step 0: after it was started."""

    step: int
    delay_s: float
    disturbance: Disturbance | None
    afterwards: tuple[Hurt, ...]
    """Done to the run once the command has ended."""


@dataclass(frozen=True)
class Program:
    seed: str
    setting: str
    commands: tuple[Command, ...]
    again: bool
    """Whether the run is resumed once more when it has ended."""


def draw_program(seed: str) -> Program:
    """Draw one to three launches and what happens to them; the same for the same seed."""
    draw = random.Random(seed)
    setting = draw.choice(list(SETTINGS))
    count = draw.choices((1, 2, 3), (5, 4, 1))[0]
    commands = tuple(_draw_command(draw) for _ in range(count))
    return Program(seed, setting, commands, draw.random() < 0.25)


def _draw_command(draw: random.Random) -> Command:
    step, delay_s = draw.randint(1, STEPS), draw.uniform(0, 0.4)
    match draw.choices(("start", "evaluation", "saving", "anywhere"), (4, 2, 2, 3))[0]:
        case "start":
            step, delay_s = 0, draw.uniform(0.2, 6)
        case "evaluation":
            step = draw.choice((STEPS // 2, STEPS))
        case "saving":
            step = draw.randrange(3, STEPS, 3)
    disturbance: Disturbance | None = None
    match draw.choices(("kill", "signal", "damage", "nothing"), (4, 6, 3, 1))[0]:
        case "kill":
            disturbance = Send(signal.SIGKILL, draw.choice(get_args(Who)))
        case "signal":
            again = draw.uniform(0.2, 4) if draw.random() < 0.25 else None
            disturbance = Send(draw.choice(SIGNALS), draw.choice(get_args(Who)), again)
        case "damage":
            disturbance = _draw_hurt(draw)
    damages = draw.choices((0, 1, 2), (4, 4, 2))[0]
    return Command(step, delay_s, disturbance, tuple(_draw_hurt(draw) for _ in range(damages)))


def _draw_hurt(draw: random.Random) -> Hurt:
    file = draw.choice(FILES)
    is_folder = file == "checkpoints" or file.endswith(("newest", "oldest"))
    ways: tuple[How, ...] = ("delete", "directory") if is_folder else get_args(How)
    return Hurt(draw.choice(ways), file, draw.random())


def find(out: Path, file: str) -> Path | None:
    """Look up a name of FILES; None where what it leads to is not there. A plain name need not be."""
    if "*" not in file:
        return out / file
    pattern, _, rest = file.partition(" ")
    found = sorted(out.glob(pattern))
    if rest:
        which, _, inside = rest.partition("/")
        found = found[-1:] if which == "newest" else found[:1]
        found = sorted(found[0].glob(inside)) if found and inside else found
    return found[0] if found else None


def hurt(out: Path, damage: Hurt) -> Path | None:
    """Do the damage; what was hurt, or None where there was nothing to hurt."""
    path = find(out, damage.file)
    if path is None or not out.is_dir():
        return None
    with suppress(OSError):  # it is being replaced just now
        match damage.how:
            case "delete":
                _remove(path)
            case "directory":
                _remove(path)
                path.mkdir(parents=True)
            case "truncate" | "flip" if path.is_file():
                _spoil(path, damage)
            case _:
                return None
    return path


def _spoil(path: Path, damage: Hurt) -> None:
    with path.open("r+b") as file:
        size = path.stat().st_size
        at = int(damage.part * size)
        if damage.how == "truncate":
            file.truncate(at)
        elif size:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 0x80]))  # no other text, but none at all: nobody could know that it was another


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
