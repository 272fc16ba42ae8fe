"""What only root may do: networks of one's own, and becoming another user."""

from __future__ import annotations

import os

import pytest

from imagenet_fast.errors import UserError
from imagenet_fast.netlab.namespaces import shaped_network


def require_root() -> None:
    """Skip the test that runs where this user may not make a network of hosts; in CI that fails it instead.

    Being root is not enough for that in a container, so it is tried.
    """
    try:
        with shaped_network(1, bits_per_s=10**9):
            return
    except (UserError, OSError) as error:
        reason = f"needs root with all its rights: {error}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def as_user(number: int) -> list[str]:
    """What to put before a command to run it as user and group ``number``, which nobody needs to have heard of.

    It may read everything, since Python may well lie in root's own directory here, but writes only as any other user.
    """
    reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups", *reading]
