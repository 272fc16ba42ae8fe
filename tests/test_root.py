"""A test that needs root is skipped for a user who is not; in CI it fails, so that none is left out unseen."""

from __future__ import annotations

import os

import pytest

from tests.root import require_root


@pytest.fixture
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.usefixtures("somebody")
def test_an_ordinary_user_is_told_what_a_skipped_test_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"needs root .* you are not root"):
        require_root()


@pytest.mark.usefixtures("somebody")
def test_root_missing_in_ci_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"needs root .* you are not root"):
        require_root()
