"""`imagenet-fast train`, from the command line to what it leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torchvision.models import alexnet, resnet18

from imagenet_fast.checkpoint import newest
from imagenet_fast.data.build import build_loaders
from imagenet_fast.distributed.ranks import TORCHRUN
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.job import Job, read_job
from tests.conftest import tiers
from tests.e2e.command import SMOKE, Forked, environment, events_of, outcome_of, setting, wait_for
from tests.ports import free_port

ONE_EPOCH = setting("epochs=1", "schedule.warmup_epochs=0")


@pytest.mark.usefixtures("subprocesses")
@pytest.mark.parametrize("launcher", tiers(["somebody else's"], ["ours"]))
def test_a_run_of_two_ranks_is_stopped_and_one_goes_on_with_it(launcher: str, tmp_path: Path):
    run = tmp_path / "run"
    tiny = setting(
        "model={kind='cifarnet', widths=[4, 4, 4]}", "precision.kind=fp32", "global_batch=4", "micro_batch=2",
        "data.train_images=400", "data.val_images=2", "log_every=1",
    )  # fmt: skip
    ranks = Forked(tmp_path, "train", "--recipe", "smoke", *tiny, "--out", str(run))
    wait_for(lambda: (run / "events.jsonl").exists() and bool(events_of(run, "train")))
    code, printed, said = ranks.ended(signal.SIGINT)
    assert (code, said) == (4, ""), printed
    outcome = outcome_of(run)
    assert (outcome["status"], outcome["world_size"]) == ("preempted", 2)
    saved = newest(run / "checkpoints")
    assert 0 < saved.manifest.step == outcome["steps"] < 200
    last = f"Stopped by a signal after step {outcome['steps']}, and saved"
    assert f"{last}; the same train command with --resume {run} goes on." in printed

    resume = ("train", "--resume", str(run))
    if launcher == "ours":
        code, printed, said = Forked(tmp_path, *resume, "--nproc", "1").ended()
    else:
        with free_port() as port:
            place = dict(zip(TORCHRUN, "0101", strict=True)) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            code, printed, said = Forked(tmp_path, *resume, **place).ended()
    assert (code, said) == (0, ""), printed
    outcome = outcome_of(run)
    assert (outcome["status"], outcome["steps"], outcome["resumed"], outcome["world_size"]) == ("finished", 200, 1, 1)
    assert [event["step"] for event in events_of(run, "resume")] == [saved.manifest.step]
    assert [event["step"] for event in events_of(run, "train")] == list(range(1, 201))


@pytest.mark.ci
def test_it_launches_its_own_ranks_and_says_how_it_went(smoke_run: Path):
    printed = (smoke_run.parent / "printed").read_text()
    split = "recipe written for 2 ranks: 2 ranks, micro-batch 2, 2 accumulation steps"
    assert f"{split}; starts from {smoke_run.parent / 'r.pth'} with a fresh last layer\n" in printed
    assert "Trained to the end; the recipe has no target." in printed
    assert f"tensorboard --logdir {smoke_run}" in printed
    outcome = outcome_of(smoke_run)
    assert outcome["status"] == "finished"
    assert (outcome["world_size"], outcome["global_batch"], outcome["epochs"], outcome["steps"]) == (2, 8, 2, 16)
    assert outcome["sent_bytes_per_step"] == pytest.approx(2 * 11_181_642, rel=1e-3)  # bf16, two ranks
    assert 0 < outcome["train_s"] < outcome["run_s"]


@pytest.mark.ci
def test_the_run_directory_is_complete(smoke_run: Path):
    (curves,) = smoke_run.glob("events.out.tfevents.*")
    assert {path.name for path in smoke_run.iterdir()} - {curves.name} == {
        "job.json", "recipe.toml", "environment.json", "events.jsonl", "checkpoints", "outcome.json",
        "trace.json",
    }  # fmt: skip
    assert "seed = 5\n" in (smoke_run / "recipe.toml").read_text()
    assert len(json.loads((smoke_run / "trace.json").read_text())["traceEvents"]) > 5 * 2 * 41  # steps, phases, layers
    there = json.loads((smoke_run / "environment.json").read_text())
    assert there["packages"]["torch"].startswith("2.")
    assert there["backend"] == "ProcessGroupGloo"
    assert "with a fresh last layer" in events_of(smoke_run, "run")[0]["note"]
    assert [event["images"] for event in events_of(smoke_run, "eval")] == [15, 15]
    assert len(events_of(smoke_run, "train")) == 4
    job = read_job(smoke_run / "job.json", Job)
    assert (job.init_from, job.fresh_head) == (smoke_run.parent / "r.pth", True)
    resnet18(num_classes=10).load_state_dict(load_file(smoke_run / "checkpoints" / "final.safetensors"))


@pytest.mark.ci
def test_torchrun_is_reproducible_and_exits_with_3(smoke_run: Path, tmp_path: Path):
    again = tmp_path / "again"
    options = ("--set", "target_top1=99.9", "--nproc", "8", "--max-restarts", "1", "--out", str(again))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--module", "--")
    done = subprocess.run(
        [*torchrun, "imagenet_fast", *SMOKE, "--init-from", str(smoke_run.parent / "r.pth"), *options],
        capture_output=True, text=True, check=False, timeout=240, env=environment(),
    )  # fmt: skip
    assert done.returncode == 1, "torchrun flattens every exit code to 1"
    assert "exitcode  : 3" in done.stderr
    idle = "warning: --nproc and --max-restarts would start ranks, and torchrun or srun has started these"
    assert done.stderr.count(idle) == 1, "they are not ignored in silence"
    assert done.stdout.count("recipe written for 2 ranks: 2 ranks, micro-batch 2, 2 accumulation steps; starts") == 1
    assert "Trained to the end without reaching 99.9 % top-1" in done.stdout
    assert outcome_of(again)["status"] == "finished"
    for name, values in (("train", ("loss", "lr")), ("eval", ("top1", "top5"))):
        first, second = ([[e[v] for v in values] for e in events_of(run, name)] for run in (smoke_run, again))
        assert first == second
    first, second = (load_file(run / "checkpoints" / "final.safetensors") for run in (smoke_run, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.ci
def test_fewer_ranks_train_with_a_scaled_batch_and_miss_the_target(image_dir: Path, tmp_path: Path):
    run = tmp_path / "run"
    options = (*ONE_EPOCH, *setting("global_batch=16", "micro_batch=8"), "--sync", "allreduce", "--scale-batch")
    demo = ("train", "--recipe", "demo", "--data", str(image_dir), "--nproc", "1", "--out", str(run))
    code, printed, said = Forked(tmp_path, *demo, *options).ended()
    assert (code, said) == (3, ""), printed
    assert "recipe written for 2 ranks: 1 rank, micro-batch 8, " in printed
    assert "batch 16 -> 8, lr 3 -> 2.121 (square-root scaling)" in printed
    assert "global_batch = 8\n" in (run / "recipe.toml").read_text()
    assert next(e["images"] for e in events_of(run, "eval")) == 7
    assert outcome_of(run)["sync"] == "allreduce"


@pytest.mark.ci
def test_weights_of_a_divided_model_are_whole(tmp_path: Path):
    run = tmp_path / "run"
    changes = setting(
        "model.kind=alexnet", "data.image_size=63", "data.train_images=8", "data.val_images=21", "global_batch=8",
        "micro_batch=4", "precision.kind=fp32", "parallel.tensor=2",
    )  # fmt: skip
    smoke = ("train", "--recipe", "smoke", *ONE_EPOCH)
    code, printed, said = Forked(tmp_path, *smoke, *changes, "--out", str(run)).ended()
    assert (code, said) == (0, ""), printed
    assert "micro-batch 4, 1 accumulation step; parallel.tensor 2, data-parallel x 1\n" in printed
    convolutions, activations = 2_469_696 + 40_970, 4 * 2 * (9216 + 4096) * 4
    assert outcome_of(run)["sent_bytes_per_step"] == pytest.approx(2 * convolutions + activations, rel=0.01)
    recipe = read_job(run / "job.json", Job).recipe
    model = alexnet(num_classes=10)
    model.load_state_dict(load_file(run / "checkpoints" / "final.safetensors"))
    images = build_loaders(recipe.data, None, Batching(1, 8, 1), 0, 2, torch.device("cpu"), recipe.seed)
    with torch.inference_mode():
        hits = sum(int((model.eval()(x).argmax(1) == y).sum()) for x, y in images.next_evaluation())
    assert events_of(run, "eval")[-1]["top1"] == pytest.approx(100 * hits / 21)


@pytest.mark.ci
def test_what_lies_in_the_working_directory_or_is_inherited_decides_nothing(tmp_path: Path):
    """A module of a standard name, another copy of this program, an operator's variables, a notebook's."""
    for name in ("random.py", "logging.py", "imagenet_fast/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('this one')")
    pets = {"PET_NO_PYTHON": "1", "PET_RUN_PATH": "1", "PET_ROLE": "other", "PET_LOG_DIR": str(tmp_path / "log")}
    env = environment(MPLBACKEND="module://nowhere", **pets)
    program = str(Path(sys.executable).with_name("imagenet-fast"))
    train = ("train", "--recipe", "smoke", "--nproc", "1", *setting("data.train_images=64", "global_batch=8"))
    for words in ((*train, "--out", "run"), ("report", "run", "--png", "run.png")):
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
        assert done.returncode in (0, 3), done.stdout + done.stderr
        assert not done.stderr
    assert (tmp_path / "run.png").is_file()
    assert not (tmp_path / "log").exists()
