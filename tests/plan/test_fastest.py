"""The fastest published training on a cluster: what is searched, refused, marked and written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from imagenet_fast.plan.cluster import Cluster, Input, Stragglers, load_cluster
from imagenet_fast.plan.devices import DEVICES, find_device
from imagenet_fast.plan.fastest import FEW_IMAGES, Way, fastest_ways, published_trainings, remarks
from imagenet_fast.plan.prediction import planned_engines, situation_of
from imagenet_fast.recipe.load import load_recipe
from scripts import results
from tests.conftest import refusal_of
from tests.plan.test_command import planned
from tests.plan.test_rows import PAGE

RESNET = published_trainings("resnet50")


def changed(name: str, **values: object) -> Cluster:
    return load_cluster(name, "published").model_copy(update=values)


def ways(cluster: str | Cluster, most: int) -> list[Way]:
    return fastest_ways(load_cluster(cluster, "published") if isinstance(cluster, str) else cluster, RESNET, most)[0]


@pytest.mark.ci
def test_every_published_training_has_an_exact_row_the_best_first():
    found = ways("dgx-h100", 64)
    assert sorted(way.training for way in found if way.exact) == sorted(training.name for training in RESNET)
    assert [way.minutes for way in found] == sorted(way.minutes for way in found)
    for way in found:
        assert way.gpus <= 64
        assert way.gpus <= 8 or way.gpus % 8 == 0
        assert way.global_batch % (way.gpus * way.micro_batch) == 0
        assert way.micro_batch >= FEW_IMAGES
        assert way.least <= way.minutes <= way.most
        assert way.gpu_hours == pytest.approx(way.gpus * way.minutes / 60)
    assert {way.engine.split()[0] for way in found} <= {"lazy", "hybrid", "dear", "ring"}, "ours within the error"


def test_epochs_are_the_mean_rounded_up_to_an_evaluation():
    by_name = {way.training: way.epochs for way in ways("dgx-h100", 8)}
    assert [by_name[name] for name in ("LARS 3264", "resnet50-8gpu", "resnet50-8gpu-mild")] == [36, 35, 27]
    for training in RESNET:
        assert training.recipe.evaluates_after(by_name[training.name])
        assert training.epochs[0] <= by_name[training.name] <= training.recipe.epochs


def test_the_settings_are_those_that_are_published():
    lars = {training.recipe.global_batch: training.recipe for training in RESNET if training.name.startswith("LARS")}
    assert len(lars) == 12
    recipe = lars[65536]
    assert (recipe.optim.lr, recipe.optim.momentum, recipe.optim.weight_decay) == (24.699, 0.951807, 1e-4)
    assert (recipe.schedule.warmup_epochs, recipe.epochs, recipe.label_smoothing) == (31, 91, 0.1)


def test_engines_that_are_not_exact_have_marked_rows_and_never_win():
    found = ways("cloud-25g", 32)
    assert not found[0].exact, "it sends half the bytes over a slow network"
    first = next(way for way in found if way.exact)
    assert (first.training, first.held_back_by) == (found[0].training, "network")
    assert "not published" in planned("fastest --cluster cloud-25g --pace published").output


def test_what_is_not_simulated_could_not_have_won_by_more_than_the_models_error():
    machine = load_cluster("cloud-25g", "published")
    engines = planned_engines("lazy,hybrid,dear,ring,ddp")
    for training in (known for known in RESNET if known.name in ("resnet50-8gpu-mild", "LARS 1632")):
        way = next(way for way in fastest_ways(machine, [training], 16)[0] if way.exact)
        for gpus in (4, 8, 16):
            written = training.recipe.model_copy(update={"reference_ranks": gpus, "micro_batch": 0})
            rows = situation_of(written, machine, gpus, "strong").rows(engines)
            least = min(row.train_s for row in rows) * way.epochs / training.recipe.epochs / 60
            assert way.minutes < 1.03 * least, "evaluations take less than 1 %"


def test_what_holds_back_is_named():
    unlimited = {way.training: way.held_back_by for way in ways("dgx-h100", 512)}
    assert unlimited["LARS 1632"] == "batch-norm span", "48 GPUs have 34 images each, and the others nothing"
    uneven = changed("dgx-h100", stragglers=Stragglers(sigma=(0.1, 0.1, 0.1)))
    assert {way.held_back_by for way in ways(uneven, 512) if way.training == "LARS 65536"} == {"stragglers"}
    assert {way.training: way.held_back_by for way in ways("cloud-25g", 32)}["LARS 65536"] == "memory"
    for name, gpus, meant in (
        ("dgx-h100", 512, "batch-norm span: norms would"),
        ("cloud-25g", 32, "memory: a GPU does"),
    ):
        assert meant in " ".join(remarks(load_cluster(name, "published"), ways(name, gpus), (), cheapest=False))
    mild = [training for training in RESNET if training.name == "resnet50-8gpu-mild"]
    fed_by = (changed("dgx-h100", input=Input(images_per_s=rate)) for rate in (None, 20000.0))
    (fed,), (starved,) = (fastest_ways(cluster, mild, 8)[0] for cluster in fed_by)
    assert (fed.held_back_by, starved.held_back_by) == ("compute", "input")
    assert starved.node_images_per_s <= 20001
    assert starved.minutes > fed.minutes


def test_where_dali_feeds_less_than_gpus_train_rows_wait_for_it():
    found = {way.training: way for way in fastest_ways(load_cluster("dgx-h100"), RESNET, 8)[0]}
    assert (found["resnet50-8gpu"].held_back_by, found["resnet50-8gpu"].node_images_per_s) == ("input", 8 * 3440)
    assert found["resnet50-8gpu-mild"].held_back_by != "input", "what stored pixels feed is not known"


def test_what_does_not_fit_is_left_out_by_its_cause(monkeypatch: pytest.MonkeyPatch):
    def holding(gb: float) -> Cluster:
        monkeypatch.setitem(DEVICES, "small", DEVICES["h100"].model_copy(update={"memory_gb": gb}))
        find_device.cache_clear()
        return changed("dgx-h100", device="small")

    for gb, images in ((2.5, 11), (1, 0)):
        told = refusal_of(ways, holding(gb), 8)
        assert told == f"LARS 1632 is left out: {gb:g} GB of a GPU hold {images} of its images, and norms need 32"
    found, left_out = fastest_ways(holding(3.3), RESNET, 8)
    assert {way.training for way in found} == {"resnet50-8gpu-mild"}, "its images are smaller"
    assert len(left_out) == len(RESNET) - 1
    assert left_out[0] in list(remarks(holding(3.3), found, left_out, cheapest=False))


def test_overlapping_bands_are_no_clear_winner_and_the_cheapest_takes_fewer_gpus():
    for options, sentence in (
        ("--gpus 512", "LARS 64480 reach into that of LARS 49152 on 512 GPUs"),
        ("--gpus 512 --pace published", "no clear winner: the bands of resnet50-512gpu-20k, LARS 49152 reach into"),
        ("--gpus 8", "resnet50-8gpu-mild on 8 GPUs under lazy bf16 is the fastest"),
        ("--gpus 8 --cheapest", "resnet50-8gpu-mild on 1 GPU under lazy bf16 is the cheapest"),
    ):
        assert sentence in planned(f"fastest --cluster dgx-h100 {options}").output.replace("\n", " ")


def test_rows_prices_and_a_recipe_are_written(tmp_path: Path, refusal: Callable[..., str]):
    shipped = (Path(__file__).parents[2] / "clusters" / "dgx-h100.toml").read_text()
    priced, file, recipe = tmp_path / "priced.toml", tmp_path / "rows.json", tmp_path / "mine.toml"
    priced.write_text(shipped.replace("gpus_per_node", "usd_per_gpu_hour = 2.5\ngpus_per_node"))
    text = planned(f"fastest --cluster {priced} --pace published --gpus 512 --json {file} --write {recipe}").output
    rows = json.loads(file.read_text())
    assert "USD" in text
    assert rows[0]["usd"] == pytest.approx(2.5 * rows[0]["gpu_hours"])
    assert text.count("lazy bf16") <= 15 + 1 < len(rows) + 1, "15 rows and the verdict"
    head = recipe.read_text().partition("reference_ranks")[0]
    for part in ("LARS 32768, for 512 GPUs of priced", "predicted, not run", "version 4.0, whose norms saw 128 images"):
        assert part in head
    assert "Its runs took 56 epochs to 75.9 % on average, 55 to 57" in head
    written = load_recipe(recipe)
    assert (written.reference_ranks, written.micro_batch, written.global_batch) == (512, 64, 32768)
    assert written.sync.kind == "lazy"
    assert "does not divide over" not in refusal("train", "--recipe", str(recipe), "--data", str(tmp_path / "none"))


def test_steps_are_this_programs_unless_published_ones_are_asked_for(tmp_path: Path):
    file, recipe = tmp_path / "rows.json", tmp_path / "mine.toml"
    for options, pace, source in (
        ("", "launched", "# Steps: this program, launched: 1.64 times"),
        ("--pace replayed", "replayed", "# Steps: this program, replayed: 1.54 times"),
        ("--pace published", "published", "# Steps: solved from MLPerf v3.0 logs"),
    ):
        planned(f"fastest --cluster dgx-h100 --gpus 64 {options} --json {file} --write {recipe}")
        assert {row["pace"] for row in json.loads(file.read_text())} == {pace}
        assert source in recipe.read_text()


@pytest.mark.parametrize("cluster", ["dgx-h100", "gradientflow-v"])
def test_alexnet_by_its_three_recipes_on_any_device(cluster: str):
    text = planned(f"fastest --model alexnet --cluster {cluster} --gpus 64").output
    assert all(name in text for name in ("alexnet-1gpu", "alexnet-4host", "alexnet-512gpu"))


def test_a_sweep_has_the_best_of_each_number_and_a_picture(tmp_path: Path):
    file, png = tmp_path / "rows.json", tmp_path / "fastest.png"
    planned(f"fastest --cluster dgx-h100 --pace published --sweep gpus=8,64 --json {file} --png {png}")
    assert [row["training"] for row in json.loads(file.read_text())] == 2 * ["resnet50-8gpu-mild"]
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.ci
def test_the_published_results_are_those_of_today(tmp_path: Path):
    result, file = results.read("fastest"), tmp_path / "rows.json"
    for command, case in zip(result["commands"][:-1], result["cases"], strict=False):
        planned(f"{command.removeprefix('imagenet-fast plan ')} --json {file}")
        found = [{"case": case, **row} for row in json.loads(file.read_text())]
        assert [pytest.approx(row) for row in found] == [row for row in result["rows"] if row["case"] == case]


def test_a_submitters_batch_is_among_the_three_best_or_the_page_says_why_not():
    places = re.findall(r"^\| MLPerf [^|]*\| (\d+) \|(?:[^|]*\|){3} (\d+) \|", PAGE, re.MULTILINE)
    assert len(places) > 10
    for gpus, place in places:
        assert int(place) <= 3 or re.search(rf"\*\*[^*]*\b{gpus}\b[^*]* GPUs", PAGE)
