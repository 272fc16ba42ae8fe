"""The weights of a run, its last ones or those of a checkpoint: evaluated again, started from, and exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models import resnet18

import tests
from imagenet_fast.checkpoint import CheckpointWriter, open_checkpoint
from imagenet_fast.launch.job_setup import plan_evaluation
from imagenet_fast.models import build_model
from imagenet_fast.models.export import ABOUT
from imagenet_fast.models.weights import describe, write_weights
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job, read_job
from imagenet_fast.recipe.load import load_recipe, parse_recipe
from imagenet_fast.run.run_dir import RunDir, split_checkpoint
from imagenet_fast.training import init_weights
from imagenet_fast.training.evaluation import EvalResult, evaluate_weights
from imagenet_fast.training.init_weights import chosen_checkpoint, given_weights, load_initial_weights
from imagenet_fast.training.training_step import build_step
from tests.checkpoint.trees import ALONE, stamp
from tests.conftest import refuses, tables
from tests.e2e.command import events_of, imagenet_fast, in_process, outcome_of, train_here
from tests.ranks import run, with_ranks
from tests.sync.loops import alike
from tests.training.jobs import job_of

ci = pytest.mark.ci


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


@ci
def test_the_checkpoint_after_the_last_evaluation_has_names_and_the_final_weights(smoke_run: Path):
    final = load_file(RunDir(smoke_run).final_weights)
    for which in ("newest", "step-16", "step-00000016"):
        assert chosen_checkpoint(RunDir(smoke_run).checkpoints, which).folder == steps(smoke_run)[-1]
        assert alike(given_weights(Path(f"{smoke_run}@{which}")).tensors, final)
    first, last = (event["top1"] for event in events_of(smoke_run, "eval"))
    assert chosen_checkpoint(RunDir(smoke_run).checkpoints, "best").manifest.top1 == max(first, last)


@ci
def test_a_checkpoint_describes_its_weights_as_the_final_ones_are_and_has_the_mean_of_the_statistics(smoke_run: Path):
    final = given_weights(smoke_run).about
    assert final.pop("recipe") == "smoke"
    given = given_weights(Path(f"{smoke_run}@step-6"))
    assert json.loads(json.dumps(given.about)) == final
    checkpoint = open_checkpoint(smoke_run / "checkpoints" / "step-00000006")
    first, second = (part["buffers"]["bn1.running_mean"] for _, part in checkpoint.parts())
    assert not torch.equal(first, second)
    found = given.tensors
    torch.testing.assert_close(found["bn1.running_mean"], (first + second) / 2)
    assert torch.equal(found["conv1.weight"], checkpoint.shared["model"]["conv1.weight"])


def test_of_a_run_with_a_moving_average_that_is_taken(tmp_path: Path):
    shared = {"model": {"w": torch.zeros(2), "s": torch.zeros(1)}, "average": {"w": torch.ones(2), "s": torch.ones(1)}}
    own = {"buffers": {"s": torch.full((1,), 5.0)}, "average": {"s": torch.full((1,), 7.0)}}
    (tmp_path / "checkpoints").mkdir()
    with CheckpointWriter(tmp_path / "checkpoints", ALONE, keep=2) as writer:
        writer.save(stamp(3), shared | {"recipe": tables(), "data": {"classes": []}}, own)
    found = given_weights(Path(f"{tmp_path}@step-3")).tensors
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"w": [1.0, 1.0], "s": [7.0]}


def test_a_name_with_an_at_sign_is_itself_where_it_exists(tmp_path: Path):
    run = tmp_path / "me@home"
    run.mkdir()
    assert split_checkpoint(run) == (run, None)
    assert split_checkpoint(Path(f"{run}@best")) == (run, "best")
    assert split_checkpoint(Path(f"{run}/@best")) == (run, "best")
    (tmp_path / "me@home@best").write_text("")
    assert split_checkpoint(Path(f"{run}@best")) == (tmp_path / "me@home@best", None)
    assert split_checkpoint(tmp_path / "w@x" / "y.pth") == (tmp_path / "w@x" / "y.pth", None)


@ci
def test_what_there_is_not_is_refused_with_what_there_is(smoke_run: Path, tmp_path: Path, refusal: Callable[..., str]):
    def refused(given: Path | str) -> str:
        return refusal("export", "--weights", str(given), "--out", str(tmp_path / "w.safetensors"))

    for wrong in ("step-5", "beste", "5", ""):
        said = refused(f"{smoke_run}@{wrong}")
        assert f"{smoke_run} has no checkpoint '{wrong}'" in said
        assert "; there are best, newest, step-6, step-8, step-12, step-16" in said

    run = tmp_path / "run"
    shutil.copytree(smoke_run, run)
    RunDir(run).final_weights.unlink()
    said = refused(run)
    assert f"{run} holds a run without checkpoints/final.safetensors" in said
    assert f"give one of its checkpoints, as {run}@newest" in said
    for step in (8, 16):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08}")
    assert "none of its checkpoints was evaluated; there are newest, step-6" in refused(f"{run}@best")
    for folder in steps(run):
        shutil.rmtree(folder)
    assert f"{run} has no checkpoint 'best'; it holds none" in refused(f"{run}@best")


@ci
def test_three_ranks_judge_a_run_as_it_judged_itself_to_the_image(smoke_run: Path, tmp_path: Path):
    before = sorted(smoke_run.rglob("*"))
    report = tmp_path / "v.json"
    done = imagenet_fast("eval", "--weights", str(smoke_run), "--nproc", "3", "--json", str(report), COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    verdict, said = json.loads(report.read_text()), events_of(smoke_run, "eval")[-1]
    assert (verdict["top1"], verdict["top5"], verdict["images"]) == (said["top1"], said["top5"], 15)
    assert (verdict["recipe"], verdict["model"], verdict["precision"]) == ("smoke", "resnet18", "fp32")
    assert (verdict["world_size"], verdict["weights"]) == (3, str(RunDir(smoke_run).final_weights))
    header, row = done.stdout.splitlines()[-2:]
    assert header.split() == ["recipe", "model", "top-1", "%", "top-5", "%", "images", "img/s"]
    assert row.split()[:-1] == ["smoke", "resnet18", f"{said['top1']:.2f}", f"{said['top5']:.2f}", "15"]
    assert sorted(smoke_run.rglob("*")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["v.json"]


@ci
def test_one_rank_judges_a_run_by_its_folder_its_file_and_its_checkpoints_alike(smoke_run: Path):
    assert load_recipe(smoke_run / "recipe.toml") == plan_evaluation(smoke_run, None, (), 1).recipe
    keys = ("precision.kind=fp32", "data.val_images=15", "seed=5")
    ways = [(smoke_run, None, ()), (RunDir(smoke_run).final_weights, "smoke", keys), (f"{smoke_run}@step-8", None, ())]
    (((by_run, by_file, by_step), _),) = run(1, _judged, [(Path(file), *more, None) for file, *more in ways])
    said, earlier = outcome_of(smoke_run), events_of(smoke_run, "eval")[0]
    assert (by_run.top1, by_run.top5, by_run.images) == (said["top1"], said["top5"], 15)
    assert (by_run.top1, by_run.top5, by_run.images) == (by_file.top1, by_file.top5, by_file.images)
    assert (by_step.top1, by_step.top5, by_step.recipe) == (earlier["top1"], earlier["top5"], "smoke")
    assert by_step.weights == str(smoke_run / "checkpoints" / "step-00000008")


def _judged(ways: Sequence[tuple[Path, str | None, Sequence[str], Path | None]]) -> tuple[list[EvalResult], str]:
    """The verdicts, and what was said to them."""
    world = tests.world()
    with redirect_stderr(StringIO()) as said:
        verdicts = [evaluate_weights(plan_evaluation(*way[:3], world.size, data=way[3]), world) for way in ways]
    return verdicts, said.getvalue()


def test_eval_needs_validation_images_alone(image_dir: Path, tmp_path: Path):
    """Without a training split the classes are those of validation."""
    alone, weights = tmp_path / "data", tmp_path / "w.safetensors"
    alone.mkdir()
    (alone / "val").symlink_to(image_dir / "val")
    write_tiny(weights, CLASSES)
    options = ("model={kind='cifarnet', widths=[4, 4, 4]}", "data.resize=40")
    places = [(weights, "demo", options, place) for place in (alone, image_dir)]
    (((ours, both), said),) = run(1, _judged, places, fresh=True)
    assert (ours.top1, ours.top5, ours.images) == (both.top1, both.top5, 7)
    assert not said


def test_eval_goes_by_the_names_of_classes(image_dir: Path, tmp_path: Path):
    """In another order, as folders of numbers have it that others sort as text, accuracy is the same."""
    orders = [CLASSES, CLASSES[::-1], ["cat", *CLASSES[1:]]]
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    torch.manual_seed(0)
    head = build_model(TINY.model, 3).state_dict()
    for file, names in zip(files, orders, strict=True):
        rows = torch.tensor([CLASSES.index(name) if name in CLASSES else 0 for name in names])
        tensors = {n: t.index_select(0, rows) if t.dim() == 2 and len(t) == 3 else t for n, t in head.items()}
        write_weights(tensors, file, describe("test", TINY, names))
    options = ("model={kind='cifarnet', widths=[4, 4, 4]}", "data.resize=40", "precision.kind=fp32")  # without ties
    (((as_here, other), said),) = run(1, _judged, [(f, "demo", options, image_dir) for f in files[:2]], fresh=True)
    assert (as_here.top1, as_here.top5) == (other.top1, other.top5)
    assert not said
    with pytest.raises(AssertionError, match="other classes: on 'cat' where the data has 'class0'; evaluate on images"):
        run(1, _judged, [(files[2], "demo", options, image_dir)], fresh=True)


NAMES, OTHERS, CLASSES = ["cat", "cow", "dog"], ["cat", "bee", "dog"], ["class0", "class1", "class2"]
TINY = parse_recipe("test", tables(model={"kind": "cifarnet", "widths": [4, 4, 4]}))


def write_tiny(file: Path, names: Sequence[str] = NAMES) -> None:
    """Weights for three classes with names."""
    write_weights(build_model(TINY.model, 3).state_dict(), file, describe("test", TINY, names))


@pytest.mark.parametrize("evaluates", [True, False])
@with_ranks(1)
def test_classes_whose_numbers_are_in_another_order_as_text_need_weights_with_names(tmp_path: Path, evaluates: bool):
    """Whatever stands around the numbers; names without any, or in an order of one's own, as of shards, do not."""
    write_tiny(nameless := tmp_path / "w.safetensors", [])
    for names, found in (
        (["0", "10", "2"], "'10' before '2'"), (["class_0", "class_11", "class_2"], "'class_11' before 'class_2'"),
        (["10 kind", "12 kind", "9 kind"], "before '9 kind'"), (["a", "b" + "7" * 5000, "b8"], "before 'b8'"),
        (["00", "02", "10"], ""), (CLASSES, ""), (["0", "2", "10"], ""), (["7up", "cat", "٣"], ""),
    ):  # fmt: skip
        arguments = (nameless, TINY.model, 3, tests.world(), False, names, evaluates)
        if found:
            refuses(f"names no classes, .*{found}", load_initial_weights, *arguments)
        else:
            load_initial_weights(*arguments)
    write_tiny(named := tmp_path / "named.safetensors", names := ["0", "10", "2"])
    load_initial_weights(named, TINY.model, 3, tests.world(), False, names, evaluates)


@with_ranks(1)
def test_weights_of_other_classes_are_doubted_but_for_a_fresh_head(tmp_path: Path):
    write_tiny(file := tmp_path / "w.safetensors")
    doubt = f"warning: {file} was trained on other classes: on 'cow' where the data has 'bee'\n"
    cases = ((False, NAMES, ""), (False, [], ""), (True, OTHERS, ""), (False, OTHERS, doubt))
    for fresh_head, names, expected in cases:
        with redirect_stderr(StringIO()) as told:
            load_initial_weights(file, TINY.model, 3, tests.world(), fresh_head, names)
        assert told.getvalue() == expected


@ci
@with_ranks(2, fresh=True)
def test_a_run_starts_from_a_checkpoint_and_records_which(smoke_run: Path, tmp_path: Path):
    """At a rate of nothing, at an ordinary one, and with too few classes."""
    start = Path(f"{smoke_run}@step-6")

    def trained(name: str, **changes: Any) -> Tensor:
        job = job_of(tmp_path / name, epochs=1, data__train_images=16, model={"kind": "resnet18"}, **changes)
        assert train_here(replace(job, init_from=start)).status == "finished"
        dist.barrier()
        return given_weights(tmp_path / name).tensors["conv1.weight"]

    begun = given_weights(start).tensors["conv1.weight"]
    assert torch.equal(trained("same", optim__lr=1e-30), begun)
    assert not torch.equal(trained("trained"), begun)
    assert read_job(tmp_path / "same" / "job.json", Job).init_from == start
    refuses(r"step-00000006 tells 10 classes apart, and the data has 4; give", trained, "four", data__classes=4)
    dist.barrier()
    assert not (tmp_path / "four").exists()


@ci
@with_ranks(2)
def test_weights_that_rank_0_alone_can_read_start_all_ranks_and_averages(smoke_run: Path):
    """With other classes only where a fresh head is asked for."""
    world, file = tests.world(), RunDir(smoke_run).final_weights
    given, state = file if world.is_main else Path("/nowhere"), load_file(file)
    recipe = parse_recipe("test", tables(ema_decay=0.9))

    def built(classes: int, fresh_head: bool = False) -> nn.Module:
        weights = load_initial_weights(given, recipe.model, classes, world, fresh_head)
        assert (weights is not None) is world.is_main
        return init_weights.build_initial_model(recipe, classes, world, weights)

    model = built(10)
    assert alike(model.state_dict(), state)
    step = build_step(recipe, split_batch(recipe, 2), model, world, 4)
    average = step.state.average
    assert alike(average.module.state_dict(), state)
    step.state.sync.close()
    fresh = built(4, fresh_head=True)
    assert fresh.fc.weight.any()
    fresh.fc = model.fc
    assert alike(fresh.state_dict(), state)


@ci
@pytest.mark.parametrize("by", ["run", "checkpoint"])
def test_an_exported_file_carries_what_is_known_and_nothing_is_overwritten(
    by: str, smoke_run: Path, tmp_path: Path, refusal: Callable[..., str]
):
    ways = {"run": smoke_run, "checkpoint": Path(f"{smoke_run}@step-6")}
    weights, out, again = ways[by], tmp_path / "w.safetensors", tmp_path / "again.safetensors"
    expected = given_weights(weights).tensors
    assert f"written to {out}" in in_process("export", "--weights", str(weights), "--out", str(out))
    with safe_open(out, "pt") as opened:
        about = json.loads(opened.metadata()["imagenet_fast"])
    assert (about["recipe"], about["model"]["kind"], about["image_size"]) == ("smoke", "resnet18", 32)
    assert "already exists; give another --out" in refusal("export", "--weights", str(weights), "--out", str(out))
    assert alike(load_file(out), expected)
    in_process("export", "--weights", str(out), "--recipe", "smoke", "--out", str(again))
    assert again.read_bytes() == out.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.safetensors", "w.safetensors"]


@ci
def test_an_exported_program_gives_the_networks_results(smoke_run: Path, tmp_path: Path, refusal: Callable[..., str]):
    best, out = f"{smoke_run}@best", tmp_path / "smoke.pt2"
    in_process("export", "--weights", best, "--format", "pt2", "--out", str(out))
    network, extra = resnet18(num_classes=10), {ABOUT: ""}
    network.load_state_dict(given_weights(Path(best)).tensors)
    program = torch.export.load(out, extra_files=extra).module()
    assert json.loads(extra[ABOUT])["recipe"] == "smoke"
    for images in (torch.randn(n, 3, 32, 32) for n in (1, 2, 5)):
        with torch.inference_mode():
            torch.testing.assert_close(program(images), network.eval()(images), rtol=1e-4, atol=1e-4)
    for kind in ("safetensors", "pt2"):
        options = ("--weights", str(smoke_run), "--format", kind, "--out", f"/proc/w.{kind}")
        assert f"/proc/w.{kind} cannot be written (" in refusal("export", *options)
    back = refusal("export", "--weights", str(out), "--out", str(tmp_path / "w.safetensors"))
    assert "smoke.pt2 is an archive without a state dict, as a .pt2 is, of which nothing is read; give" in back
    assert [path.name for path in tmp_path.iterdir()] == ["smoke.pt2"]
