"""`imagenet-fast compare`: layouts by name, and its end after Ctrl-C. Whole comparisons are in e2e."""

from __future__ import annotations

import os
import signal
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imagenet_fast.cli.main import app
from imagenet_fast.compare.layouts import NamedLayout, laid_out, parse_layouts, refuse_axes
from imagenet_fast.launch.nodes import LaunchConfig
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import find_file
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.run.result import STOPPED
from tests.conftest import refusal_of


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(("asked", "saved"), [("--sync lazy,ring", True), ("--layout dp2,pp2", False)])
def test_after_ctrl_c_it_says_how_to_go_on_with_the_run_if_that_was_saved(
    asked: str, saved: bool, tmp_path: Path, monkeypatch
):
    started = []

    def launch(job: Job, nodes: LaunchConfig) -> int:
        started.append(job.folder)
        if not saved:
            os.kill(os.getpid(), signal.SIGINT)
        job.folder.mkdir(parents=True)
        (job.folder / "job.json").touch()
        return STOPPED

    monkeypatch.setattr("imagenet_fast.launch.launcher.launch", launch)
    out, first = tmp_path / "my runs", "lazy" if saved else "dp2"
    words = ("--recipe", "smoke", *asked.split(), "--nproc", "2", "--out", str(out))
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["compare", *words], catch_exceptions=False)
    assert done.exit_code == 1
    assert started == [out / first], "the other run is not begun"
    left = f"its partial results are in {out / first}" if saved else "it left nothing"
    assert f"{first} ended with exit code 4; {left}\n" in done.output
    assert (f"imagenet-fast train --resume '{out / first}' --nproc 2 goes on with it" in done.output) == saved
    assert ("every layout with the engine hybrid\n" in done.output) == ("layout" in asked)


ALEXNET, RESNET = find_file("recipe", "alexnet-8gpu"), find_file("recipe", "resnet50-8gpu")
WRONG = ("", "dp4,", "xx4", "4", "dp0", "dp-4", "dp4x", "dp2dp2", "DP4", "dp٤", "dp4;tp4", "tp 4", "dp" + "9" * 5000)


def laid(name: str, *overrides: str, ranks: int = 4, path: Path = ALEXNET) -> Recipe:
    (layout,) = parse_layouts(name, ranks)
    return laid_out(path, "hybrid", overrides, layout, ranks)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dp4", (1, 4, 1)), ("tp4", (1, 1, 4)), ("pp4", (4, 1, 1)), ("tp2dp2", (1, 2, 2)), ("pp2tp2", (2, 1, 2)),
        ("dp4tp1pp1", (1, 4, 1)), (" pp2dp2 ", (2, 2, 1)),
    ],
)  # fmt: skip
def test_the_parts_of_a_name_come_in_any_order(name: str, sizes: tuple[int, int, int]):
    assert parse_layouts(name, 4) == [NamedLayout("", *sizes)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *((name, "is not made of ppN, dpN and tpN") for name in WRONG),
        ("tp3", "tp3 is of 3 ranks, and there are 4; write for example dp4, or give --nproc 3"),
        ("tp2", "tp2 is of 2 ranks, and there are 4; write for example tp2dp2, or give --nproc 2"),
        ("tp1", "tp1 is of 1 rank, and there are 4; write for example tp1dp4"),
        ("dp4,tp2dp2,dp2tp2", "names dp2tp2 twice (tp2dp2 and dp2tp2 are the same)"),
    ],
)
def test_a_wrong_layout_gets_one_sentence_that_names_the_option(text: str, sentence: str):
    told = refusal_of(parse_layouts, text, 4)
    assert told.startswith(f"--layout {text}")
    assert sentence in told
    assert "\n" not in told


def test_a_recipe_is_laid_out_as_named_whatever_layout_it_has_itself(tmp_path: Path):
    sharded, staged = tmp_path / "sharded.toml", tmp_path / "staged.toml"
    sharded.write_text(f"{ALEXNET.read_text()}\n[parallel]\ntensor = 4\n")
    staged.write_text(f'{ALEXNET.read_text()}\n[parallel]\npipeline = 2\nmicro_batches = 8\nschedule = "gpipe"\n')
    for path in (ALEXNET, sharded, staged):
        assert laid("dp4", path=path).parallel == Parallel()
        assert laid("tp2dp2", path=path).parallel == Parallel(tensor=2)
    for path in (ALEXNET, sharded):
        assert laid("pp2dp2", path=path).parallel == Parallel(pipeline=2, micro_batches=4)
    assert laid("pp4", path=staged).parallel == Parallel(pipeline=4, micro_batches=8, schedule="gpipe")


def test_default_number_of_micro_batches():
    for stages, data, schedule in product((2, 3, 5, 8), (1, 3), ("gpipe", "1f1b", "interleaved")):
        ranks = stages * data
        asked = (f"reference_ranks={ranks}", f"global_batch={120 * ranks}", f"parallel.schedule={schedule}")
        recipe = laid(f"pp{stages}dp{data}", *asked, ranks=ranks, path=RESNET)
        assert split_batch(recipe, ranks).accumulation == 1
        assert max(4, stages) <= recipe.parallel.micro_batches <= 2 * max(4, stages)
    told = laid("pp2dp2", "parallel.micro_batches=1", "parallel.schedule=gpipe")
    assert told.parallel.micro_batches == 1, "the plain model parallelism of the sources"


def test_what_is_said_of_pipelines_is_for_layouts_that_have_one():
    layouts = parse_layouts("dp4,tp4,pp4", 4)
    refuse_axes(["parallel.micro_batches=16"], layouts)
    assert [laid(layout.name, "parallel.micro_batches=16").parallel.micro_batches for layout in layouts] == [1, 1, 16]
    told = refusal_of(refuse_axes, ["parallel.micro_batches=16"], layouts[:2])
    assert "--set parallel.micro_batches=16 is for pipelines, and --layout dp4,tp4 has" in told
    for override in ("parallel.tensor=2", "parallel={tensor=2}", " parallel.pipeline = 2"):
        assert "conflicts with --layout" in refusal_of(refuse_axes, [override], layouts)


def test_a_layout_that_recipe_and_engine_cannot_have_is_named_and_no_other_fault():
    for name, override, sentence in (
        ("tp4", "model={kind='resnet18'}", "alexnet-8gpu.toml: parallel.tensor 4 divides AlexNet's large"),
        ("pp4", "parallel.schedule=zb", "is \"zb\": input should be 'gpipe', '1f1b' or 'interleaved'"),
        ("pp2dp2", "global_batch=6", "global_batch 6 does not divide over the recipe's 8 ranks"),
    ):
        told = refusal_of(laid, name, override)
        assert told.startswith(f"--layout {name} with hybrid: ")
        assert sentence in told
    told = refusal_of(laid, "tp4", "optim.lrr=1")
    assert told == "alexnet-8gpu.toml: unknown key optim.lrr; did you mean optim.lr?"
