"""Check-ups from the command line: the doctor's, and that of one GPU on a node without one, as small as it goes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import Forked, environment
from tests.pages import ROOT


def gpu_check(*arguments: object, python: object = sys.executable) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", ROOT / "scripts" / "gpu-check.sh", *map(str, arguments)],
        env=environment(PYTHON=str(python)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.weekly
def test_a_dry_run_writes_every_section_and_none_fails(tmp_path: Path):
    code = gpu_check("--dry-run", tmp_path / "report.md").wait(900)
    report = (tmp_path / "report.md").read_text()
    assert code == 0, report
    assert "Traceback" not in report
    ended = re.findall(r"^\| .*? \| (\d+) \|", report, re.MULTILINE)
    assert len(ended) == len(re.findall("^## ", report, re.MULTILINE)) >= 9
    assert set(ended) == {"0"}
    for row in (
        r"^PyTorch version: \d", "^ours, lazy ", "^Target reached", "^pixels ", "^pixels alone ",
        "there is no GPU on this node",
    ):  # fmt: skip
        assert re.search(row, report, re.MULTILINE), row


@pytest.mark.ci
def test_a_section_that_fails_stops_no_other(tmp_path: Path):
    for half, least in (("speed", 12), ("tests", 6)):
        report = tmp_path / f"{half}.md"
        assert gpu_check(half, report, python="/bin/false").wait(60) == 1
        assert len(re.findall(r"^\| .*? \| 1 \| ", report.read_text(), re.MULTILINE)) >= least


@pytest.mark.ci
def test_what_cannot_be_understood_is_refused_before_anything_runs(tmp_path: Path):
    report, usage = tmp_path / "report.md", "usage: scripts/gpu-check.sh"
    for check, sentence in (
        (gpu_check("--dry", report), usage),
        (gpu_check(report, report), usage),
        (gpu_check(report, python="no-python-here"), "there is no no-python-here"),
    ):
        assert sentence in check.communicate(timeout=60)[1]
        assert check.returncode == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_what_the_doctor_finds_wrong_is_told(tmp_path: Path):
    data, report = tmp_path / "no such data", tmp_path / "found.json"
    code, printed, said = Forked(
        tmp_path, "doctor", "--data", str(data), "--nproc", "2", "--json", str(report), COLUMNS="200"
    ).ended()
    assert (code, said) == (1, ""), printed + said
    assert f"there is no data directory {data}" in printed
    states = {finding["about"]: finding["state"] for finding in json.loads(report.read_text())}
    assert (states["data"], states["all-reduce"], states["torch"]) == ("fail", "ok", "ok")
