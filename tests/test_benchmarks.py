"""docs/results, the table that is made of each, and the figures that README and other pages quote."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from imagenet_fast.metrics.run_result import RunResult
from scripts import benchmarks
from tests.pages import ROOT

RESULTS = {name: benchmarks.read(name) for name in benchmarks.names()}


def test_every_results_file_is_a_question_of_its_own():
    own_page = {"convergence"}
    assert {path.stem for path in benchmarks.RESULTS.glob("*.json")} == set(RESULTS) | own_page
    assert len({result["question"] for result in RESULTS.values()}) == len(RESULTS)


@pytest.mark.parametrize("name", RESULTS)
def test_a_results_file_has_what_the_page_needs_and_rows_of_its_command(name: str):
    result = RESULTS[name]
    assert all(result[key] for key in ("commands", "columns", "date", "machine", "versions", "rows"))
    assert (result["name"], result["question"][-1], result["reading"][-1]) == (name, "?", ".")
    assert len(result.get("cases", result["commands"])) == len(result["commands"])
    assert "figure" not in result or (ROOT / "docs" / result["figure"]["file"]).is_file()
    for command in result["commands"]:
        lines = benchmarks.wrapped(command)
        assert max(map(len, lines)) <= 112
        assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)


# -- figures on other pages -------------------------------------------------------------------------------------------


def row_of(name: str, **values: Any) -> dict[str, Any]:
    """The first row of a benchmark that has these values."""
    return next(row for row in RESULTS[name]["rows"] if values.items() <= row.items())


AIRBENCH, DEMO = row_of("airbench", target_top1=94.0), row_of("demo")
WIDE, BUSY, SMALL = (
    {run: row_of("layouts", run=run, case=case) for run in ("dp4", "tp4")}
    for case in ("32 images of 224 pixels", "128 images of 224 pixels", "32 images of 64 pixels")
)
QUOTES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "README.md": [
        ("{top1_shift:.2f} % top-1 after {time_to_accuracy_s:.0f} s", AIRBENCH),
        ("without it, {top1:.2f} %", AIRBENCH),
        ("Target reached: top-1 {top1:.2f} % of 97 % after {epochs} epochs.", DEMO),
        ("time to accuracy {time_to_accuracy_s:.1f} s", DEMO),
    ],
    "docs/index.md": [],
    "docs/engines.md": [("{ratio_to_plain:x.1f} % longer", row_of("step", loop="ours, lazy"))],
    "docs/layouts.md": [
        ("32 images a rank | {dp4[step_s]:.3f} | {tp4[step_s]:.3f} |", WIDE),
        ("128 images a rank | {dp4[step_s]:.3f} | {tp4[step_s]:.3f} |", BUSY),
        ("of the work | {dp4[step_s]:.3f} | {tp4[step_s]:.3f} |", SMALL),
        ("a node sent {dp4[link_MB]:.0f} and {tp4[link_MB]:.0f} MB", WIDE),
    ],
}
"""By page, words on it with fields of a row."""

TARGETS = {"README.md": {"97 %", "75.9 %", "4 s"}, "docs/engines.md": {"62 %", "27 %", "1.4 s"}}
"""Figures that nobody measures: accuracies to reach, layers' shares of a model, options of a command, an example."""


@pytest.mark.parametrize("page", QUOTES)
def test_quoted_figures_are_those_of_the_results(page: str):
    text = " ".join((ROOT / page).read_text().split())
    for words, row in QUOTES[page]:
        quoted = benchmarks.cell(words, row)
        assert quoted in text
        text = text.replace(quoted, "")
    others = set(re.findall(r"[\d.]*\d (?:%|s|ms|MB|images/s|img/s)(?![\w/])", text))
    assert others <= TARGETS.get(page, set()), "quoted without a result"


# -- the script -------------------------------------------------------------------------------------------------------


def test_benchmarks_are_listed_by_question_and_others_refused(capsys: pytest.CaptureFixture[str]):
    assert benchmarks.main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed and result["question"] in listed for name, result in RESULTS.items())
    assert benchmarks.main(["no-such"]) == 2
    sentence = "error: there is no benchmark no-such; `python scripts/benchmarks.py` lists them\n"
    assert capsys.readouterr() == ("", sentence)


@pytest.mark.ci
def test_measuring_rewrites_rows_and_keeps_the_declaration_unless_a_command_fails(tmp_path: Path, monkeypatch, capfd):
    declared = {
        "name": "loaders", "question": "How fast?", "reading": "Look.", "cases": ["of nothing"],
        "commands": ["imagenet-fast bench data --loaders synthetic --image-size 16 --batch 2 --seconds 0 --rounds 1"],
        "left_out": ["slowest"], "columns": [{"heading": "loader", "cell": "{loader}"}],
    }  # fmt: skip
    once = {"date": "2020-01-01", "machine": "", "versions": {}, "conditions": "once", "rows": []}
    monkeypatch.setattr(benchmarks, "RESULTS", tmp_path)
    benchmarks.write(declared | once)
    benchmarks.write(benchmarks.measure("loaders"))
    measured = benchmarks.read("loaders")
    assert measured.items() >= declared.items()
    assert (list(measured)[-1], measured["date"]) == ("rows", date.today().isoformat())
    assert measured["versions"]["Python"]
    assert measured.get("conditions") != "once"
    rows = [(row["case"], row["loader"], "slowest" in row) for row in measured["rows"]]
    assert rows == [("of nothing", "synthetic", False)]
    benchmarks.write(measured | {"commands": ["imagenet-fast bench data --loaders none"]})
    before = (tmp_path / "loaders.json").read_bytes()
    assert benchmarks.main(["loaders"]) == 2
    assert "ended with exit code 2; nothing was written" in capfd.readouterr().err
    assert (tmp_path / "loaders.json").read_bytes() == before


def test_a_trained_run_is_one_row(tmp_path: Path):
    speed = [{"event": "speed", "step": step, "run_s": step, "images_per_s": 32.0} for step in (10, 20, 30)]
    events = [{"event": "run", "step": 0, "run_s": 0, "global_batch": 64}, *speed]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "recipe.toml").write_text("seed = 3\n")
    outcome = RunResult("finished", "demo", "lazy", 2, 64, top1=97.5, steps=30)
    (tmp_path / "outcome.json").write_text(json.dumps(dataclasses.asdict(outcome)))
    row = benchmarks.trained(tmp_path)
    assert row | {"run": tmp_path.name, "seed": 3, "step_s": 2.0, "top1": 97.5, "sync": "lazy"} == row
    assert "link_MB" not in row


def test_cells_count_in_their_unit():
    row = {"s": 0.0125, "bytes": 2_500_000, "ratio": 1.0143, "none": None, "sizes": [1e6, 2e6], "in": {"side": 2}}
    cells = "{s:m.1f} {bytes:M.2f} {bytes:B} {ratio:x+.1f} {none:.3f} {sizes:M.0f} {in[side]:d}"
    assert benchmarks.cell(cells, row) == "12.5 2.50 2.384 MB +1.4 – 1 2 2"
    assert benchmarks.cell("{absent:d}", row) == ""
