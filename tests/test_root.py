"""A test that needs root is skipped for a user who is not; in CI it fails, so that none is left out unseen."""

from __future__ import annotations

import os

import pytest

from tests.root import require_root


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_an_ordinary_user_is_told_what_a_test_needs(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(outcome, match=r"needs root .* you are not root"):
        require_root()
