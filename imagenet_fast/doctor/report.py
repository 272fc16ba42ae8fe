"""The results of checks, and how serious they are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rich.markup import escape
from rich.table import Column, Table

from imagenet_fast.errors import UserError

State = Literal["ok", "warn", "fail"]
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    about: str
    state: State
    said: str
    """The state that was found."""
    fix: str = ""
    """Advice for the user; empty if nothing is wrong."""
    host: str = ""
    """Host name; empty if the result holds for all hosts."""


def check(about: str, good: bool, said: str, fix: str, otherwise: State = "warn") -> CheckResult:
    """Return the result "ok" if what was found is ``good``, else ``otherwise`` and how to fix it."""
    return CheckResult(about, "ok", said) if good else CheckResult(about, otherwise, said, fix)


def refused(about: str, error: UserError, state: State = "fail") -> CheckResult:
    """Return what ``error`` says, and as advice its fix."""
    said, _, fix = str(error).partition("; ")
    return CheckResult(about, state, said, fix)


def write_results(results: Iterable[CheckResult], file: Path) -> None:
    """Leave the results of all nodes in ``file``, for the launcher."""
    file.write_text(json.dumps([asdict(result) for result in results]), encoding="utf-8")


def read_results(file: Path) -> list[CheckResult] | None:
    """Return the results that rank 0 has left in ``file``; None if it has not come so far."""
    return [CheckResult(**one) for one in json.loads(file.read_text(encoding="utf-8"))] if file.is_file() else None


def findings_table(findings: Iterable[CheckResult]) -> Table:
    """Return a table with one line per result, followed by its fix."""
    about = (Column("", no_wrap=True), Column("", no_wrap=True))
    table = Table(*about, "", box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for found in findings:
        where = f"{found.host}: " if found.host else ""
        fix = f"; {found.fix}" if found.fix else ""
        state = f"[{_COLOURS[found.state]}]{found.state}[/]"
        table.add_row(state, escape(found.about), escape(f"{where}{found.said}{fix}"))
    return table


def by_host(found: dict[str, list[CheckResult]]) -> list[CheckResult]:
    """Merge the results of several hosts: each once if all hosts have the same, else with the host's name."""
    merged: list[CheckResult] = []
    everything = [finding for findings in found.values() for finding in findings]
    for about in dict.fromkeys(finding.about for finding in everything):
        of_hosts = {host: [f for f in findings if f.about == about] for host, findings in found.items()}
        first, *others = of_hosts.values()
        if all(other == first for other in others):
            merged += first
        else:
            merged += [replace(one, host=host) for host, findings in of_hosts.items() for one in findings]
    return merged
