"""`eval`, `export` and `--init-from` take any checkpoint of a run: its best, its newest, that of a step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from imagenet_fast.checkpoint import CheckpointWriter, open_checkpoint
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.report import FINAL_WEIGHTS, split_checkpoint
from imagenet_fast.recipe.job import Job, read_job
from imagenet_fast.training.init_weights import chosen_checkpoint, given_weights
from tests.checkpoint.trees import ALONE, saved, stamp
from tests.e2e.command import events_of, imagenet_fast, in_process

SHORT = ("schedule.warmup_epochs=0", "checkpoint.every_steps=2", "checkpoint.keep=9", "data.train_images=96")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps an epoch, two epochs, on two ranks: evaluated after steps 3 and 6, saved after every second, too."""
    out = tmp_path_factory.mktemp("runs") / "run"
    settings = [word for setting in SHORT for word in ("--set", setting)]
    done = imagenet_fast("train", "--recipe", "smoke", *settings, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def test_the_checkpoint_after_the_last_evaluation_is_the_final_weights(trained: Path):
    final = load_file(trained / FINAL_WEIGHTS)
    for which in ("newest", "final"):
        found = given_weights(Path(f"{trained}@{which}"))
        assert found.tensors.keys() == final.keys()
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in final.items()), which


@pytest.mark.parametrize("which", ["newest", "latest", "step-6", "step-00000006", "6"])
def test_a_checkpoint_has_several_names(trained: Path, which: str):
    assert chosen_checkpoint(trained, which).folder == steps(trained)[-1]


def test_a_checkpoint_describes_its_weights_as_the_final_ones_are(trained: Path):
    final = given_weights(trained).about
    assert final.pop("recipe") == "smoke"
    saved = given_weights(Path(f"{trained}@step-2")).about
    assert json.loads(json.dumps(saved)) == final


def test_checkpoint_statistics_are_the_mean_of_the_ranks(trained: Path):
    checkpoint = open_checkpoint(trained / "checkpoints" / "step-00000002")
    first, second = (part["buffers"]["bn1.running_mean"] for _, part in checkpoint.parts())
    assert not torch.equal(first, second)
    found = given_weights(Path(f"{trained}@step-2")).tensors
    torch.testing.assert_close(found["bn1.running_mean"], (first + second) / 2)
    assert torch.equal(found["conv1.weight"], checkpoint.shared()["model"]["conv1.weight"])


def test_of_a_run_with_a_moving_average_that_is_taken(tmp_path: Path):
    shared = {"model": {"w": torch.zeros(2), "s": torch.zeros(1)}, "average": {"w": torch.ones(2), "s": torch.ones(1)}}
    own = {"buffers": {"s": torch.full((1,), 5.0)}, "average": {"s": torch.full((1,), 7.0)}}
    (tmp_path / "checkpoints").mkdir()
    with CheckpointWriter(tmp_path / "checkpoints", ALONE, keep=1) as writer:
        writer.save(stamp(3), shared, own)
    found = given_weights(Path(f"{tmp_path}@newest")).tensors
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"w": [1.0, 1.0], "s": [7.0]}


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path):
    saved(tmp_path / "checkpoints", 3)
    with pytest.raises(UserError, match="is a checkpoint of another version, or not of a training; give another"):
        given_weights(tmp_path / "checkpoints" / "step-00000003")


def test_the_best_is_that_with_the_highest_top_1(trained: Path):
    first, last = (event["top1"] for event in events_of(trained, "eval"))
    assert chosen_checkpoint(trained, "best").manifest.top1 == max(first, last)


def test_an_evaluation_of_a_checkpoint_says_what_training_said_of_it(trained: Path, tmp_path: Path):
    words = ("eval", "--weights", f"{trained}@step-3", "--nproc", "1", "--json", str(tmp_path / "v.json"))
    done = imagenet_fast(*words)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    verdict, said = json.loads((tmp_path / "v.json").read_text()), events_of(trained, "eval")[0]
    assert (verdict["top1"], verdict["top5"], verdict["recipe"]) == (said["top1"], said["top5"], "smoke")
    assert verdict["weights"] == str(trained / "checkpoints" / "step-00000003")


def test_a_checkpoint_is_exported_and_started_from(trained: Path, tmp_path: Path):
    out = tmp_path / "w.safetensors"
    in_process("export", "--weights", f"{trained}@step-2", "--out", str(out))
    written = load_file(out)
    expected = given_weights(Path(f"{trained}@2")).tensors
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    by_folder = tmp_path / "v.safetensors"
    in_process("export", "--weights", str(steps(trained)[0]), "--out", str(by_folder))
    assert by_folder.read_bytes() == out.read_bytes()
    in_process("export", "--weights", f"{trained}@best", "--format", "pt2", "--out", str(tmp_path / "p.pt2"))


def test_a_run_starts_from_a_checkpoint_and_records_which(trained: Path, tmp_path: Path):
    settings = [
        w
        for s in ("epochs=1", "schedule.warmup_epochs=0", "optim.lr=1e-30", "data.train_images=32")
        for w in ("--set", s)
    ]
    words = ("train", "--recipe", "smoke", *settings, "--nproc", "1", "--init-from", f"{trained}@step-2")
    done = imagenet_fast(*words, "--out", str(tmp_path / "next"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_job(tmp_path / "next" / "job.json", Job).init_from == Path(f"{trained}@step-2")
    final = load_file(tmp_path / "next" / FINAL_WEIGHTS)
    assert torch.equal(final["conv1.weight"], given_weights(Path(f"{trained}@step-2")).tensors["conv1.weight"])


def test_what_there_is_not_is_refused_with_what_there_is(trained: Path, tmp_path: Path, refusal: Callable[..., str]):
    def refused(given: str) -> str:
        return refusal("export", "--weights", given, "--out", str(tmp_path / "w.safetensors"))

    for wrong in ("step-5", "beste", "5", ""):
        said = refused(f"{trained}@{wrong}")
        assert f"{trained} has no checkpoint '{wrong}'" in said
        assert "; there are best, newest, final, step-2, step-3, step-4, step-6" in said
    assert f"there is no file {tmp_path}/none@best" in refused(f"{tmp_path}/none@best")

    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / FINAL_WEIGHTS).unlink()
    said = refused(str(run))
    assert f"{run} holds a run without checkpoints/final.safetensors" in said
    assert f"give one of its checkpoints, as {run}@newest" in said
    damaged = run / "checkpoints" / "step-00000006" / "shared.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert f"{damaged.parent} is damaged" in refused(f"{run}@step-6")
    for folder in steps(run):
        shutil.rmtree(folder)
    assert f"{run} has no checkpoint 'best'; it holds none" in refused(f"{run}@best")


def test_a_run_that_was_never_evaluated_has_no_best(trained: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for step in (3, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08}")
    with pytest.raises(UserError, match="none of its checkpoints was evaluated; there are newest, final, step-2"):
        given_weights(Path(f"{run}@best"))


def test_a_name_with_an_at_sign_is_itself_where_it_exists(tmp_path: Path):
    run = tmp_path / "me@home"
    run.mkdir()
    assert split_checkpoint(run) == (run, None)
    assert split_checkpoint(Path(f"{run}@best")) == (run, "best")
    assert split_checkpoint(Path(f"{run}/@best")) == (run, "best")
    (tmp_path / "me@home@best").write_text("")
    assert split_checkpoint(Path(f"{run}@best")) == (tmp_path / "me@home@best", None)
    assert split_checkpoint(tmp_path / "w@x" / "y.pth") == (tmp_path / "w@x" / "y.pth", None)
