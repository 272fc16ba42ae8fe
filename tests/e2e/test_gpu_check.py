"""The check of one GPU, as a node without one can prove it: every section's command runs, as small as it goes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import environment, wait_for

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check.sh"

STEPS = [
    f"step of {model}, {precision}{compiled}"
    for compiled in ("", ", compiled")
    for model in ("resnet50", "alexnet")
    for precision in ("bf16", "fp16")
]
GPU_ONLY = [
    "the same without the caching allocator", "two NCCL ranks by torch's older backend", "a step as one CUDA graph",
]  # fmt: skip
LONG_ONLY = STEPS[5::2]
SECTIONS = [
    "environment", "tests on one GPU", "two NCCL ranks on one GPU", *GPU_ONLY[:2], *STEPS,
    "host and GPU time of each engine", GPU_ONLY[2], "kernels of an optimizer's step", "loaders",
]  # fmt: skip


def gpu_check(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True, text=True, check=False, timeout=300, env=environment(PYTHON=python),
    )  # fmt: skip


@pytest.mark.weekly
def test_a_dry_run_writes_every_section_and_none_fails(tmp_path: Path):
    done = gpu_check("--dry-run", str(tmp_path / "report.md"))
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, report
    assert re.findall("^## (.*)$", report, re.MULTILINE) == SECTIONS
    codes = dict(re.findall(r"^\| (.*?) \| (\d+|not run) \|", report, re.MULTILINE))
    assert list(codes) == SECTIONS
    assert {name for name, code in codes.items() if code != "0"} == {*GPU_ONLY, *STEPS[1:]}
    assert "Traceback" not in report
    assert "there is no GPU on this node" in report
    for row in (r"^torch +\d", "^ours, lazy ", "^lars, clip ", "^synthetic ", "^dali "):
        assert re.search(row, report, re.MULTILINE), row


def test_the_limits_of_all_sections_add_up_to_eight_minutes(tmp_path: Path):
    """Read from a report in which every section has failed, for none stops the next."""
    done = gpu_check(str(tmp_path / "report.md"), python="/bin/false")
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 1
    limits = dict(re.findall(r"^\| (.*?) \| 1 \| [\d.]+ \| (\d+) \|$", report, re.MULTILINE))
    assert list(limits) == [name for name in SECTIONS if name not in LONG_ONLY]
    assert sum(map(int, limits.values())) == 480


def test_a_long_check_has_no_limits_and_leaves_nothing_out(tmp_path: Path):
    done = gpu_check("--long", str(tmp_path / "report.md"), python="/bin/false")
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 1
    limits = dict(re.findall(r"^\| (.*?) \| 1 \| [\d.]+ \| (.*) \|$", report, re.MULTILINE))
    assert list(limits) == [*SECTIONS, *(f"DALI by {workers} threads" for workers in (1, 2, 4, 8, 16))]
    assert set(limits.values()) == {"–"}


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


def test_a_dry_run_that_is_interrupted_leaves_nothing_running(tmp_path: Path):
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 61.25\n")
    sleeper.chmod(0o755)
    started = subprocess.Popen(
        ["bash", str(SCRIPT), "--dry-run", str(tmp_path / "report.md")],
        env=environment(PYTHON=str(sleeper)), stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip

    def sleeping() -> list[psutil.Process]:
        return [
            process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "61.25"]
        ]

    wait_for(lambda: len(sleeping()) >= 5)
    started.send_signal(signal.SIGTERM)
    assert started.wait(30) == 130
    wait_for(lambda: not sleeping())
