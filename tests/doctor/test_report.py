"""Findings of several nodes, and how they are shown."""

from __future__ import annotations

from rich.console import Console

from imagenet_fast.doctor.report import CheckResult, by_host, findings_table

TORCH = CheckResult("torch", "ok", "2.15.0")


def test_what_all_machines_have_alike_is_told_once_and_what_differs_of_each():
    assert by_host({"a": [TORCH], "b": [TORCH]}) == [TORCH]
    full = CheckResult("/dev/shm", "warn", "0.1 GiB free", "give it more")
    roomy = CheckResult("/dev/shm", "ok", "8.0 GiB free")
    told = by_host({"a": [full, TORCH], "b": [roomy, TORCH]})
    assert [(finding.about, finding.host, finding.state) for finding in told] == [
        ("/dev/shm", "a", "warn"), ("/dev/shm", "b", "ok"), ("torch", "", "ok"),
    ]  # fmt: skip
    card = CheckResult("GPU 0", "ok", "a card")
    assert by_host({"a": [], "b": [card]}) == [CheckResult("GPU 0", "ok", "a card", "", "b")]


def test_the_table_shows_brackets_of_a_path_as_they_are():
    console = Console(width=100, no_color=True)
    with console.capture() as shown:
        console.print(findings_table([CheckResult("data", "fail", "there is no [red]/x", "look", "node1")]))
    assert shown.get().split() == ["fail", "data", "node1:", "there", "is", "no", "[red]/x;", "look"]
