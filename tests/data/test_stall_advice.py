"""What a run that waited for its images is told to set."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagenet_fast.data.stall_advice import InputPipeline, advice, suggestions
from imagenet_fast.recipe.data_config import ImageData
from imagenet_fast.recipe.load import find_recipe, load_recipe, recipe_names

WORKERS = "--set data.workers=0"
FOLDER, DALI = "--set data.loader=folder", "--set data.loader=dali"
CACHE = "--set data.cache=/home/me/.cache/decoded-imagenet"
SHRINK = "imagenet-fast data prepare --source /imagenet --out /imagenet-256 --resize 256 --subset"
HARDWARE = "--set data.dali.hw_decoder_load=0.99"
AHEAD = "--set data.prefetch=5"


def supply(gpu: bool, cores: int, short_side: float | None, **data: Any) -> InputPipeline:
    table = {"dataset": "imagenet", "image_size": 224, "resize": 256} | data
    return InputPipeline(ImageData(**table), gpu, cores, True, short_side, Path("/imagenet"), Path("/home/me/.cache"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (supply(False, 1, 64, loader="dali", workers=1), [FOLDER, f"{FOLDER} {CACHE}", AHEAD]),
        (supply(False, 1, 400, loader="folder", workers=1), [CACHE, SHRINK, AHEAD]),
        (supply(False, 8, 400, loader="folder", workers=2), [WORKERS, CACHE, SHRINK, AHEAD]),
        (supply(False, 8, 400, loader="folder", cache="/nvme", prefetch=5), []),
        (supply(True, 8, 400, loader="dali", workers=8), [SHRINK, HARDWARE, f"{FOLDER} {CACHE}", AHEAD]),
        (
            supply(True, 16, 400, loader="dali", workers=6, prefetch=5, dali={"hw_decoder_load": 0.99}),
            [WORKERS, SHRINK, f"{FOLDER} {CACHE}"],
        ),
        (supply(True, 8, 256, loader="dali"), [HARDWARE, f"{FOLDER} {CACHE}", AHEAD]),
        (supply(True, 8, 400, loader="folder"), [DALI, CACHE, SHRINK, AHEAD]),
        (supply(True, 8, 400, loader="folder", cache="/nvme"), [AHEAD]),
        (replace(supply(True, 8, None, loader="folder"), dali=False), [CACHE, AHEAD]),
        (
            supply(False, 1, 400, loader="folder", resize=288, image_size=288),
            [f"{CACHE} --set data.cache_side=288", SHRINK.replace("256", "288"), AHEAD],
        ),
    ],
    ids=[
        "cpu-dali-small", "cpu-folder", "cpu-idle-cores", "cpu-nothing-left", "gpu-dali", "gpu-mlperf", "gpu-prepared",
        "gpu-folder", "gpu-cached", "gpu-no-dali-shards", "larger-crops",
    ],
)  # fmt: skip
def test_the_likeliest_remedy_comes_first(given: InputPipeline, expected: list[str]):
    assert [remedy.written for remedy in suggestions(given)] == expected


def test_advice_lists_three_remedies():
    lines = advice(12.3, supply(True, 16, 400, loader="dali", workers=6))
    assert lines[0] == (
        "Waited for data 12 % of training: a rank reads with dali, in 6 of 16 cores. "
        "Most likely to help, the likeliest first:"
    )
    assert [line.split("  (")[0] for line in lines[1:]] == [f"  {WORKERS}", f"  {SHRINK}", f"  {HARDWARE}"]


@pytest.mark.parametrize("name", [name for name in recipe_names() if name != "smoke"])
def test_whatever_is_told_of_a_recipe_can_be_pasted_behind_it(name: str):
    data = load_recipe(find_recipe(name)).data
    assert isinstance(data, ImageData)
    for gpu in (False, True):
        given = InputPipeline(data, gpu, 64, True, 900.0, Path("/my data; [x]/it's"), Path("/home/me/my caches"))
        for remedy in suggestions(given):
            words = shlex.split(remedy.written)
            if words[0] == "--set":
                changed = load_recipe(find_recipe(name), overrides=words[1::2]).data
                assert changed != data
                if words[-1].startswith("data.cache="):
                    assert changed.cache == "/home/me/my caches/decoded-it's"
            else:
                assert words[3:7] == [
                    "--source",
                    "/my data; [x]/it's",
                    "--out",
                    f"/my data; [x]/it's-{max(256, data.resize)}",
                ]


def test_where_nothing_is_left_to_set_that_is_said():
    (line,) = advice(50.0, supply(False, 1, 400, loader="folder", cache="/nvme", prefetch=5))
    assert "Nothing is left to set" in line
    assert "on one core" in line
