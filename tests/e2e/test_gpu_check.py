"""The check of one GPU, as a machine without one can prove it: every section's command runs, as small as it goes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import environment

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check.sh"

STEPS = [
    f"step of {model}, {precision}{compiled}"
    for compiled in ("", ", compiled")
    for model in ("resnet50", "alexnet")
    for precision in ("bf16", "fp16")
]
UNCACHED = "the same without the caching allocator"
SECTIONS = [
    "environment", "tests on one GPU", "two NCCL ranks on one GPU", UNCACHED, *STEPS, "kernels of an optimiser's step",
    "loaders",
]  # fmt: skip


def gpu_check(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True, text=True, check=False, timeout=120, env=environment(PYTHON=python),
    )  # fmt: skip


@pytest.mark.long
def test_a_dry_run_writes_every_section_and_none_fails(tmp_path: Path):
    done = gpu_check("--dry-run", str(tmp_path / "report.md"))
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, report
    assert re.findall("^## (.*)$", report, re.MULTILINE) == SECTIONS
    codes = dict(re.findall(r"^\| (.*?) \| (\d+|not run) \|", report, re.MULTILINE))
    assert list(codes) == SECTIONS
    assert {name for name, code in codes.items() if code != "0"} == {UNCACHED, *STEPS[1:]}
    assert "Traceback" not in report
    assert "there is no GPU on this machine" in report
    for row in (r"^torch +\d", "^ours, lazy ", "^lars, clip ", "^synthetic ", "^dali "):
        assert re.search(row, report, re.MULTILINE), row


def test_the_limits_of_all_sections_add_up_to_eight_minutes(tmp_path: Path):
    """Read from a report in which every section has failed, for none stops the next."""
    done = gpu_check(str(tmp_path / "report.md"), python="/bin/false")
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 1
    limits = dict(re.findall(r"^\| (.*?) \| 1 \| [\d.]+ \| (\d+) \|$", report, re.MULTILINE))
    assert list(limits) == SECTIONS
    assert sum(map(int, limits.values())) == 480


def test_what_cannot_be_understood_is_refused_before_anything_runs(tmp_path: Path):
    report = str(tmp_path / "report.md")
    for done, sentence in (
        (gpu_check("--dry", report), "usage: scripts/gpu-check.sh"),
        (gpu_check(report, report), "usage: scripts/gpu-check.sh"),
        (gpu_check(report, python="no-python-here"), "there is no no-python-here"),
    ):
        assert done.returncode == 2
        assert sentence in done.stderr
    assert not list(tmp_path.iterdir())
