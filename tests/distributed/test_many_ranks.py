"""Many ranks on this node: they meet, train, save and resume, and one that fails is named in time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from imagenet_fast.distributed.watchdog import _AGREED_IN, LOOK_S


@pytest.mark.weekly
@pytest.mark.parametrize("ranks", [64, 256, 512])
def test_many_ranks_do_all_that_a_run_does(ranks: int, tmp_path: Path):
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "experiments.ranks", str(ranks), "--json", str(file)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=3600)
    (row,) = json.loads(file.read_text())
    named_s = _AGREED_IN * LOOK_S * max(1, ranks / 256)  # two cores look for all of them
    assert row["meet_s"] < 60
    assert row["files"] < 2 * ranks + ranks / 8 + 24, "a rank has two clients of the store, a node one"
    assert row["requests_per_s"] < 8 * ranks
    assert row["killed_s"] < named_s
    assert row["hanging_s"] < row["step_limit_s"] + named_s
    assert row["memory"] < 40e6
