"""Every command of the command line once, small and in process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from typer.main import get_command
from typer.testing import CliRunner

from imagenet_fast.bench import plan_validation
from imagenet_fast.cli.main import app
from imagenet_fast.compare import contest
from imagenet_fast.cost_model.layer_profile import save_profile
from imagenet_fast.distributed.ranks import rank_info_from_env
from imagenet_fast.recipe.job import DoctorJob, Job
from imagenet_fast.run.launcher_dir import LauncherDir
from tests.bench.small import SMALL
from tests.conftest import make_images
from tests.data.small import few_digits
from tests.e2e.command import Forked
from tests.ports import free_port
from tests.ranks import run

SMALL_NETWORK = (
    "--set model={kind='cifarnet',widths=[8,8,8]} --set precision.kind=fp32 --set global_batch=8 --set micro_batch=8 "
    "--set data.train_images=64 --set data.val_images=16"
)

TRAIN = ("train --recipe smoke --trace --out {out}/run " + SMALL_NETWORK, "epoch 2/2  step 16/16")
ON_RANKS = (
    ("eval --weights {run} --json {out}/eval.json", "top-1"),
    ("doctor --out {out} --json {out}/doctor.json", "ok"),
)
"""Commands that start ranks, and what they print."""

IN_PROCESS = (
    ("recipes", "alexnet-4host alexnet_bn sgd hybrid tp4 4 512 100 60.1 %"),
    ("recipes show smoke", 'loader = "synthetic"'),
    ("recipes keys checkpoint.k", "checkpoint.keep integer ≥ 0; default 1 Checkpoints to keep"),
    ("report {run} --png {out}/report.png --json {out}/report.json", "drawn to"),
    ("report {run} --reference", "mlcommons/logging"),
    ("timeline {run} --png {out}/timeline.png --json {out}/timeline.json", "drawn to"),
    ("export --weights {run} --out {out}/weights.safetensors", "written to"),
    ("compare --recipe smoke --sync lazy,ring --nproc 2 --out {out}/both --json {out}/both.json", "drawn to"),
    ("plan --recipe alexnet-512gpu --cluster dgx1 --sync lazy --json {out}/rows.json", "512 ranks, micro-batch 128"),
    ("plan fastest --cluster dgx-h100 --gpus 8 --json {out}/ways.json", "is the fastest"),
    ("plan validate --recipe alexnet-512gpu --sync lazy --json {out}/rows.json", "1.500 1.600"),
    ("launch slurm --recipe smoke --nodes 2", "#SBATCH --nodes=2"),
    ("launch k8s --recipe smoke --nodes 2 --image me/it --run-claim runs", '"kind": "JobSet"'),
    ("launch ssh --recipe smoke --hosts a,b", "ssh"),
    ("data fetch digits --out {out}/digits", "digits is in"),
    ("data prepare --source {images} --out {out}/prepared --subset --workers 1", "images"),
    ("data verify --data {images} --workers 1 --json {out}/found.json", "written to"),
    (
        "bench sync --model {small} --nodes 2 --sync lazy --rounds 1 --steps 1 --json {out}/rows.json "
        "--png {out}/a.png",
        "2 nodes",
    ),
    ("bench count --model {small} --sync lazy --ranks 2 --nproc 1", "nodes of 1 rank: counted"),
    (
        "bench collectives --nodes 2 --collectives native,ring --sizes 4KB --rounds 1 --seconds 0 --png {out}/a.png",
        "2 nodes, loopback",
    ),
    (
        "bench pipeline --stages 2 --micro-batches 2 --schedules gpipe --model resnet18 --image-size 32 --batch 4 "
        "--precision fp32 --sleep 0.001 --rounds 1 --device cpu --png {out}/a.png",
        "resnet18, 2 ranks in a pipeline",
    ),
    (
        "bench profile {out}/mine.json --model resnet18 --image-size 32 --batch 2,64 --precision fp32 --steps 1",
        "layers",
    ),
    (
        "bench data --data {images} --loaders threads,decoding --image-size 32 --batch 2 --workers 1 "
        "--seconds 0 --rounds 1 --png {out}/a.png",
        "decoding",
    ),
)

SLOW = ("plan rows --json {out}/rows.json", "measured between shaped hosts, nothing fitted: 60 rows")

IN_A_FORK = (
    (
        "bench step --precision fp32 --image-size 32 --batch 2 --rounds 1 --steps 1 --loader threads --workers 1",
        "threads alone",
    ),
)
"""Commands whose memory would stay with all later tests."""


def commands(command: Any, name: str = "") -> Iterator[str]:
    """The names of all commands."""
    inner = getattr(command, "commands", {})
    if not inner or (name and command.invoke_without_command):
        yield name
    for word, below in inner.items():
        if not below.hidden:
            yield from commands(below, f"{name} {word}".strip())


NAMES = frozenset(commands(get_command(app)))


def name_of(line: str) -> str:
    return max((name for name in NAMES if f"{line} ".startswith(f"{name} ")), key=len)


def filled(line: str, **places: Path) -> str:
    for name, place in places.items():
        line = line.replace(f"{{{name}}}", str(place))
    return line


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images"), train=6, val=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run."""
    line, part = TRAIN
    return checked_on_ranks(line, part, tmp_path_factory.mktemp("trained")) / "run"


def on_ranks(line: str, port: int) -> tuple[int, str]:
    """Run a command on ranks that torchrun has started; return its exit code and output.

    Its own launcher does nothing but to call what is to run on the ranks.
    """
    from imagenet_fast.launch import launcher, rank

    def run_ranks(job: DoctorJob, launcher_dir: LauncherDir, nodes: object) -> tuple[int, str]:
        place = rank_info_from_env()
        assert place is not None
        rank.examine_as_rank(job, place, 60.0, launcher_dir)
        return 0, ""

    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with patch.object(launcher, "run_ranks", run_ranks):
        done = CliRunner(env={"COLUMNS": "80"}).invoke(app, line.split(), catch_exceptions=False)
    return done.exit_code, done.output


def test_every_command_is_met_here():
    assert {name_of(line) for line, _ in (TRAIN, *ON_RANKS, *IN_PROCESS, SLOW, *IN_A_FORK)} == NAMES


@pytest.mark.parametrize(("line", "part"), ON_RANKS, ids=[name_of(line) for line, _ in ON_RANKS])
def test_on_two_ranks(line: str, part: str, tmp_path: Path, request: pytest.FixtureRequest):
    places = {"run": request.getfixturevalue("trained")} if "{run}" in line else {}
    checked_on_ranks(line, part, tmp_path, **places)


def checked_on_ranks(line: str, part: str, out: Path, **places: Path) -> Path:
    with free_port() as port:
        (code, printed), *_ = run(2, on_ranks, filled(line, **places, out=out), port, fresh=True)
    assert code == 0, printed
    assert part in printed
    return out


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("line", "part"),
    [*IN_PROCESS, pytest.param(*SLOW, marks=pytest.mark.ci)],
    ids=[name_of(line) for line, _ in (*IN_PROCESS, SLOW)],
)
def test_in_process(line: str, part: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch):
    places = {"out": tmp_path, "small": tmp_path / "small.json"}
    if "{images}" in line:
        places["images"] = request.getfixturevalue("images")
    if "{run}" in line or line.startswith("compare"):
        places["run"] = request.getfixturevalue("trained")
    save_profile(SMALL, places["small"])

    def train(job: Job, _: object) -> int:
        shutil.copytree(places["run"], job.folder)
        return 0

    few_digits(monkeypatch)
    if line.startswith("plan validate"):  # as root it would measure between four hosts
        time = SimpleNamespace(compute_s=1.4, predicted_s=1.5, step_s=1.6)
        monkeypatch.setattr(plan_validation, "bench_sync", lambda *_, **__: [time])
    monkeypatch.setattr(contest, "_train", train)
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, filled(line, **places).split(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert part in " ".join(done.output.split())
    assert all(path.stat().st_size for path in tmp_path.iterdir() if path.is_file())


@pytest.mark.usefixtures("subprocesses")
@pytest.mark.parametrize(("line", "part"), IN_A_FORK, ids=[name_of(line) for line, _ in IN_A_FORK])
def test_in_a_fork(line: str, part: str, tmp_path: Path):
    code, printed, said = Forked(tmp_path, *line.split()).ended()
    assert code == 0, said
    assert part in printed
