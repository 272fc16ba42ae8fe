"""docs/results, the page that is made of it, and the figures that other pages quote."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from imagenet_fast.bench.collectives import AllReduceTime
from imagenet_fast.bench.comm_volume import Count
from imagenet_fast.bench.dataloaders import LoadingRate
from imagenet_fast.bench.engines import EngineTime
from imagenet_fast.bench.pipeline import PipelineTime
from imagenet_fast.bench.presets import BatchRow, Rung
from imagenet_fast.bench.train_step import StepTime
from imagenet_fast.cli.main import app
from imagenet_fast.metrics.run_result import RunResult
from tests.pages import ROOT, import_script

benchmarks = import_script("benchmarks")
RESULTS = {name: benchmarks.read(name) for name in benchmarks.names()}
every_result = pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [ROOT / "scripts" / "benchmarks.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_benchmarks_page_is_current():
    done = script("--check")
    assert done.returncode == 0, done.stderr


def test_every_results_file_is_on_the_page():
    own_page = {"convergence"}
    assert {path.stem for path in benchmarks.RESULTS.glob("*.json")} == set(RESULTS) | own_page
    questions = [result["question"] for result in RESULTS.values()]
    assert len(set(questions)) == len(questions)


@every_result
def test_results_file_has_what_the_page_needs(result: dict[str, Any]):
    for key in ("name", "question", "reading", "commands", "columns", "date", "machine", "versions", "rows"):
        assert result.get(key), key
    assert result["question"].endswith("?")
    assert result["reading"].endswith(".")
    assert date.fromisoformat(result["date"])
    assert "torch" in result["versions"]
    assert len(result.get("cases", result["commands"])) == len(result["commands"])
    if "figure" in result:
        assert (ROOT / "docs" / result["figure"]["file"]).is_file()


@every_result
def test_commands_are_ones_that_the_program_takes(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    for text in result["commands"]:
        program, *words = shlex.split(text)
        assert program == "imagenet-fast"
        command: Any = typer.main.get_command(app)
        while below := getattr(command, "commands", None):
            command = below[words.pop(0)]
        command.make_context(text, words)  # parses, and runs nothing


@every_result
def test_rows_have_the_fields_of_their_command(result: dict[str, Any]):
    fields = {"case"}
    for command in result["commands"]:
        fields |= fields_of(shlex.split(command))
    for row in result["rows"]:
        assert set(paths(row)) <= fields, sorted(set(paths(row)) - fields)


def fields_of(command: list[str]) -> set[str]:
    """The fields of the rows that a command gives."""
    match command[1:]:
        case ["bench", "sync", *options]:
            chosen: dict[str, type] = {"--count": Count, "--ladder": Rung, "--batches": BatchRow}
            return fields_in(next((row for option, row in chosen.items() if option in options), EngineTime))
        case ["bench", name, *_]:
            rows = {"step": StepTime, "data": LoadingRate, "collectives": AllReduceTime, "pipeline": PipelineTime}
            return fields_in(rows[name])
        case ["train" | "compare", *_]:
            return {*fields_in(RunResult), "run", "seed", "step_s", "link_MB"}
        case _:
            return set()


def fields_in(row: type) -> set[str]:
    """The fields of a dataclass, and of those inside it."""
    found = set()
    hints = get_type_hints(row)
    for field in dataclasses.fields(row):
        inner = hints[field.name]
        below = fields_in(inner) if dataclasses.is_dataclass(inner) else set()
        found |= {f"{field.name}.{name}" for name in below} or {field.name}
    return found


def paths(row: dict[str, Any]) -> list[str]:
    """The names of a row's values, with a dot between an object and what is in it."""
    return [
        path
        for name, value in row.items()
        for path in ([f"{name}.{inner}" for inner in paths(value)] if isinstance(value, dict) else [name])
    ]


# -- figures on other pages -------------------------------------------------------------------------------------------

QUOTES: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "README.md",
        "{top1_shift:.2f} % top-1 after {time_to_accuracy_s:.0f} s",
        "airbench",
        {"target_top1": 94.0},
    ),
    ("README.md", "without it, {top1:.2f} %", "airbench", {"target_top1": 94.0}),
    ("README.md", "Target reached: top-1 {top1:.2f} % of 97 % after {epochs} epochs.", "demo", {}),
    ("README.md", "time to accuracy {time_to_accuracy_s:.1f} s", "demo", {}),
    ("docs/engines.md", "{ratio_to_plain:x.1f} % longer", "step", {"loop": "ours, lazy"}),
    (
        "docs/layouts.md",
        "32 images a rank | {step_s:.3f} |",
        "layouts",
        {"run": "dp4", "case": "32 images of 224 pixels"},
    ),
    ("docs/layouts.md", "| {step_s:.3f} | | 128", "layouts", {"run": "tp4", "case": "32 images of 224 pixels"}),
    ("docs/layouts.md", "a node sent {link_MB:.0f}", "layouts", {"run": "dp4", "case": "32 images of 224 pixels"}),
    ("docs/layouts.md", "and {link_MB:.0f} MB", "layouts", {"run": "tp4", "case": "32 images of 224 pixels"}),
    (
        "docs/layouts.md",
        "128 images a rank | {step_s:.3f} |",
        "layouts",
        {"run": "dp4", "case": "128 images of 224 pixels"},
    ),
    (
        "docs/layouts.md",
        "| {step_s:.3f} | | 32 images a rank of 64",
        "layouts",
        {"run": "tp4", "case": "128 images of 224 pixels"},
    ),
    ("docs/layouts.md", "of the work | {step_s:.3f} |", "layouts", {"run": "dp4", "case": "32 images of 64 pixels"}),
    ("docs/layouts.md", "| {step_s:.3f} | With", "layouts", {"run": "tp4", "case": "32 images of 64 pixels"}),
]
"""A page, words on it with fields of a row, the benchmark, and which row: the first that has these values."""

TARGETS = {"README.md": {"97 %", "4 s"}, "docs/engines.md": {"62 %", "27 %", "1.4 s"}}
"""Figures that nobody measures: accuracies to reach, layers' shares of a model, options of a command, an example."""


def quoted(words: str, name: str, chosen: dict[str, Any]) -> str:
    """The words with the figures of the row."""
    text: str = benchmarks.cell(words, next(row for row in RESULTS[name]["rows"] if chosen.items() <= row.items()))
    return text


@pytest.mark.parametrize(("page", "words", "name", "chosen"), QUOTES)
def test_quoted_figure_is_in_the_results(page: str, words: str, name: str, chosen: dict[str, Any]):
    text = " ".join((ROOT / page).read_text().split())
    assert quoted(words, name, chosen) in text


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/engines.md", "docs/layouts.md"])
def test_no_figure_is_quoted_without_its_result(page: str):
    text = " ".join((ROOT / page).read_text().split())
    for on, *quote in QUOTES:
        text = text.replace(quoted(*quote), "") if on == page else text
    assert set(re.findall(r"[\d.]*\d (?:%|s|ms|MB|images/s|img/s)(?![\w/])", text)) <= TARGETS.get(page, set())


# -- the script -------------------------------------------------------------------------------------------------------


def test_without_a_name_benchmarks_are_listed():
    done = script()
    assert done.returncode == 0
    for name, result in RESULTS.items():
        assert f"{name} " in done.stdout
        assert result["question"] in done.stdout


def test_an_unknown_benchmark_is_one_sentence():
    done = script("no-such")
    assert done.returncode == 2
    assert done.stderr == "error: there is no benchmark no-such; `scripts/benchmarks.sh` lists them\n"
    assert not done.stdout


def test_measuring_rewrites_rows_and_keeps_the_declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    declared = {
        "name": "kernels", "question": "How many?", "reading": "Count.", "cases": ["of ResNet-18"],
        "commands": ["imagenet-fast bench kernels --model resnet18"], "left_out": ["device_s"],
        "columns": [{"heading": "tensors", "cell": "{tensors:d}"}],
        "date": "2020-01-01", "machine": "", "versions": {}, "conditions": "once", "rows": [],
    }  # fmt: skip
    monkeypatch.setattr(benchmarks, "RESULTS", tmp_path)
    benchmarks.write(declared)
    benchmarks.write(benchmarks.measure("kernels"))
    measured = benchmarks.read("kernels")
    assert list(measured)[-1] == "rows"
    assert {key: measured[key] for key in ("question", "commands", "columns")} == {
        key: declared[key] for key in ("question", "commands", "columns")
    }
    assert measured["date"] == date.today().isoformat()
    assert measured["versions"]["Python"]
    assert measured.get("conditions") != "once"
    assert {row["case"] for row in measured["rows"]} == {"of ResNet-18"}
    assert {row["tensors"] for row in measured["rows"]} == {62}
    assert all("device_s" not in row for row in measured["rows"])


def test_a_command_that_fails_leaves_the_results_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.setattr(benchmarks, "RESULTS", tmp_path)
    benchmarks.write({**RESULTS["step"], "commands": ["imagenet-fast bench step --model none"]})
    before = (tmp_path / "step.json").read_bytes()
    assert benchmarks.main(["step"]) == 2
    assert "ended with exit code 2; nothing was written" in capfd.readouterr().err
    assert (tmp_path / "step.json").read_bytes() == before


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
    cells = ["{s:m.1f}", "{bytes:M.2f}", "{ratio:x+.1f}", "{none:.3f}", "{sizes:M.0f}", "{in[side]:d}", "{absent:d}"]
    assert [benchmarks.cell(cell, row) for cell in cells] == ["12.5", "2.50", "+1.4", "–", "1 2", "2", ""]
    assert [benchmarks.cell("{bytes:B}", {"bytes": size}) for size in (0, 2048, 64 << 20)] == ["0 B", "2 KB", "64 MB"]


def test_rows_across_share_a_line():
    result = {
        "columns": [{"heading": "engine", "cell": "{engine}"}, {"heading": "empty", "cell": "{absent}"}],
        "across": {"heading": "seed {seed}", "cell": "{top1:.1f}"}, "mean": {"field": "top1", "format": ".2f"},
        "rows": [{"engine": "a", "seed": 1, "top1": 1.0}, {"engine": "a", "seed": 2, "top1": 2.0},
                 {"engine": "b", "seed": 2, "top1": 4.0}],
    }  # fmt: skip
    assert list(benchmarks.table(result)) == [
        "| engine | seed 1 | seed 2 | mean |",
        "|---|--:|--:|--:|",
        "| a | 1.0 | 2.0 | 1.50 |",
        "| b |  | 4.0 | 4.00 |",
    ]


@every_result
def test_long_commands_are_wrapped_for_a_shell(result: dict[str, Any]):
    for command in result["commands"]:
        lines = benchmarks.wrapped(command)
        assert max(map(len, lines)) <= 112
        assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)
