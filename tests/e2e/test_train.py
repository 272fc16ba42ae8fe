"""`imagenet-fast train`, from the command line to what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torchvision.models import alexnet, resnet18

from imagenet_fast.checkpoint import newest
from imagenet_fast.cli.main import main
from imagenet_fast.data.loaders import build_loaders
from imagenet_fast.distributed.network_interfaces import Endpoint
from imagenet_fast.distributed.rank_info import TORCHRUN
from imagenet_fast.errors import UserError
from imagenet_fast.launch.rendezvous import meet
from imagenet_fast.metrics import RunResult
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.job import Job, read_job
from imagenet_fast.training.precision import autocast
from tests.e2e.command import COMMAND, environment, events_of, imagenet_fast, outcome_of, wait_for

SMOKE = ("train", "--recipe", "smoke")
IN_SMALL = (
    "--set", "global_batch=8", "--set", "micro_batch=2", "--set", "data.train_images=64", "--set", "data.val_images=15",
)  # fmt: skip
"""As many steps as shipped, of a quarter of the images."""
ONE_EPOCH = ("--set", "epochs=1", "--set", "schedule.warmup_epochs=0")


def on(images: Path) -> tuple[str, ...]:
    return ("--data", str(images), "--set", "global_batch=16", "--set", "micro_batch=8")


@pytest.fixture
def launched(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], own_signals: None
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line with its launcher in this process, which has imported torch already; the exit code, and
    what launcher and ranks have printed and complained of."""

    def launched(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["imagenet-fast", *arguments])
        for key, value in (("OMP_NUM_THREADS", "1"), ("TORCH_CPP_LOG_LEVEL", "FATAL")):
            monkeypatch.setenv(key, value)
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capfd.readouterr()

    return launched


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run = tmp_path_factory.mktemp("runs") / "smoke"
    done = imagenet_fast(*SMOKE, *IN_SMALL, "--out", str(run), "--seed", "5", "--trace")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return run, done.stdout


def test_it_launches_its_own_ranks_and_says_how_it_went(smoke_run: tuple[Path, str]):
    run, printed = smoke_run
    assert "recipe written for 2 ranks: 2 ranks, micro-batch 2, 2 accumulation steps\n" in printed
    assert "Trained to the end; the recipe has no target." in printed
    assert f"tensorboard --logdir {run}" in printed
    outcome = outcome_of(run)
    assert outcome["status"] == "finished"
    assert (outcome["world_size"], outcome["global_batch"], outcome["epochs"], outcome["steps"]) == (2, 8, 2, 16)
    assert outcome["sent_bytes_per_step"] == pytest.approx(2 * 11_181_642, rel=1e-3)  # bf16, two ranks
    assert 0 < outcome["train_s"] < outcome["run_s"]


def test_the_run_directory_is_complete(smoke_run: tuple[Path, str]):
    run, _ = smoke_run
    (curves,) = run.glob("events.out.tfevents.*")
    assert {p.name for p in run.iterdir()} - {curves.name} == {
        "job.json", "recipe.toml", "environment.json", "events.jsonl", "mllog.txt", "checkpoints", "outcome.json",
        "trace.json",
    }  # fmt: skip
    assert "seed = 5\n" in (run / "recipe.toml").read_text()
    assert len(json.loads((run / "trace.json").read_text())["traceEvents"]) > 5 * 2 * 41  # steps, phases, layers
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"].startswith("2.")
    assert json.loads((run / "environment.json").read_text())["backend"] == "ProcessGroupGloo"
    evaluations = events_of(run, "eval")
    assert [e["images"] for e in evaluations] == [15, 15]
    assert len(events_of(run, "train")) == 4
    weights = load_file(run / "checkpoints" / "final.safetensors")
    resnet18(num_classes=10).load_state_dict(weights)


def test_torchrun_is_reproducible_and_exits_with_3(smoke_run: tuple[Path, str], tmp_path: Path):
    run, again = smoke_run[0], tmp_path / "again"
    options = ("--set", "target_top1=99.9", "--out", str(again), "--seed", "5", "--nproc", "8", "--max-restarts", "1")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--module", "--")
    done = subprocess.run(
        [*torchrun, "imagenet_fast", *SMOKE, *IN_SMALL, *options],
        capture_output=True, text=True, check=False, timeout=240, env=environment(),
    )  # fmt: skip
    assert done.returncode == 1, "torchrun flattens every exit code to 1"
    assert "exitcode  : 3" in done.stderr
    idle = "warning: --nproc and --max-restarts would start ranks, and torchrun or srun has started these"
    assert done.stderr.count(idle) == 1, "they are not ignored in silence"
    assert done.stdout.count("recipe written for 2 ranks: 2 ranks, micro-batch 2, 2 accumulation steps\n") == 1
    assert "Trained to the end without reaching 99.9 % top-1" in done.stdout
    assert outcome_of(again)["status"] == "finished"
    for name, values in (("train", ("loss", "lr")), ("eval", ("top1", "top5"))):
        assert [[e[v] for v in values] for e in events_of(run, name)] == [
            [e[v] for v in values] for e in events_of(again, name)
        ]
    first, second = (load_file(r / "checkpoints" / "final.safetensors") for r in (run, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_launcher_with_fewer_ranks_keeps_the_exit_code(
    image_dir: Path, tmp_path: Path, launched: Callable[..., tuple[int, str, str]]
):
    run = tmp_path / "run"
    options = (*on(image_dir), *ONE_EPOCH, "--sync", "allreduce", "--nproc", "1", "--scale-batch", "--out", str(run))
    code, printed, errors = launched("train", "--recipe", "demo", *options)
    assert (code, errors) == (3, ""), printed
    assert "recipe written for 2 ranks: 1 rank, micro-batch 8, " in printed
    assert "batch 16 -> 8, lr 3 -> 2.121 (square-root scaling)" in printed
    assert "global_batch = 8\n" in (run / "recipe.toml").read_text()
    assert next(e["images"] for e in events_of(run, "eval")) == 7
    assert outcome_of(run)["sync"] == "allreduce"


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (("parallel.tensor=2",), "micro-batch 4, 1 accumulation step; parallel.tensor 2, data-parallel x 1\n"),
        pytest.param(
            ("parallel.pipeline=2", "parallel.micro_batches=2", "precision.kind=fp16", "ema_decay=0.5", "clip_norm=1"),
            "micro-batch 4, 1 accumulation step; parallel.pipeline 2, data-parallel x 1; 2 micro-batches under way ",
            marks=pytest.mark.ci,
        ),
    ],
)
def test_final_weights_of_a_divided_model_are_whole(
    layout: tuple[str, ...], said: str, tmp_path: Path, launched: Callable[..., tuple[int, str, str]]
):
    run = tmp_path / "run"
    changes = (
        "model.kind=alexnet", "data.image_size=63", "data.train_images=8", "data.val_images=21", "global_batch=8",
        "micro_batch=4", "precision.kind=fp32", *layout,
    )  # fmt: skip
    options = [option for change in changes for option in ("--set", change)]
    code, printed, errors = launched(*SMOKE, *ONE_EPOCH, *options, "--nproc", "2", "--out", str(run))
    assert (code, errors) == (0, ""), printed
    assert said in printed
    if layout == ("parallel.tensor=2",):
        convolutions, activations = 2_469_696 + 40_970, 4 * 2 * (9216 + 4096) * 4
        sent = 2 * convolutions + activations
        assert outcome_of(run)["sent_bytes_per_step"] == pytest.approx(sent, rel=0.01)
    job = read_job(run / "job.json", Job)
    model = alexnet(num_classes=10)
    model.load_state_dict(load_file(run / "checkpoints" / "final.safetensors"))
    images = build_loaders(job.recipe.data, None, Batching(1, 8, 1), 0, 2, torch.device("cpu"), job.recipe.seed)
    with torch.inference_mode(), autocast(job.recipe.precision, torch.device("cpu")):
        hits = sum(int((model.eval()(x).argmax(1) == y).sum()) for x, y in images.next_evaluation())
    assert events_of(run, "eval")[-1]["top1"] == pytest.approx(100 * hits / 21)


@pytest.mark.weekly
def test_the_smoke_recipe_runs_as_it_is_shipped(tmp_path: Path):
    run = tmp_path / "run"
    done = imagenet_fast(*SMOKE, "--out", str(run))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "recipe written for 2 ranks: 2 ranks, micro-batch 8, 2 accumulation steps\n" in done.stdout
    outcome = outcome_of(run)
    assert (outcome["world_size"], outcome["global_batch"], outcome["epochs"], outcome["steps"]) == (2, 32, 2, 16)
    assert [e["images"] for e in events_of(run, "eval")] == [63, 63]


@pytest.mark.weekly
def test_ctrl_c_saves_and_ends_every_rank(tmp_path: Path):
    runs = [tmp_path / "terminal", tmp_path / "launcher"]
    processes = [
        subprocess.Popen(
            [*COMMAND, *SMOKE, "--out", str(run), "--set", "epochs=1000", "--set", "log_every=1"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment(),
        )
        for run in runs
    ]  # fmt: skip
    for run in runs:
        wait_for(lambda run=run: (run / "events.jsonl").exists() and len(events_of(run, "train")) > 1)
    for run, process in zip(runs, processes, strict=True):
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) >= 2
        begun = time.monotonic()
        if run.name == "terminal":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=30)
        assert time.monotonic() - begun < 20
        assert process.returncode == 4
        assert "Traceback" not in errors
        outcome = outcome_of(run)
        step = f"Stopped by a signal after step {outcome['steps']}"
        assert f"{step}, and saved; the same train command with --resume {run} goes on." in printed
        assert outcome["status"] == "preempted"
        assert newest(run / "checkpoints").manifest.step == outcome["steps"] > 0
        assert events_of(run, "end")
        assert not any(rank.is_running() for rank in ranks)


@pytest.mark.weekly
def test_a_rank_that_dies_leaves_no_process_behind_and_a_readable_run(image_dir: Path, tmp_path: Path):
    run = tmp_path / "run"
    options = ("--set", "data.loader=folder", "--set", "epochs=1000000", "--out", str(run))
    process = subprocess.Popen(
        [*COMMAND, "train", "--recipe", "demo", *on(image_dir), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    wait_for(lambda: (run / "events.jsonl").exists() and events_of(run, "eval"))
    rank = _processes("-P", process.pid)[-1]
    assert _processes("-s", rank) == [rank], "its loaders are threads"
    os.kill(rank, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert outcome_of(run)["status"] == "failed"
    wait_for(lambda: not _processes("-s", rank), timeout_s=5)


def _processes(relation: str, of: int) -> list[int]:
    found = subprocess.run(["pgrep", relation, str(of)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


USAGE = [
    (("--recipe", "dmeo"), "no recipe 'dmeo'; did you mean demo?"),
    (("--recipe", "smoke", "--set", "optim.lrr=1"), "unknown key optim.lrr; did you mean optim.lr?"),
    (("--recipe", "smoke", "--set", "epochs=many"), 'epochs is "many"'),
    (("--recipe", "smoke", "--sync", "rng"), "sync.kind is 'rng'; it must be one of 'allreduce', 'ring', 'lazy'"),
    (("--recipe", "resnet50-1gpu"), "--data DIR"),
    (("--recipe", "resnet50-1gpu", "--data", "/nowhere"), "there is no data directory /nowhere"),
    (("--recipe", "smoke", "--data", "/my photos"), "--data /my photos would not be read: data.loader is 'synthetic'"),
    (("--recipe", "smoke", "--nproc", "3"), "does not divide over 3 ranks"),
    (("--recipe", "smoke", "--out", "/proc/run"), "cannot be written"),
    (("--recipe", "smoke", "--nodes", "2"), "needs --rdzv-endpoint"),
    (("--recipe", "smoke", "--rdzv-endpoint", "localhost:99999"), "is not HOST:PORT"),
]


@pytest.mark.parametrize(("arguments", "sentence"), USAGE, ids=[sentence for _, sentence in USAGE])
def test_bad_input_is_met_with_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    refusal: Callable[..., str],
):
    out = () if "--out" in arguments else ("--out", str(tmp_path / "run"))
    assert sentence in refusal("train", *arguments, *out)
    assert not (tmp_path / "run").exists(), "the directory is still free for a second try"


def test_errors_of_ranks_are_one_sentence(tmp_path: Path, launched: Callable[..., tuple[int, str, str]]):
    wrong = ("--set", "data.train_images=8", "--set", "target_top1=0.85", "--nproc", "1")
    code, printed, errors = launched(*SMOKE, *wrong, "--out", str(tmp_path / "run"))
    assert code == 2, printed + errors
    warning, error = errors.splitlines()
    assert warning == "warning: target_top1 is 0.85 %; did you mean 85?"
    assert re.fullmatch("error: .*fewer than one global batch.*", error)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("rank", "warnings"), [("0", 1), ("1", 0)])
def test_of_the_ranks_of_a_torchrun_the_first_alone_warns(
    rank: str, warnings: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for key, value in zip(TORCHRUN, (rank, "2", rank, "2"), strict=True):
        monkeypatch.setenv(key, value)
    trained = RunResult("finished", "smoke", "lazy", 2, 32)
    monkeypatch.setattr("imagenet_fast.launch.worker.run_worker", lambda job, place, join_timeout_s: trained)
    monkeypatch.setattr(sys, "argv", ["imagenet-fast", *SMOKE, "--set", "target_top1=0.85"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert capsys.readouterr().err.count("warning: ") == warnings


def test_indivisible_layout_is_refused_before_any_rank_starts(refusal: Callable[..., str]):
    layout = ("model.kind=alexnet", "data.image_size=63", "parallel.tensor=2")
    options = [option for change in layout for option in ("--set", change)]
    assert "needs a multiple of 2 ranks, and there are 3; give" in refusal(*SMOKE, *options, "--nproc", "3")


def test_a_second_run_into_the_same_directory_is_refused(smoke_run: tuple[Path, str], refusal: Callable[..., str]):
    assert "already holds a run" in refusal(*SMOKE, "--out", str(smoke_run[0]))


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use by another program; give every node"):
            meet(Endpoint("127.0.0.1", port), count=1, join_timeout_s=1)
