"""Exceptions and warnings whose messages are printed to the user, and the lists that options take."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

Item = TypeVar("Item")
Name = TypeVar("Name", bound=str)


class UserError(Exception):
    """An error that the user can fix. The message is one sentence: the path or key, then the fix.

    The CLI prints it without a traceback and exits with code 2.
    """


class JobAborted(Exception):
    """An error that ends all ranks: a rank was lost, or numbers went wrong.

    The message is one sentence that says where. The exit code is 1. No traceback is printed: it would only show where
    this rank waited or checked.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none, to be quoted in a sentence."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str, most: int = 3, cutoff: float = 0.5, prefix: str = ""
) -> str:
    """Return a question that suggests the names like ``name``; ``otherwise`` if there are none.

    Args:
        name: What was written.
        known: The names that there are.
        otherwise: What to say if none of them is alike.
        most: Number of names to suggest at most.
        cutoff: How alike names must be, from 0 to 1, by difflib.
        prefix: Shown before each name.
    """
    near = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(prefix + one for one in near)}?" if near else otherwise


def listed(option: str, text: str, parse: Callable[[str], Item]) -> list[Item]:
    """Parse the comma-separated list that an option of the command line takes.

    A list that names something twice is refused, because the second was probably meant to be another.

    Args:
        option: Name of the option.
        text: The list.
        parse: Returns the item that one part, without spaces around it, stands for; items must be hashable.

    Raises:
        UserError: Two parts stand for the same item, or ``parse`` raises it.
    """
    items: dict[Item, str] = {}
    for part in map(str.strip, text.split(",")):
        item = parse(part)
        if item in items:
            again = "" if items[item] == part else f" ({items[item]} and {part} are the same)"
            raise UserError(f"{option} {text} names {part} twice{again}; leave one out")
        items[item] = part
    return list(items)


def names(option: str, text: str, known: Sequence[Name]) -> list[Name]:
    """Parse a comma-separated list of different names.

    Args:
        option: Name of the option.
        text: The list.
        known: The names that there are.

    Raises:
        UserError: A name is unknown, or there twice.
    """

    def name(part: str) -> Name:
        if part not in known:
            raise UserError(f"{option} {text}: there is no {part!r}; choose among {', '.join(known)}")
        return known[known.index(part)]

    return listed(option, text, name)


def warn(sentence: str) -> None:
    """Print a warning to stderr and continue."""
    print(f"warning: {sentence}", file=sys.stderr)


def _print_error(sentence: str, code: int) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0" or "RANK" not in os.environ:  # without RANK it is no rank
        print(f"error: {sentence}", file=sys.stderr)


_report: list[Callable[[str, int], None]] = [_print_error]


def report_errors_by(report: Callable[[str, int], None]) -> None:
    """Make ``exit_with_error`` call ``report`` with its message and exit code, instead of printing.

    A launcher prints the message of any one of its ranks: a single rank that prints for all may be ended before it
    reaches the error.
    """
    _report[:] = [report]


def exit_with_error(sentence: str, code: int = 2) -> NoReturn:
    """Print ``sentence`` as an error on stderr, once per node, and exit with ``code``.

    Only local rank 0 prints, because every rank of a node finds the same error.

    Raises:
        SystemExit: Always.
    """
    _report[0](sentence, code)
    raise SystemExit(code) from None
