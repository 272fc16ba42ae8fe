"""What is meant for the person at the terminal: the exceptions whose messages are, and warnings."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


class UserError(Exception):
    """Something the user can put right. The message is one sentence naming the path or key, then the fix.

    The CLI prints it without a traceback and exits with code 2.
    """


class JobAborted(Exception):
    """All ranks end, as one is lost, or as numbers have gone wrong. The message is one sentence that says where.

    Exit code 1, and no traceback: it would show where this rank waited, or looked.
    """


def warn(sentence: str) -> None:
    """Say so on stderr, and go on."""
    print(f"warning: {sentence}", file=sys.stderr)


_refusals: list[Path] = []
"""Where this process, as a rank of a launcher, leaves what it refuses."""


def leave_refusals_in(folder: Path) -> None:
    """Have :func:`refuse` speak by a file in ``folder`` from now on. Whoever started the ranks prints what any of them
    has left: the one that would have spoken for all may be ended before it comes to it."""
    _refusals[:] = [folder]
    (folder / f"attempt-{_attempt()}").touch()


def _attempt() -> str:
    """How often torchrun has started ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def refusal_in(folder: Path) -> tuple[str, int] | None:
    """What ranks have refused when they were last started, and their exit code: the first one's sentence."""
    with suppress(OSError, ValueError):
        last = max(int(path.name.removeprefix("attempt-")) for path in folder.glob("attempt-*"))
        left = {tuple(map(int, path.stem.split("-")[2:])): path for path in folder.glob(f"refusal-{last}-*.txt")}
        if left:
            return left[min(left)].read_text(encoding="utf-8"), max(code for *_, code in left)
    return None


def exit_with_error(sentence: str, code: int = 2) -> NoReturn:
    """Say so on stderr, once a node, since every rank of it finds the same; then exit with ``code``."""
    if _refusals:
        rank = os.environ.get("RANK", "0")
        path = _refusals[0] / f"refusal-{_attempt()}-{time.time_ns()}-{rank}-{code}.txt"
        with suppress(OSError):  # whoever started us has ended
            path.with_suffix(".partial").write_text(sentence, encoding="utf-8")
            path.with_suffix(".partial").rename(path)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(code) from None
