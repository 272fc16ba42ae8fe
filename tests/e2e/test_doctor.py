"""A check-up from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.command import imagenet_fast


def test_what_fails_is_told_with_the_rest_and_the_exit_code_says_so(tmp_path: Path):
    data, report = tmp_path / "no such data", tmp_path / "found.json"
    done = imagenet_fast("doctor", "--data", str(data), "--nproc", "2", "--json", str(report), COLUMNS="200")
    assert (done.returncode, done.stderr) == (1, ""), done.stdout + done.stderr
    assert f"there is no data directory {data}" in done.stdout
    states = {finding["about"]: finding["state"] for finding in json.loads(report.read_text())}
    assert (states["data"], states["all-reduce"], states["torch"]) == ("fail", "ok", "ok")
