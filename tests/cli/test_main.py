"""Help and completion; errors, and what commands refuse before anything is started: with the cause and its fix."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

from imagenet_fast.cli.main import app, main
from imagenet_fast.distributed.ranks import TORCHRUN
from imagenet_fast.errors import UserError
from imagenet_fast.models.weights import write_weights
from imagenet_fast.recipe.load import find_file
from imagenet_fast.run.run_dir import new_folder
from tests.e2e.command import imagenet_fast


def test_an_error_of_a_path_is_a_sentence(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    for number in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES):
        error = OSError(number, os.strerror(number), "my/run")
        monkeypatch.setattr("imagenet_fast.metrics.past_run.read_run", Mock(side_effect=error))
        assert refusal("report", "my/run") == f"error: my/run: {error.strerror}; check the path\n"


def test_no_other_error_blames_a_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["imagenet-fast", "report", "my/run"])
    for number in (errno.EMFILE, errno.ENOSPC, errno.EROFS):
        error: OSError = OSError(number, os.strerror(number), "my/run")
        monkeypatch.setattr("imagenet_fast.metrics.past_run.read_run", Mock(side_effect=error))
        with pytest.raises(SystemExit) as end:
            main()
        assert (end.value.code, capsys.readouterr().err) == (1, f"error: my/run: {error.strerror}\n")
    for error in (
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        PermissionError(errno.EPERM, "Operation not permitted"),  # of a process or a socket
    ):
        monkeypatch.setattr("imagenet_fast.metrics.past_run.read_run", Mock(side_effect=error))
        with pytest.raises(type(error), match=str(error.strerror)):
            main()


@pytest.mark.usefixtures("subprocesses")
def test_help_needs_neither_torch_nor_pydantic():
    command = [sys.executable, "-X", "importtime", "-m", "imagenet_fast", "--help"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = {line.rpartition("|")[2].strip() for line in imported.stderr.splitlines()}
    assert "imagenet_fast.cli.main" in modules
    assert not modules & {"torch", "pydantic", "numpy", "rich.live"}
    for command in ("train", "eval", "export", "recipes", "plan", "report", "bench", "data", "launch"):
        assert command in imported.stdout


@pytest.mark.usefixtures("subprocesses")
@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("recipes keys optim", {"COLUMNS": "0", "LINES": "0"}),
        ("recipes keys optim", {"COLUMNS": "²", "LINES": "-1"}),
        ("recipes keys optim.LR", {"PYTHONOPTIMIZE": "2"}),
        ("recipes --help", {"COLUMNS": "9" * 12, "LINES": "³", "TERMINAL_WIDTH": "wide", "PYTHONOPTIMIZE": "2"}),
    ],
)
def test_no_variable_takes_away_what_is_printed(words: str, variables: dict[str, str]):
    """Neither a terminal without columns nor a Python without docstrings."""
    usual, hostile = imagenet_fast(*words.split(), COLUMNS="80"), imagenet_fast(*words.split(), **variables)
    assert usual.stdout + usual.stderr
    assert (hostile.stdout, hostile.stderr, hostile.returncode) == (usual.stdout, usual.stderr, usual.returncode)


def test_every_option_has_help_and_no_flag_an_opposite():
    def options(command: Any) -> Iterator[Any]:
        yield from command.get_params(Context(command))
        for inner in getattr(command, "commands", {}).values():
            yield from options(inner)

    for option in options(get_command(app)):
        assert option.help, option.name
        assert not option.secondary_opts, option.opts


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("be", "bench"),
        ("bench st", "step"),
        ("train --rec", "--recipe"),
        ("train --recipe resnet50-1g", "resnet50-1gpu"),
        ("compare --recipe smo", "smoke"),
        ("launch ssh --sync spa", "sparse"),
        ("data prepare --format web", "webdataset"),
        ("data fetch dig", "digits"),
    ],
)
def test_completion_names_commands_options_and_choices(words: str, completed: str):
    asked = {"_IMAGENET_FAST_COMPLETE": "complete_bash", "COMP_WORDS": f"imagenet-fast {words}"}
    runner = CliRunner(env=asked | {"COMP_CWORD": str(len(words.split()))})
    assert runner.invoke(app, prog_name="imagenet-fast").output.split() == [completed]


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("words", ["launch slurm --nodes 1", "compare --layout dp2 --nproc 2 --out {}/a"])
def test_a_wire_that_the_engine_does_not_send_is_warned_of_once(words: str, tmp_path: Path, monkeypatch, capsys):
    coded = tmp_path / "coded.toml"
    coded.write_text(find_file("recipe", "smoke").read_text().replace("[sync]", '[sync]\nwire = "int8"'))
    monkeypatch.setattr("imagenet_fast.compare.contest._train", lambda *_: 2)
    words += f" --recipe {coded} --sync ddp"
    monkeypatch.setattr(sys, "argv", ["imagenet-fast", *words.format(tmp_path).split()])
    with pytest.raises(SystemExit):
        main()
    told = "warning: --sync ddp does not send in int8, which sync.wire is; it sends in bf16\n"
    assert capsys.readouterr().err == told


REFUSED = {
    "train": [
        ("--recipe smoke optim.lrr=1", "unknown key optim.lrr; did you mean optim.lr?"),
        ("demo", "demo belongs to no option and is not KEY=VALUE, such as optim.lr=0.5; a recipe is given by"),
        ("--recipe smoke data.dali.host_padding_mb=1", "data.dali is for data.loader 'dali' or 'threads', not 'synth"),
        ("--recipe smoke --sync rng", "sync.kind is 'rng'; it must be one of 'allreduce', 'ring', 'lazy'"),
        ("--recipe resnet50-1gpu", "--data DIR"),
        ("--recipe resnet50-1gpu --data /nowhere", "there is no data directory /nowhere"),
        ("--recipe smoke --data /my/photos", "--data /my/photos would not be read: data.loader is 'synthetic'"),
        ("--recipe smoke --nproc 3", "does not divide over 3 ranks"),
        ("--recipe smoke --out /proc/run", "cannot be written"),
        ("--recipe smoke --nodes 2", "needs --rdzv-endpoint"),
        ("--recipe smoke --rdzv-endpoint localhost:99999", "is not HOST:PORT"),
        ("--recipe smoke --rdzv-endpoint a..b:29400", "a..b cannot be a host's name, since a part of it is empty or"),
        ("--recipe demo --out=", "--out is empty; name a directory"),
        ("--recipe smoke --on-bad-image skip", "data.on_bad_image"),
        ("--recipe smoke --fresh-head", "--fresh-head is for weights to start from; add --init-from FILE"),
    ],
    "eval": [
        ("--weights nowhere.pth", "there is no run or file nowhere.pth"),
        ("--weights nowhere.pth --recipe smoke --json /no/where", "there is no directory /no"),
        ("--weights w.pth --recipe smoke --on-bad-image skip", "data.on_bad_image"),
    ],
    "export": [
        ("--weights nowhere.pth --out w.safetensors", "there is no file nowhere.pth; give a file of"),
        ("--weights / --out w.safetensors", "/ is a directory without a run; give a file"),
        ("--weights x --out w.pth", "--out w.pth does not end in .safetensors, which"),
        ("--weights x --out /no/w.safetensors", "--out /no/w.safetensors: there is no directory /no"),
    ],
    "compare --recipe smoke": [
        ("--sync lazy ring.bucket_mb=1", "--set ring.bucket_mb=1 is for ring, which is not in --sync lazy"),
        ("--sync lazy --rate fast", "such as 250mbit"),
        ("--sync lazy --seeds one", "--seeds one is not a list of whole numbers; write for example 1,2,3"),
        ("--sync lazy --seeds 0,0", "--seeds 0,0 names 0 twice"),
        ("--layout dp2 --set parallel.tensor=2", "--set parallel.tensor=2 conflicts with --layout"),
    ],
    "launch slurm --recipe demo --nodes 2": [
        ("--set epochs=2 epochs=none", "epochs cannot be none, which is for keys that may be absent"),
        ("--set", "--set belongs to no option and is not KEY=VALUE"),
    ],
    "plan": [
        ("", "which recipe? add --recipe NAME; `plan fastest` finds the best"),
        ("--cluster dgx-h100 --fastest --cheapest", "`plan --fastest` is now `plan fastest`; write that"),
        ("rows --json /", "/ is a directory; name a file"),
    ],
    "plan validate": [("--recipe smoke --sync auto", "--sync auto becomes one of the others, and `plan` marks which")],
    "report": [("x --png /", "/ is a directory; name a file")],
}


@pytest.mark.parametrize("command", REFUSED)
def test_bad_input_is_met_with_one_sentence(command: str, tmp_path: Path, refusal: Callable[..., str]):
    for options, sentence in REFUSED[command]:
        starts = command.split()[0] in ("train", "compare") and "--out" not in options
        out = ("--out", str(tmp_path / "run")) if starts else ()
        assert sentence in refusal(*command.split(), *options.split(), *out), options
        assert not (tmp_path / "run").exists(), "the directory is still free for a second try"


def test_gpus_would_talk_past_shaped_links(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    said = refusal("compare", "--recipe", "smoke", "--rate", "1gbit")
    assert "--rate shapes links that GPUs of one node do not use" in said


def test_a_run_that_is_not_over_or_not_readable_is_named(tmp_path: Path, refusal: Callable[..., str]):
    (tmp_path / "job.json").write_text("{}")
    begun = refusal("export", "--weights", str(tmp_path), "--out", str(tmp_path / "w.safetensors"))
    assert f"{tmp_path} holds a run without checkpoints/final.safetensors, since it has not come to its end" in begun
    assert "job.json is damaged or of another version" in refusal("eval", "--weights", str(tmp_path))


def test_weights_of_no_run_need_a_recipe_and_fit_it(tmp_path: Path, refusal: Callable[..., str]):
    write_weights({"a.weight": torch.zeros(2)}, tmp_path / "w", {})
    export = ("export", "--weights", str(tmp_path / "w"), "--out", str(tmp_path / "o.safetensors"))
    assert "does not say by which recipe to use it" in refusal(*export)
    assert "conv1.weight is missing, bn1.weight is missing, " in refusal(*export, "--recipe", "smoke")


@pytest.mark.parametrize(("rank", "warnings"), [("0", 1), ("1", 0)])
def test_of_the_ranks_of_a_torchrun_the_first_alone_warns(rank: str, warnings: int, monkeypatch, capsys):
    for key, value in zip(TORCHRUN, (rank, "2", rank, "2"), strict=True):
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("imagenet_fast.launch.rank.train_as_rank", lambda *_, **named: 0)
    monkeypatch.setattr(sys, "argv", ["imagenet-fast", "train", "--recipe", "smoke", "--set", "target_top1=0.85"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert capsys.readouterr().err.count("warning: ") == warnings


def test_a_torchrun_that_may_restart_is_told_where_the_run_goes_on(monkeypatch, refusal: Callable[..., str]):
    """Each start would find another time, and so another directory, and begin at step 0."""
    for key, value in zip(TORCHRUN, ("0", "2", "0", "2"), strict=True):
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setattr("imagenet_fast.launch.rank.train_as_rank", Mock(side_effect=UserError("began")))
    train = ("train", "--recipe", "smoke")
    assert "torchrun's --max-restarts would begin a new run each time; add --out DIR" in refusal(*train)
    assert "began" in refusal(*train, "--out", "runs/a")


def test_two_runs_that_begin_at_once_have_two_directories():
    assert new_folder("smoke", "ring") != new_folder("smoke", "ring")


@pytest.mark.parametrize("word", ["--out=~/runs/a", "~/runs/a", "$HOME/runs/a", "--set=model.name=${HOME}/c"])
def test_what_no_shell_has_expanded_is_no_path(word: str, refusal: Callable[..., str]):
    """A shell leaves ``--out=~/a`` as it is, and a job that no shell starts a ``$HOME`` too."""
    assert refusal("report", word).startswith(f"error: {word}: no shell has expanded what it begins with; write the")


def test_a_working_directory_that_is_gone_is_said_to_be(tmp_path: Path, monkeypatch, refusal: Callable[..., str]):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the working directory cannot be used (No such file or directory); change to one that" in refusal("recipes")
