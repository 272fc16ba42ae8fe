"""How a rank ends: its exit code, and what it leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagenet_fast.distributed.ranks import RankInfo
from imagenet_fast.run.ending import Ending
from imagenet_fast.run.launcher_dir import LauncherDir
from tests.training.jobs import job_of


@pytest.mark.parametrize(("elastic", "saved", "code"), [(False, True, 0), (False, False, 0), (True, False, 1)])
def test_ranks_that_have_all_stopped_are_not_started_again(elastic: bool, saved: bool, code: int, tmp_path: Path):
    """As torchrun would, if one had failed; what was lost is in what they leave for the launcher."""
    ending = Ending(replace(job_of(tmp_path), elastic=elastic), RankInfo(0, 1, 0, 1), LauncherDir(tmp_path))
    ending.stopped(saved)
    ending.write()
    assert ending.exit_code == code
    (end,) = LauncherDir(tmp_path).ends()
    assert (end.status, end.code) == ("preempted" if saved else "interrupted", 0)
