"""What a run that waited for its images is told to set."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagenet_fast.data.stall_advice import InputPipeline, advice, suggestions
from imagenet_fast.recipe.data_config import ImageData
from imagenet_fast.recipe.load import find_recipe, load_recipe

WORKERS = "--set data.workers=0"
FOLDER, DALI = "--set data.loader=folder", "--set data.loader=dali"
SHRINK = "imagenet-fast data prepare --source '/my data' --out '/my data-256' --resize 256 --subset"
HARDWARE = "--set data.dali.hw_decoder_load=0.99"
AHEAD = "--set data.prefetch=5"


def waiting(gpu: bool, cores: int, short_side: float | None = 400, **data: Any) -> InputPipeline:
    table = {"dataset": "imagenet", "image_size": 224, "resize": 256} | data
    return InputPipeline(ImageData(**table), gpu, cores, True, short_side, Path("/my data"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (waiting(False, 1, 64, loader="dali", workers=1), [FOLDER, AHEAD]),
        (waiting(False, 8, loader="folder", workers=2), [WORKERS, SHRINK, AHEAD]),
        (waiting(True, 8, loader="dali", workers=8), [SHRINK, HARDWARE, AHEAD]),
        (waiting(True, 8, loader="folder"), [DALI, SHRINK, AHEAD]),
        (replace(waiting(True, 8, None, loader="folder"), dali=False), [AHEAD]),
    ],
)
def test_the_likeliest_remedy_comes_first(given: InputPipeline, expected: list[str]):
    assert [remedy.written for remedy in suggestions(given)] == expected
    lines = advice(12.3, given)
    assert "Waited for data 12 % of training: a rank reads with" in lines[0]
    assert ("Nothing is left to set" in lines[0]) == (not expected)
    assert [line.split("  (")[0].strip() for line in lines[1:]] == expected[:3]
    for remedy in expected:
        if remedy.startswith("--set"):
            load_recipe(
                find_recipe("resnet50-8gpu"), overrides=[f"data.loader={given.data.loader}", *shlex.split(remedy)[1::2]]
            )
