"""A few rounds of scripts/fuzz_jobs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fuzzing import play_round

pytestmark = pytest.mark.weekly


@pytest.mark.parametrize("seed", ["1/1", "1/3", "2/3"])
def test_a_fuzzed_job_ends_with_the_same_bytes_or_a_sentence(seed: str, tmp_path: Path):
    row = play_round(tmp_path, seed)
    assert row["faults"] == [], row
