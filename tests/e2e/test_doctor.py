"""A check-up from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import Launched


@pytest.mark.ci
def test_what_fails_is_told_with_the_rest_and_the_exit_code_says_so(
    tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
):
    data, report = tmp_path / "no such data", tmp_path / "found.json"
    monkeypatch.setenv("COLUMNS", "200")
    code, printed, said = launched("doctor", "--data", str(data), "--nproc", "2", "--json", str(report))
    assert (code, said) == (1, ""), printed + said
    assert f"there is no data directory {data}" in printed
    states = {finding["about"]: finding["state"] for finding in json.loads(report.read_text())}
    assert (states["data"], states["all-reduce"], states["torch"]) == ("fail", "ok", "ok")
