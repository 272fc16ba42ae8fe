"""docs/results, the tables that are made of them, and the figures that README and other pages quote."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from imagenet_fast.run.result import RunResult
from scripts import results, tables
from tests.pages import ROOT

RESULTS = {name: results.read(name) for name in tables.names()}


def test_every_results_file_is_shown_on_a_page():
    shown = {name for page in tables.PAGES for name in re.findall(r"<!-- table ([\w-]+)", page.read_text())}
    assert {path.stem for path in results.RESULTS.glob("*.json")} == shown - {"held"} == set(RESULTS) | {"convergence"}


@pytest.mark.parametrize("name", RESULTS)
def test_a_results_file_has_what_its_table_needs_and_only_commands_that_measure(name: str):
    result = RESULTS[name]
    assert all(result[key] for key in ("commands", "columns", "date", "machine", "versions", "rows"))
    assert result["name"] == name
    assert len(result.get("cases", result["commands"])) == len(result["commands"])
    for command in result["commands"]:
        measures = r"imagenet-fast (bench|plan|train|compare) |python -m experiments\.published "
        assert re.match(measures, command), command
        lines = tables.indented(command)
        assert max(map(len, lines)) <= 116
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
FASTEST = [
    next(row for row in RESULTS["fastest"]["rows"] if row["exact"] and row["case"] == table["name"])
    for table in RESULTS["fastest"]["tables"]
]
QUOTES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "README.md": [
        ("{top1_shift:.2f} % top-1 after {time_to_accuracy_s:.0f} s", AIRBENCH),
        ("without it, {top1:.2f} %", AIRBENCH),
        ("Target reached: top-1 {top1:.2f} % of 97 % after {epochs} epochs.", DEMO),
        ("time to accuracy {time_to_accuracy_s:.1f} s", DEMO),
        *(("|{case}|{training}|`{loader}`|`{engine}`|{minutes:.2g}|", row) for row in FASTEST),
    ],
    "docs/index.md": [],
    "docs/engines.md": [("{100 * (ratio_to_plain - 1):.1f} % longer", row_of("step", loop="ours, lazy"))],
    "docs/layouts.md": [
        ("32 images a rank | {dp4['step_s']:.3f} | {tp4['step_s']:.3f} |", WIDE),
        ("128 images a rank | {dp4['step_s']:.3f} | {tp4['step_s']:.3f} |", BUSY),
        ("of the work | {dp4['step_s']:.3f} | {tp4['step_s']:.3f} |", SMALL),
        ("a node sent {dp4['link_MB']:.0f} and {tp4['link_MB']:.0f} MB", WIDE),
    ],
}
"""By page, words on it with fields of a row."""

TARGETS = {"README.md": {"97 %", "75.9 %", "4 s"}, "docs/engines.md": {"62 %", "27 %", "1.4 s"}}
"""Figures that nobody measures: accuracies to reach, layers' shares of a model, options of a command, an example."""


@pytest.mark.parametrize("page", QUOTES)
def test_quoted_figures_are_those_of_the_results(page: str):
    text = " ".join((ROOT / page).read_text().split())
    for words, row in QUOTES[page]:
        quoted = tables.cell(words, row)
        assert quoted in text
        text = text.replace(quoted, "")
    others = set(re.findall(r"[\d.]*\d (?:%|s|ms|MB|images/s|img/s)(?![\w/])", text))
    assert others <= TARGETS.get(page, set()), "quoted without a result"


# -- the script -------------------------------------------------------------------------------------------------------


def test_another_benchmark_is_refused(capsys: pytest.CaptureFixture[str]):
    assert tables.main(["no-such"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no benchmark no-such; choose from accuracy, airbench, ")


@pytest.mark.ci
def test_measuring_rewrites_rows_and_keeps_the_declaration_unless_a_command_fails(tmp_path: Path, monkeypatch, capfd):
    declared = {
        "name": "loaders", "cases": ["of nothing"],
        "commands": ["imagenet-fast bench data --loaders threads --image-size 16 --batch 2 --seconds 0 --rounds 1"],
        "left_out": ["slowest"], "columns": [{"heading": "loader", "cell": "{loader}"}],
    }  # fmt: skip
    once = {"date": "2020-01-01", "machine": "", "versions": {}, "conditions": "once", "rows": []}
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.write(declared | once)
    results.write(results.measure("loaders"))
    measured = results.read("loaders")
    assert measured.items() >= declared.items()
    assert (list(measured)[-1], measured["date"]) == ("rows", date.today().isoformat())
    assert measured["versions"]["Python"]
    assert measured.get("conditions") != "once"
    rows = [(row["case"], row["loader"], "slowest" in row) for row in measured["rows"]]
    assert rows == [("of nothing", "threads", False)]
    results.write(measured | {"commands": ["imagenet-fast bench data --loaders none"]})
    before = (tmp_path / "loaders.json").read_bytes()
    assert tables.main(["loaders"]) == 2
    assert "ended with exit code 2; nothing was written" in capfd.readouterr().err
    assert (tmp_path / "loaders.json").read_bytes() == before


def test_a_trained_run_is_one_row(tmp_path: Path):
    speed = [{"event": "speed", "step": step, "run_s": step, "images_per_s": 32.0} for step in (10, 20, 30)]
    events = [{"event": "run", "step": 0, "run_s": 0, "global_batch": 64}, *speed]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "recipe.toml").write_text("seed = 3\n")
    outcome = RunResult("finished", "demo", "lazy", 2, 64, top1=97.5, steps=30)
    (tmp_path / "outcome.json").write_text(json.dumps(dataclasses.asdict(outcome)))
    row = results.trained(tmp_path)
    assert row | {"run": tmp_path.name, "seed": 3, "step_s": 2.0, "top1": 97.5, "sync": "lazy"} == row
    assert row["link_MB"] is None


def test_a_table_is_as_it_is_declared():
    rows = [{"name": "a", "s": 0.0125, "in": {"side": 2}}, {"name": "b", "s": 0.5}, {"name": "c", "s": None}]
    columns = [{"heading": "name", "cell": "{name}"}, {"heading": "ms", "cell": "{1e3 * s:.1f}"}]
    table = {"columns": columns, "rows": rows, "where": "name != 'c'", "sort": "-s"}
    assert list(tables.table(table)) == ["| name | ms |", "|---|--:|", "| b | 500.0 |", "| a | 12.5 |"]
    assert list(tables.table(table | {"first": 1}))[2:] == ["| b | 500.0 |"]
    assert tables.cell("{absent}", rows[0]) == tables.cell("{s:.1f}", rows[2]) == ""


def test_cells_over_seeds_tell_what_is_missing_and_the_difference_to_the_same_seeds():
    tops = {"exact": [90.0, 91.0, 92.0], "int8": [89.0, 91.0, 91.5], "bf16": [91.5], "sparse": [None, 80.0, 82.0]}
    rows = [{"case": case, "seed": s, "top1": top1} for case in tops for s, top1 in enumerate(tops[case])]
    across = {"heading": "top-1, %", "beside": "case == 'exact'"}
    columns = [{"heading": "engine", "cell": "{case}"}]
    assert list(tables.table({"columns": columns, "across": across, "rows": rows}))[2:] == [
        "| exact | 91.00 ± 1.00 |",
        "| int8 | 90.50 ± 1.32 (-0.50) |",
        "| bf16 | 91.50 (+1.50, 1 of 3 seeds) |",
        "| sparse | 81.00 ± 1.41 (-10.50, 1 diverged) |",
    ]
