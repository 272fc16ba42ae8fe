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
Form = Literal["auto", "run", "fresh"]
"""``auto``: the recipe and ``--resume auto``; ``run``: ``--resume DIR`` alone; ``fresh``: no ``--resume``."""
How = Literal["truncate", "delete", "flip", "directory"]

STEPS = 10
JOB = (
    "--recipe", "smoke", "--nproc", "2",
    *setting("global_batch=4", "micro_batch=2", "epochs=2", "schedule.warmup_epochs=0", "data.train_images=20"),
    *setting("data.val_images=4", "log_every=1", "checkpoint.every_steps=3", "precision.kind=fp32", "optim.lr=0.01"),
)  # fmt: skip
"""Five steps an epoch, an evaluation after each; about nine seconds on two cores, of which training takes three."""
THREE_RANKS = ("--nproc", "3", *setting("ranks=3", "global_batch=6", "data.train_images=30"))
SETTINGS = {
    "lazy": "", "hybrid": "", "dear": "", "lazy int8": "sync.wire=int8", "lazy, average": "ema_decay=0.9",
    "allreduce": "", "ring": "", "ddp": "", "auto": "sync.wire=fp32", "powersgd": "",
    "sparse": "sync.dense_epochs=0.2 sync.ramp_epochs=0.2", "lazy fp16": "sync.wire=fp16",
    "hybrid int8": "sync.wire=int8", "dear int8": "sync.wire=int8", "ring fp8": "sync.wire=fp8",
    "hybrid, three ranks": "sync.fuse_mb=1", "lazy int8, three ranks": "sync.wire=int8",
    "sparse, three ranks": "sync.dense_epochs=0.2", "folder": "", "dali": "",
}  # fmt: skip
"""What is trained, and what that changes of the recipe. The first word is an engine; or a loader, whose recipe is of
image files.

Whichever engine ``auto`` chooses, two ranks add the same numbers.
"""
OF_IMAGES = """
ranks = 2
global_batch = 4
epochs = 2
log_every = 1
checkpoint = {{ every_steps = 3 }}
model = {{ kind = "resnet18" }}
data = {{ dataset = "digits", loader = "{loader}", image_size = 32, resize = 36 }}
precision = {{ kind = "fp32" }}
optim = {{ kind = "sgd", lr = 0.05, weight_decay = 1e-4 }}
schedule = {{ kind = "cosine" }}
sync = {{ kind = "lazy" }}
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
class Second:
    """Another launch into the same directory, while the first is at work."""

    form: Form


@dataclass(frozen=True)
class Hurt:
    """Damage to one file or directory of the run."""

    how: How
    file: str
    part: float
    """Where in the file, as a share of its length."""


Disturbance = Send | Second | Hurt


@dataclass(frozen=True)
class Command:
    """One launch, and what happens to it ``delay_s`` after ``step`` was recorded; step 0: after it was started."""

    form: Form
    step: int
    delay_s: float
    disturbance: Disturbance | None
    hurry: bool
    """Whether what follows is done although ranks may be left."""
    afterwards: tuple[Hurt, ...]
    """Done to the run once the command has ended."""


@dataclass(frozen=True)
class Program:
    seed: str
    setting: str
    commands: tuple[Command, ...]
    again: bool
    """Whether the run is resumed once more when it has ended."""


def draw_program(seed: str, kills: bool = False) -> Program:
    """Draw one to three launches and what happens to them; the same for the same seed.

    With ``kills``, one launch is killed, half of the time as it saves, and settings come in turn by the seed's number.
    """
    draw = random.Random(seed)
    if kills:
        step = draw.randrange(3, STEPS, 3) if draw.random() < 0.5 else draw.randint(1, STEPS - 2)
        killed = Command(
            "auto", step, draw.uniform(0, 1.0), Send(signal.SIGKILL, draw.choice(get_args(Who))), False, ()
        )
        return Program(f"kills {seed}", list(SETTINGS)[int(seed.split("/")[1]) % len(SETTINGS)], (killed,), again=False)
    setting = draw.choice(list(SETTINGS))
    count = draw.choices((1, 2, 3), (5, 4, 1))[0]
    commands = tuple(_draw_command(draw, first=number == 0) for number in range(count))
    return Program(seed, setting, commands, draw.random() < 0.25)


def _draw_command(draw: random.Random, first: bool) -> Command:
    form: Form = "auto" if first or draw.random() < 0.6 else "run"
    step, delay_s = draw.randint(1, STEPS), draw.uniform(0, 0.4)
    match draw.choices(("start", "evaluation", "saving", "anywhere"), (4, 2, 2, 3))[0]:
        case "start":
            step, delay_s = 0, draw.uniform(0.2, 6)
        case "evaluation":
            step = draw.choice((STEPS // 2, STEPS))
        case "saving":
            step = draw.randrange(3, STEPS, 3)
    disturbance: Disturbance | None = None
    match draw.choices(("kill", "signal", "second", "damage", "nothing"), (4, 6, 3, 3, 1))[0]:
        case "kill":
            disturbance = Send(signal.SIGKILL, draw.choice(get_args(Who)))
        case "signal":
            again = draw.uniform(0.2, 4) if draw.random() < 0.25 else None
            disturbance = Send(draw.choice(SIGNALS), draw.choice(get_args(Who)), again)
        case "second":
            disturbance = Second(draw.choice(get_args(Form)))
        case "damage":
            disturbance = _draw_hurt(draw)
    damages = draw.choices((0, 1, 2), (4, 4, 2))[0]
    hurry = isinstance(disturbance, Send) and disturbance.number == signal.SIGKILL and draw.random() < 0.5
    return Command(form, step, delay_s, disturbance, hurry, tuple(_draw_hurt(draw) for _ in range(damages)))


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
