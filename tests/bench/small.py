"""The benchmarks with small numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from imagenet_fast.cost_model.layer_profile import Layer, Profile, save_profile
from tests.e2e.command import in_process

SMALL = Profile(
    "small",
    "made up for a test",
    (
        Layer("conv", "Conv2d", ((16, 3, 3, 3), (16,)), 2.0, 4.0),
        Layer("hidden", "Linear", ((400, 1000), (400,)), 0.7, 1.3),
        Layer("last", "Linear", ((100, 400), (100,)), 0.3, 0.7),
    ),
)
"""A profile that takes no time to replay."""

Rows = tuple[list[dict[str, Any]], str]


def benched(folder: Path, words: str, *more: str, drawn: bool = True) -> Rows:
    """Run `bench`; return its rows, and what it printed: lines of 80 columns at most.

    ``small.json`` in ``folder`` is a profile that takes no time to replay.
    """
    save_profile(SMALL, folder / "small.json")
    png = ("--png", str(folder / "rows.png")) if drawn else ()
    words = words.replace("small.json", str(folder / "small.json"))
    printed = in_process("bench", *words.split(), *more, "--json", str(folder / "rows.json"), *png)
    assert all(len(line) <= 80 for line in printed.splitlines()), printed
    assert not drawn or (folder / "rows.png").stat().st_size > 10_000
    return json.loads((folder / "rows.json").read_text()), printed
