"""What every test starts from: one thread, two tables of recipe, a small data set of images.

The process that hands tests out to others loads this, too; so torch is imported by what needs it.
"""

from __future__ import annotations

import io
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import typer.main
import typer.testing
from PIL import Image

from imagenet_fast.cli.main import main
from imagenet_fast.distributed.cores import freeze_gc
from imagenet_fast.errors import UserError
from imagenet_fast.netlab.forks import start_fork_server
from tests.root import require_root

if TYPE_CHECKING:
    from tests.guard import Cost

COST: pytest.StashKey[Cost] = pytest.StashKey()

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)  # the last one torchrun's

for _number in (*STOPPING, signal.SIGCHLD):  # before anything is started, which would inherit it
    if signal.getsignal(_number) is signal.SIG_IGN:  # by a shell in the background, nohup or a CI runner
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())

# To make all commands of the application takes longer than most of what tests ask of one of them.
typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)


def pytest_collection() -> None:
    """Begin with the imports of all ranks while tests are collected."""
    start_fork_server("tests.forked")
    import matplotlib.font_manager  # noqa: F401  (starts a process where no fonts have been listed yet)
    import torch

    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Keep what has been imported and collected out of the collections that tests ask for."""
    freeze_gc()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    from tests.guard import counting

    with counting() as item.stash[COST]:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test of the first tier that starts a process undeclared, and warn of one that is not quick."""
    result = yield
    if {"ci", "weekly", "gpu"}.isdisjoint(mark.name for mark in item.iter_markers()):
        if objection := item.stash[COST].objection(item.fixturenames):
            pytest.fail(objection, pytrace=False)
        if doubt := item.stash[COST].doubt():
            item.warn(pytest.PytestWarning(doubt))
    return result


@pytest.fixture
def subprocesses() -> None:
    """Asked for by tests of the first tier that start processes: so that there are few."""


def tiers(first: Sequence[Any], every: Iterable[Any]) -> list[Any]:
    """Every case, of which the first tier has some, and `ci` the others. A case is a value or a tuple of them."""
    others = [case if isinstance(case, tuple) else (case,) for case in every if case not in first]
    return [*first, *(pytest.param(*case, marks=pytest.mark.ci) for case in others)]


def tables(**changes: Any) -> dict[str, Any]:
    """A small valid recipe as TOML would give it; ``optim__lr=1`` changes one key of a table."""
    recipe: dict[str, Any] = {
        "reference_ranks": 2, "global_batch": 16, "epochs": 2, "log_every": 1, "model": {"kind": "resnet18"},
        "data": {"loader": "synthetic", "image_size": 32, "classes": 10, "train_images": 64, "val_images": 21},
        "precision": {"kind": "fp32"}, "optim": {"kind": "sgd", "lr": 0.1, "weight_decay": 1e-4},
        "schedule": {"kind": "cosine"}, "sync": {"kind": "lazy", "wire": "fp32", "threshold_mb": 1},
    }  # fmt: skip
    for key, value in changes.items():
        *folder, leaf = key.split("__")
        (recipe[folder[0]] if folder else recipe)[leaf] = value
    return recipe


@pytest.fixture(scope="session")
def root() -> None:
    """Asked for by tests that need root: they are skipped for other users, and fail in CI."""
    require_root()


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command line in this process; the one sentence on stderr with which it is refused, at exit code 2;
    nothing else is printed."""

    def refused(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["imagenet-fast", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        printed, said = capsys.readouterr()
        assert (end.value.code, printed) == (2, "")
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        return said

    return refused


def refusal_of(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """The sentence of the error with which a call is refused."""
    with pytest.raises(UserError) as error:
        call(*arguments, **named)
    return str(error.value)


def refuses(told: str, call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """The sentence with which a call is refused, in which this pattern is found."""
    sentence = refusal_of(call, *arguments, **named)
    assert re.search(told, sentence), sentence
    return sentence


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def own_signals() -> Iterator[None]:
    """For what answers signals in this process: afterwards it is pytest again that does."""
    answers = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, answer in answers.items():
        signal.signal(number, answer)


@pytest.fixture(scope="session")
def image_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 classes, 40 images to train on and 7 to validate."""
    return make_images(tmp_path_factory.mktemp("images"), train=40, val=7)


def make_images(root: Path, train: int, val: int) -> Path:
    """Smooth random JPEGs of several shapes."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            folder = root / split / f"class{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            blobs = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
            width, height = random.integers(70, 140, 2)
            blobs.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number:03}.jpg", quality=95)
    return root
