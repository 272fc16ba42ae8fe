"""What is meant for the person at the terminal: the exceptions whose messages are, and warnings."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


class UserError(Exception):
    """Something the user can put right. The message is one sentence naming the path or key, then the fix.

    The CLI prints it without a traceback and exits with code 2.
    """


class Fault(Exception):
    """All ranks end, as one is lost, or as numbers have gone wrong. The message is one sentence that says where.

    Exit code 1, and no traceback: it would show where this rank waited, or looked.
    """


def warn(sentence: str) -> None:
    """Say so on stderr, and go on."""
    print(f"warning: {sentence}", file=sys.stderr)


def refuse(sentence: str, code: int = 2) -> NoReturn:
    """Say so on stderr, once a node, since every rank of it finds the same; then exit with ``code``."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(code) from None
