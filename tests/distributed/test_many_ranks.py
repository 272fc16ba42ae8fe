"""Many ranks on this node: they meet, train, save and resume, and one that fails is named in time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from imagenet_fast.distributed.watchdog import _AGREED_IN, LOOK_S

RANKS = 64


@pytest.mark.weekly
def test_64_ranks_do_all_that_a_run_does(tmp_path: Path):
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "experiments.ranks", str(RANKS), "--json", str(file)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=1200)
    (row,) = json.loads(file.read_text())
    assert row["meet_s"] < 60
    assert row["files"] < 2 * RANKS + 64, "a rank has two clients of the store"
    assert row["requests_per_s"] < 4 * RANKS
    assert row["killed_s"] < _AGREED_IN * LOOK_S
    assert row["hanging_s"] < row["step_limit_s"] + _AGREED_IN * LOOK_S
    assert row["memory"] < 40e6
