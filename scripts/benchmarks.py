"""Measure benchmarks, and write docs/benchmarks.md from their results.

python scripts/benchmarks.py             list the benchmarks
python scripts/benchmarks.py NAME        measure one again: rewrite docs/results/NAME.json and the page
python scripts/benchmarks.py --page      write the page
python scripts/benchmarks.py --check     exit with 1 if the page is not up to date

A file in docs/results declares a benchmark (question, how to read it, commands, columns) and holds what was measured
(date, machine, versions, rows). To add one, write the first half, and its name into benchmarks.md.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import string
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from statistics import fmean
from typing import Any

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.units import size_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
TEMPLATE = Path(__file__).with_suffix(".md")  # a line {NAME} stands for a benchmark
SHOWN = 3  # of a benchmark's commands at most so many are on the page
PACKAGES = ("torch", "torchvision", "nvidia-dali-cuda130", "opencv-python-headless", "mpich")


def names() -> list[str]:
    """Return all benchmarks in the order of the page."""
    return re.findall(r"^\{([\w-]+)\}$", TEMPLATE.read_text(encoding="utf-8"), re.MULTILINE)


def read(name: str) -> dict[str, Any]:
    """Return the declaration and the results of a benchmark."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def write(result: dict[str, Any]) -> None:
    """Write a results file, with each command, column and row on a line of its own."""

    def lines(value: Any) -> str:
        if not isinstance(value, list):
            return json.dumps(value, ensure_ascii=False)
        return "[\n" + ",\n".join(f"    {json.dumps(inner, ensure_ascii=False)}" for inner in value) + "\n  ]"

    text = ",\n".join(f"  {json.dumps(key)}: {lines(value)}" for key, value in result.items())
    # whoever stops this in between leaves the old rows
    atomic_write_text(RESULTS / f"{result['name']}.json", f"{{\n{text}\n}}\n", shared=True)


class _Cell(string.Formatter):
    """Format a row into a cell: ``{step_s:.3f}``, ``{time[step_s]:.3f}``.

    A format may begin with a unit: ``m`` counts thousandths, ``M`` millions, and ``x`` the percent above 1. ``B`` alone
    writes a size in bytes as nccl-tests does. A list is shown with spaces, and None as a dash.
    """

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return "–"
        if isinstance(value, list):
            return " ".join(self.format_field(inner, spec) for inner in value)
        match spec[:1]:
            case "m":
                return format(1e3 * value, spec[1:])
            case "M":
                return format(1e-6 * value, spec[1:])
            case "x":
                return format(100 * (value - 1), spec[1:])
            case "B":
                return size_text(value)
            case _:
                return format(value, spec).replace("%", " %")


def cell(template: str, row: dict[str, Any]) -> str:
    """Return the text of a cell; it is empty if the row does not have the field."""
    try:
        return _Cell().vformat(template, (), row)
    except KeyError:
        return ""


def table(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a benchmark's table; a column that is empty in all rows is left out.

    With ``across``, rows that agree in all columns share a line, and each has a cell there in the column of its own.
    """
    across = result.get("across")
    columns = [column for column in result["columns"] if any(cell(column["cell"], row) for row in result["rows"])]
    headings = [column["heading"] for column in columns]
    lines: dict[Any, list[dict[str, Any]]] = {}
    for number, row in enumerate(result["rows"]):
        cells = tuple(cell(column["cell"], row) for column in columns)
        lines.setdefault(cells if across else (number, cells), []).append(row)
    if not across:
        yield from markdown(headings, (cells for _, cells in lines), [column["cell"] for column in columns])
        return
    wide = list(dict.fromkeys(cell(across["heading"], row) for row in result["rows"]))
    mean = result.get("mean")
    body = []
    for cells, rows in lines.items():
        found = {cell(across["heading"], row): cell(across["cell"], row) for row in rows}
        means = [format(fmean(row[mean["field"]] for row in rows), mean["format"])] if mean else []
        body.append([*cells, *(found.get(heading, "") for heading in wide), *means])
    headings += [*wide, *(["mean"] if mean else [])]
    yield from markdown(headings, body, [column["cell"] for column in columns] + [":"] * (len(wide) + bool(mean)))


def markdown(headings: Sequence[str], rows: Any, templates: Sequence[str]) -> Iterator[str]:
    """Yield a Markdown table; columns of numbers, whose templates have a format, stand to the right."""
    yield f"| {' | '.join(headings)} |"
    yield f"|{'|'.join('--:' if ':' in template else '---' for template in templates)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def page() -> str:
    """Return the page of all benchmarks."""
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"^\{([\w-]+)\}$", lambda found: _entry(read(found[1])), template, flags=re.MULTILINE)


def _entry(result: dict[str, Any]) -> str:
    """Return a benchmark's part of the page."""
    lines = [f"### {result['question']}", "", result["reading"], "", *table(result), ""]
    if "figure" in result:
        lines += [f"![{result['figure']['text']}]({result['figure']['file']})", ""]
    lines.append("<!-- run: not here -->")  # what tests/e2e/test_pages.py is to do with commands that take hours
    lines += [f"    {line}" for command in result["commands"][:SHOWN] for line in wrapped(command)]
    if more := result["commands"][SHOWN:]:
        lines.append(f"    # and {len(more)} more in docs/results/{result['name']}.json")
    when = date.fromisoformat(result["date"])
    source = f"[`{result['name']}`](results/{result['name']}.json)"
    seen = f"{source}, {when.day} {when:%B %Y}, torch {result['versions']['torch']}, {result['machine']}."
    lines += ["", " ".join(filter(None, [seen, result.get("conditions")]))]
    return "\n".join(lines)


def wrapped(command: str) -> list[str]:
    """Return a command as lines of at most 110 characters that a shell can read; an option keeps its value."""
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if parts and re.fullmatch(r"--\S+", parts[-1]) and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) > 107:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {part}"
    return lines


def measure(name: str) -> dict[str, Any]:
    """Run a benchmark's commands, and return its results with the new rows.

    Raises:
        CalledProcessError: A command failed.
    """
    import psutil

    result = read(name)
    cases = result.get("cases", [None] * len(result["commands"]))
    left_out = result.get("left_out", [])
    busy_pct, rows = 0.0, []
    for command, case in zip(result["commands"], cases, strict=True):
        busy_pct = max(busy_pct, psutil.cpu_percent(interval=1.0))
        print(f"$ {command}", flush=True)
        measured = [{key: row[key] for key in row if key not in left_out} for row in run(command)]
        rows += measured if case is None else [{"case": case, **row} for row in measured]
    result |= {"date": date.today().isoformat(), "machine": machine(), "versions": versions()}
    result.pop("conditions", None)
    if busy_pct >= 5:
        result["conditions"] = f"Other programs took {busy_pct:.0f} % of the cores just before a command."
    result.pop("rows", None)
    return {**result, "rows": rows}


def run(command: str) -> list[dict[str, Any]]:
    """Run one command, and return its rows: those that `bench --json` writes, or one for each run that was trained."""
    words = shlex.split(command)
    if words[0] == "imagenet-fast":
        words[:1] = [sys.executable, "-m", "imagenet_fast"]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        file, out = Path(folder) / "rows.json", Path(folder) / "out"
        words += ["--json", str(file)] if "bench" in words else ["--out", str(out)]
        done = subprocess.run(words, cwd=ROOT, check=False)
        if done.returncode not in (0, 3):  # 3: trained to the end without reaching the target
            raise subprocess.CalledProcessError(done.returncode, command)
        if file.exists():
            rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
            return rows
        return [trained(outcome.parent) for outcome in sorted(out.glob("**/outcome.json"))]


def trained(folder: Path) -> dict[str, Any]:
    """Return the row of a run: its outcome, the directory's name, the seed and the median time of a step."""
    from imagenet_fast.metrics.past_run import SETTLING_STEPS, read_run

    past = read_run(folder)
    outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    link_MB = past.by_step("sync", "link_MB", SETTLING_STEPS)
    row = {"run": folder.name, "seed": recipe["seed"], **outcome, "step_s": past.step_s}
    return row | ({"link_MB": fmean(link_MB)} if link_MB else {})


def machine() -> str:
    """Describe the hardware in words."""
    import psutil
    import torch

    cpus = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", cpus.read_text(encoding="utf-8") if cpus.exists() else "", re.MULTILINE)
    memory = psutil.virtual_memory().total // 2**30
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    cpu = model[1] if model else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores ({cpu}), {memory} GiB, {', '.join(gpus) or 'no GPU'}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    found = {package.metadata["Name"]: package.version.partition("+")[0] for package in distributions()}
    return {"Python": platform.python_version()} | {name: found[name] for name in PACKAGES if name in found}


def main(arguments: Sequence[str]) -> int:
    """List, measure, write or compare; return the exit code."""
    match arguments:
        case []:
            print("Benchmarks (python scripts/benchmarks.py NAME measures one again):\n")
            for name in names():
                print(f"  {name:16}{read(name)['question']}")
        case ["--page"]:
            PAGE.write_text(page(), encoding="utf-8")
        case ["--check"]:
            if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
                print(
                    "docs/benchmarks.md is not up to date; run `python scripts/benchmarks.py --page`", file=sys.stderr
                )
                return 1
        case [name] if name in names():
            try:
                write(measure(name))
            except subprocess.CalledProcessError as failed:
                sentence = f"`{failed.cmd}` ended with exit code {failed.returncode}; nothing was written"
                print(f"error: {sentence}", file=sys.stderr)
                return failed.returncode
            PAGE.write_text(page(), encoding="utf-8")
        case _:
            asked = " ".join(arguments)
            print(f"error: there is no benchmark {asked}; `python scripts/benchmarks.py` lists them", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
