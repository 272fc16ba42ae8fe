"""The weights of a run: evaluated again, started from, and exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models import alexnet, resnet18

import tests
from imagenet_fast.distributed.init import DistContext, computes_bf16
from imagenet_fast.errors import UserError
from imagenet_fast.launch.evaluate import EvalResult, judge
from imagenet_fast.metrics.report import FINAL_WEIGHTS
from imagenet_fast.models.export import ABOUT
from imagenet_fast.models.weights import describe, write_weights
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job, read_job
from imagenet_fast.recipe.load import load_recipe, parse_recipe
from imagenet_fast.training.init_weights import build_initial_model, load_initial_weights
from imagenet_fast.training.job_setup import plan_evaluation
from imagenet_fast.training.train_step import build_step
from tests.conftest import tables
from tests.e2e.command import events_of, imagenet_fast, in_process, outcome_of
from tests.ranks import run
from tests.training.jobs import train_job

ONE_EPOCH = ("--set", "epochs=1", "--set", "schedule.warmup_epochs=0")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """`smoke`, one epoch of it, on two ranks, from torchvision's weights for four classes; and what it printed."""
    folder = tmp_path_factory.mktemp("runs")
    torch.save(resnet18(num_classes=4).state_dict(), folder / "r.pth")
    options = ("--recipe", "smoke", *ONE_EPOCH, "--init-from", str(folder / "r.pth"), "--fresh-head")
    done = imagenet_fast("train", *options, "--out", str(folder / "smoke"))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return folder / "smoke", done.stdout


@pytest.fixture(scope="module")
def trained(started: tuple[Path, str]) -> Path:
    return started[0]


def test_what_a_run_started_from_is_on_its_record(started: tuple[Path, str]):
    folder, printed = started
    note = f"; starts from {folder.parent / 'r.pth'} with a fresh last layer"
    assert note in printed
    assert note in events_of(folder, "run")[0]["note"]
    job = read_job(folder / "job.json", Job)
    assert (job.init_from, job.fresh_head) == (folder.parent / "r.pth", True)


def test_three_ranks_judge_a_run_as_it_judged_itself_to_the_image(trained: Path, tmp_path: Path):
    before = sorted(path for path in trained.rglob("*"))
    done = imagenet_fast(
        "eval", "--weights", str(trained), "--nproc", "3", "--json", str(tmp_path / "v.json"),
        COLUMNS="80",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    verdict = json.loads((tmp_path / "v.json").read_text())
    said = events_of(trained, "eval")[-1]
    assert (verdict["top1"], verdict["top5"], verdict["images"]) == (said["top1"], said["top5"], 63)
    computed = "bf16" if computes_bf16(torch.device("cpu")) else "fp32"
    assert (verdict["recipe"], verdict["model"], verdict["precision"]) == ("smoke", "resnet18", computed)
    assert (verdict["world_size"], verdict["weights"]) == (3, str(trained / FINAL_WEIGHTS))
    header, row = done.stdout.splitlines()[-2:]
    assert header.split() == ["recipe", "model", "top-1", "%", "top-5", "%", "images", "img/s"]
    assert row.split()[:-1] == ["smoke", "resnet18", f"{said['top1']:.2f}", f"{said['top5']:.2f}", "63"]
    assert sorted(path for path in trained.rglob("*")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["v.json"]


def test_so_does_one_and_also_by_the_file_and_the_recipes_name(trained: Path):
    ways = [(trained, None), (trained / FINAL_WEIGHTS, "smoke")]
    ((by_run, by_file),) = run(1, _judged, ways, ())
    assert (by_run.top1, by_run.top5) == (outcome_of(trained)["top1"], outcome_of(trained)["top5"])
    assert (by_run.top1, by_run.top5, by_run.images) == (by_file.top1, by_file.top5, by_file.images)


def test_more_ranks_than_images_count_each_once(trained: Path):
    options = ("data.val_images=2",)
    ((alone,),) = run(1, _judged, [(trained, None)], options)
    for (verdict,) in run(3, _judged, [(trained, None)], options):
        assert (verdict.top1, verdict.top5, verdict.images) == (alone.top1, alone.top5, 2)


def _world() -> DistContext:
    return tests.world(dist.get_rank(), dist.get_world_size())


def _judged(ways: list[tuple[Path, str | None]], overrides: tuple[str, ...]) -> list[EvalResult]:
    return [
        judge(plan_evaluation(weights, named, overrides, dist.get_world_size()), _world()) for weights, named in ways
    ]


def test_eval_needs_validation_images_alone(image_dir: Path, tmp_path: Path):
    """Without a training split the classes are those of validation."""
    alone = tmp_path / "data"
    alone.mkdir()
    (alone / "val").symlink_to(image_dir / "val")
    network = resnet18(num_classes=3).eval()
    data = {"dataset": "digits", "loader": "folder", "image_size": 48, "resize": 56, "workers": 1}
    recipe = parse_recipe("test", tables(data=data))
    names = ["class0", "class1", "dog"]
    write_weights(network.state_dict(), tmp_path / "w.safetensors", describe("test", recipe, names))
    ((ours, both, said),) = run(1, _judged_images, tmp_path / "w.safetensors", [alone, image_dir])
    assert (ours.top1, ours.top5, ours.images) == (both.top1, both.top5, 7)
    assert said.count("was trained on other classes: on 'dog' where the data has 'class2'\n") == 2


def _judged_images(weights: Path, places: list[Path]) -> tuple[EvalResult, EvalResult, str]:
    options = ["data.loader=folder", "data.workers=1", "data.image_size=48", "data.resize=56"]
    with redirect_stderr(StringIO()) as said:
        first, second = (judge(plan_evaluation(weights, "demo", options, 1, data=p), _world()) for p in places)
    return first, second, said.getvalue()


def test_weights_of_other_classes_are_doubted_but_for_a_fresh_head(tmp_path: Path):
    file = tmp_path / "w.safetensors"
    names = ["cat", "cow", "dog"]
    write_weights(resnet18(num_classes=3).state_dict(), file, describe("test", parse_recipe("test", tables()), names))
    others = ["cat", "bee", "dog"]
    (said,) = run(1, _doubted, file, [(False, names), (False, []), (True, others), (False, others)])
    assert said[:3] == ["", "", ""]
    assert f"{file} was trained on other classes: on 'cow' where the data has 'bee'\n" in said[3]


def _doubted(file: Path, ways: list[tuple[bool, list[str]]]) -> list[str]:
    said, model = [], parse_recipe("test", tables()).model
    for fresh_head, names in ways:
        with redirect_stderr(StringIO()) as told:
            load_initial_weights(file, model, 3, _world(), fresh_head, names)
        said.append(told.getvalue())
    return said


def test_a_run_starts_from_weights_that_rank_0_alone_can_read(trained: Path, tmp_path: Path):
    """With a moving average, which starts there too; and with other classes only where a fresh head is asked for."""
    for found in run(2, _start, trained / FINAL_WEIGHTS, tmp_path):
        assert found == [
            "same",
            "average too",
            "10 classes apart, and the data has 4",
            "same but for the head",
            "trained",
        ]
    final, first = (load_file(place / FINAL_WEIGHTS) for place in (tmp_path / "run", trained))
    assert not torch.equal(final["conv1.weight"], first["conv1.weight"])


def _start(file: Path, folder: Path) -> list[str]:
    world, said = _world(), []
    given = file if world.is_main else Path("/nowhere")
    state = load_file(file)
    recipe = parse_recipe("test", tables(epochs=1, ema_decay=0.9))
    weights = load_initial_weights(given, recipe.model, 10, world)
    assert (weights is not None) is world.is_main

    def same(network: nn.Module, but: tuple[str, ...] = ()) -> bool:
        return all(torch.equal(t, state[n]) for n, t in network.state_dict().items() if n not in but)

    model = build_initial_model(recipe, 10, world, weights)
    said.append("same" if same(model) else "others")
    step = build_step(recipe, split_batch(recipe, 2), model, world, 4)
    average = step.state.average
    said.append("average too" if average is not None and same(average.module) else "not averaged")
    try:
        load_initial_weights(given, recipe.model, 4, world)
    except UserError as error:
        said.append(
            "10 classes apart, and the data has 4" if "10 classes apart, and the data has 4" in str(error) else ""
        )
    fresh = build_initial_model(recipe, 4, world, load_initial_weights(given, recipe.model, 4, world, fresh_head=True))
    head = ("fc.weight", "fc.bias")
    said.append("same but for the head" if same(fresh, head) and fresh.fc.weight.any() else "others")

    job = Job("test", recipe, split_batch(recipe, 2), None, folder / "run")
    outcome = train_job(job, world, weights)
    return [*said, "trained" if outcome.status == "finished" else outcome.status]


def test_weights_that_do_not_fit_are_refused(trained: Path, tmp_path: Path):
    options = ("--recipe", "smoke", "--set", "data.classes=4", "--init-from", str(trained))
    refused = imagenet_fast("train", *options, "--out", str(tmp_path / "run"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(
        f"error: {trained / FINAL_WEIGHTS} tells 10 classes apart, and the data has 4; give"
    )
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_exported_file_carries_what_is_known_and_nothing_is_overwritten(
    trained: Path, tmp_path: Path, refusal: Callable[..., str]
):
    out = tmp_path / "w.safetensors"
    assert f"written to {out}" in in_process("export", "--weights", str(trained), "--out", str(out))
    written, first = load_file(out), load_file(trained / FINAL_WEIGHTS)
    assert all(torch.equal(written[name], first[name]) for name in first)
    with safe_open(out, "pt") as opened:
        about = json.loads(opened.metadata()["imagenet_fast"])
    assert (about["recipe"], about["model"]["kind"], about["image_size"]) == ("smoke", "resnet18", 32)
    assert "already exists; give another --out" in refusal("export", "--weights", str(trained), "--out", str(out))
    assert all(torch.equal(load_file(out)[name], first[name]) for name in first)
    again = tmp_path / "again.safetensors"
    in_process("export", "--weights", str(out), "--out", str(again))
    assert again.read_bytes() == out.read_bytes(), "a file that says what it is need not be told again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.safetensors", "w.safetensors"]


def test_exported_program_gives_the_networks_results(trained: Path, tmp_path: Path, refusal: Callable[..., str]):
    out = tmp_path / "smoke.pt2"
    in_process("export", "--weights", str(trained), "--format", "pt2", "--out", str(out))
    _check_program(out, resnet18(num_classes=10), load_file(trained / FINAL_WEIGHTS), 32, "smoke")
    back = refusal("export", "--weights", str(out), "--out", str(tmp_path / "w.safetensors"))
    assert "smoke.pt2 is an archive without a state dict, as a .pt2 is, of which nothing is read; give" in back
    assert [path.name for path in tmp_path.iterdir()] == ["smoke.pt2"]


@pytest.mark.parametrize("kind", ["safetensors", "pt2"])
def test_where_nothing_can_be_written_that_is_said(kind: str, trained: Path, refusal: Callable[..., str]):
    options = ("--weights", str(trained), "--format", kind, "--out", f"/proc/w.{kind}")
    assert f"/proc/w.{kind} cannot be written (" in refusal("export", *options)


@pytest.mark.weekly
def test_so_does_that_of_an_alexnet_from_somebody_elses_file(tmp_path: Path):
    theirs, file, out = alexnet(num_classes=5), tmp_path / "w.pth", tmp_path / "a.pt2"
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}}, file)
    in_process("export", "--weights", str(file), "--recipe", "alexnet-1gpu", "--format", "pt2", "--out", str(out))
    _check_program(out, theirs, theirs.state_dict(), 224, "alexnet-1gpu")


def _check_program(file: Path, network: nn.Module, state: dict[str, Tensor], size: int, recipe: str) -> None:
    network.load_state_dict(state)
    extra: dict[str, Any] = {ABOUT: ""}
    program = torch.export.load(file, extra_files=extra).module()
    assert json.loads(extra[ABOUT])["recipe"] == recipe
    for images in (torch.randn(n, 3, size, size) for n in (1, 2, 5)):
        with torch.inference_mode():
            torch.testing.assert_close(program(images), network.eval()(images), rtol=1e-4, atol=1e-4)


USAGE = [
    (("eval", "--weights", "nowhere.pth", "--recipe", "smoke", "--data", "/d"), "--data /d would not be read"),
    (("eval", "--weights", "nowhere.pth"), "there is no run or file nowhere.pth"),
    (
        ("eval", "--weights", "nowhere.pth", "--recipe", "resnet50-1gpu", "--data", "/nowhere"),
        "no data directory /nowhere",
    ),
    (("eval", "--weights", "nowhere.pth", "--recipe", "smoke", "--json", "/no/where"), "there is no directory /no"),
    (("train", "--recipe", "smoke", "--fresh-head"), "--fresh-head is for weights to start from; add --init-from FILE"),
    (("export", "--weights", "nowhere.pth", "--out", "w.safetensors"), "there is no file nowhere.pth; give a file of"),
    (
        ("export", "--weights", "/", "--out", "w.safetensors"),
        "/ is a directory without a run; give one that `train` made",
    ),
    (("export", "--weights", "x", "--out", "w.pth"), "--out w.pth does not end in .safetensors, which"),
    (("export", "--weights", "x", "--out", "w.onnx", "--format", "onnx"), "there are safetensors and pt2"),
    (("export", "--weights", "x", "--out", "/no/w.safetensors"), "--out /no/w.safetensors: there is no directory /no"),
]


@pytest.mark.parametrize(("arguments", "sentence"), USAGE, ids=[sentence for _, sentence in USAGE])
def test_bad_input_is_met_with_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], sentence: str, refusal: Callable[..., str]
):
    assert sentence in refusal(*arguments)


def test_a_run_that_is_not_over_or_not_readable_is_named(trained: Path, tmp_path: Path, refusal: Callable[..., str]):
    (tmp_path / "job.json").write_text("{}")
    out = str(tmp_path / "w.safetensors")
    begun = refusal("export", "--weights", str(tmp_path), "--out", out)
    assert f"{tmp_path} holds a run without checkpoints/final.safetensors, since it has not come to its end" in begun
    assert "job.json is damaged or of another version" in refusal("eval", "--weights", str(tmp_path))


def test_weights_of_no_known_model_are_exported_by_nobody(tmp_path: Path, refusal: Callable[..., str]):
    write_weights({"a.weight": torch.zeros(2)}, tmp_path / "w", {})
    out = ("--out", str(tmp_path / "o.safetensors"))
    assert "fits none of our models" in refusal("export", "--weights", str(tmp_path / "w"), *out)
    assert "conv1.weight is missing, bn1.weight is missing, " in refusal(
        "export", "--weights", str(tmp_path / "w"), "--recipe", "smoke", *out
    )


def test_a_recipe_of_a_run_is_read_back_as_it_was(trained: Path):
    assert load_recipe(trained / "recipe.toml") == plan_evaluation(trained, None, (), 1).recipe
