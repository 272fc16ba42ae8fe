"""A machine looked at by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagenet_fast.doctor import machine
from imagenet_fast.doctor.findings import Finding
from imagenet_fast.recipe.schema import Timeout


def found_by(name: str, findings: list[Finding]) -> Finding:
    (found,) = [finding for finding in findings if finding.about == name]
    return found


def test_this_one_can_train_and_nothing_fails(tmp_path: Path):
    findings = machine.examine(None, tmp_path / "runs", 1, Timeout())
    assert not [finding for finding in findings if finding.state == "fail"]
    assert {"python", "torch", "DALI", "cores", "memory", "open files", "runs", "time-outs"} <= {
        finding.about for finding in findings
    }
    assert all(bool(finding.fix) == (finding.state != "ok") for finding in findings)


def test_a_data_directory_that_cannot_be_trained_on_fails_with_the_sentence_that_train_has(tmp_path: Path):
    data = tmp_path / "strange [name]"
    (data / "train" / "a").mkdir(parents=True)
    found = found_by("data", machine.examine(data, tmp_path, 1, Timeout()))
    assert found.state == "fail"
    assert "has no folder val" in found.said


def test_a_place_for_runs_need_not_exist_yet(tmp_path: Path):
    found = found_by("runs", machine.examine(None, tmp_path / "not" / "yet", 1, Timeout()))
    assert str(tmp_path) in found.said


def test_more_ranks_than_cores_are_doubtful(tmp_path: Path):
    assert found_by("cores", machine.examine(None, tmp_path, 10_000, Timeout())).state == "warn"


@pytest.mark.parametrize(
    ("environment", "state"),
    [
        ({}, "ok"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "warn"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}, "warn"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600"}, "ok"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "soon"}, "ok"),
    ],
)
def test_what_would_end_a_run_before_our_own_time_outs_is_told(environment: dict[str, str], state: str):
    (found,) = machine._time_limits(Timeout(), environment)
    assert found.state == state


@pytest.mark.parametrize(
    ("driver", "cuda", "state"), [(None, None, "ok"), ("580.1", None, "fail"), ("470.9", "13.0", "fail")]
)
def test_a_driver_without_a_torch_for_it_fails(
    driver: str | None, cuda: str | None, state: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    (found,) = machine._graphics(driver)
    assert found.state == state
