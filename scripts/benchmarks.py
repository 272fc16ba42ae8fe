"""Measure benchmarks, and write docs/benchmarks.md from their results.

python scripts/benchmarks.py             list the benchmarks
python scripts/benchmarks.py NAME        measure one again: rewrite docs/results/NAME.json and the page
python scripts/benchmarks.py --page      write the page
python scripts/benchmarks.py --check     exit with 1 if the page is not up to date

A file in docs/results declares a benchmark (question, how to read it, commands, columns) and holds what was measured
(date, machine, versions, rows). To add one, write the first half and add its name to SECTIONS below.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import string
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
SECTIONS = {
    "Training": ("demo", "airbench", "cifar10", "accuracy", "sparse-steps"),
    "One rank": ("step", "checkpoint", "loaders", "shrunk-images"),
    "Engines": ("engines", "engines-int8", "powersgd", "ladder", "batches", "profiles", "resnet50-links", "nodes"),
    "Messages": ("collectives", "comm-volume"),
    "Split models": ("layouts", "pipeline"),
}
"""The benchmarks in the order of the page."""

INTRODUCTION = """\
# Benchmarks

<!-- Written by scripts/benchmarks.py from docs/results/*.json: change those. -->

Each table answers one question. Below it are the command, and a link to the JSON file with all
[fields](reference/bench-rows.md) of its rows.

    scripts/benchmarks.sh          # list the benchmarks
    scripts/benchmarks.sh NAME     # measure one again, and rewrite its table

The machine is shared and noisy: compare rows of one table, not times of two. Notes tell
[how much figures vary](notes/measuring.md), [what is left to the limits](notes/limits.md) and
[what was tried](notes/tried.md).
"""
GPUS = """\
## GPUs

One step each was measured [on one GPU](notes/gpu.md), by `scripts/gpu-check.sh`, which takes 8 minutes.
"""
SHOWN = 3
"""At most so many of a benchmark's commands are on the page."""
PACKAGES = ("torch", "torchvision", "nvidia-dali-cuda130", "opencv-python-headless", "mpich")


def names() -> list[str]:
    """Return all benchmarks in the order of the page."""
    return [name for section in SECTIONS.values() for name in section]


def read(name: str) -> dict[str, Any]:
    """Return the declaration and the results of a benchmark."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def write(result: dict[str, Any]) -> None:
    """Write a results file, with each command, column and row on a line of its own."""
    from imagenet_fast.atomic_io import atomic_write_text

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
                power = max(power for power in range(4) if power == 0 or value >= 1024**power)
                return f"{value / 1024**power:g} {('B', 'KB', 'MB', 'GB')[power]}"
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
    parts = [INTRODUCTION]
    for section, benchmarks in SECTIONS.items():
        parts.append(f"## {section}\n")
        parts += [_entry(read(name)) for name in benchmarks]
    return "\n".join([*parts, GPUS])


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
    return "\n".join([*lines, ""])


def wrapped(command: str) -> list[str]:
    """Return a command as lines of at most 110 characters that a shell can read; an option keeps its value."""
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if parts and parts[-1].startswith("--") and " " not in parts[-1] and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) > 107:
            lines[-1] += " \\"
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return lines


@dataclass
class CommandFailed(Exception):
    """A command of a benchmark ended with an exit code other than 0."""

    command: str
    code: int


def measure(name: str) -> dict[str, Any]:
    """Run a benchmark's commands, and return its results with the new rows."""
    result = read(name)
    cases = result.get("cases", [None] * len(result["commands"]))
    load = _Load()
    rows = []
    for command, case in zip(result["commands"], cases, strict=True):
        print(f"$ {command}", flush=True)
        measured = run(command)
        rows += measured if case is None else [{"case": case, **row} for row in measured]
    taken = load.of_others()
    left_out = result.get("left_out", [])
    result |= {"date": date.today().isoformat(), "machine": machine(), "versions": versions()}
    result.pop("conditions", None)
    if taken >= 0.05:
        result["conditions"] = f"Other programs took {100 * taken:.0f} % of the cores meanwhile."
    result["rows"] = [{key: row[key] for key in row if key not in left_out} for row in rows]
    return {**{key: value for key, value in result.items() if key != "rows"}, "rows": result["rows"]}


def run(command: str) -> list[dict[str, Any]]:
    """Run one command, and return its rows: those that `bench --json` writes, or one for each run that was trained."""
    program, *arguments = shlex.split(command)
    words = [sys.executable, "-m", "imagenet_fast"] if program == "imagenet-fast" else [program]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        file, out = Path(folder) / "rows.json", Path(folder) / "out"
        match arguments[0]:
            case "bench":
                arguments += ["--json", str(file)]
            case "train" | "compare":
                arguments += ["--out", str(out)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        code = subprocess.run([*words, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False)
        if code.returncode not in (0, 3):  # 3: trained to the end without reaching the target
            raise CommandFailed(command, code.returncode)
        if file.exists():
            rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
            return rows
        return [trained(outcome.parent) for outcome in sorted(out.glob("**/outcome.json"))]


def trained(folder: Path) -> dict[str, Any]:
    """Return the row of a run: its outcome, the directory's name, the seed and the median time of a step."""
    from imagenet_fast.metrics.report import SETTLING_STEPS, read_run

    past = read_run(folder)
    outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    link_MB = past.by_step("sync", "link_MB", SETTLING_STEPS)
    row = {"run": folder.name, "seed": recipe["seed"], **outcome, "step_s": past.step_s}
    return row | ({"link_MB": fmean(link_MB)} if link_MB else {})


class _Load:
    """The share of the cores that other programs take while commands run.

    A thread looks at this process and all below it, twice a second: ranks end before anybody could ask for their times.
    """

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._own: dict[tuple[int, float], float] = {}
        self._ended = threading.Event()
        self._watch()
        self._before = sum(self._own.values())
        self._busy, self._all = self._cores()
        self._thread = threading.Thread(target=self._watch_on, daemon=True)
        self._thread.start()

    def of_others(self) -> float:
        """Stop looking, and return the share."""
        self._ended.set()
        self._thread.join()
        busy, everything = self._cores()
        own = sum(self._own.values()) - self._before
        return max(0.0, busy - self._busy - own) / (everything - self._all)

    def _watch_on(self) -> None:
        while not self._ended.wait(0.5):
            self._watch()

    def _watch(self) -> None:
        import psutil

        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._own[process.pid, process.create_time()] = times.user + times.system

    @staticmethod
    def _cores() -> tuple[float, float]:
        import psutil

        times = psutil.cpu_times()._asdict()
        waiting = times["idle"] + times.get("iowait", 0.0)
        everything = sum(value for name, value in times.items() if not name.startswith("guest"))
        return everything - waiting, everything


def machine() -> str:
    """Describe the hardware in words."""
    import psutil
    import torch

    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total // 2**30
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return f"{cores} cores ({models[0] if models else platform.machine()}), {memory} GiB, {', '.join(gpus) or 'no GPU'}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def main(arguments: Sequence[str]) -> int:
    """List, measure, write or compare; return the exit code."""
    match arguments:
        case []:
            print("Benchmarks (scripts/benchmarks.sh NAME measures one again):\n")
            for name in names():
                print(f"  {name:16}{read(name)['question']}")
        case ["-h" | "--help"]:
            print(__doc__.replace("python scripts/benchmarks.py", "scripts/benchmarks.sh") if __doc__ else "")
        case ["--page"]:
            PAGE.write_text(page(), encoding="utf-8")
        case ["--check"]:
            if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
                print("docs/benchmarks.md is not up to date; run `scripts/benchmarks.sh --page`", file=sys.stderr)
                return 1
        case [name] if name in names():
            try:
                write(measure(name))
            except CommandFailed as failed:
                print(
                    f"error: `{failed.command}` ended with exit code {failed.code}; nothing was written",
                    file=sys.stderr,
                )
                return failed.code
            PAGE.write_text(page(), encoding="utf-8")
        case [name]:
            print(f"error: there is no benchmark {name}; `scripts/benchmarks.sh` lists them", file=sys.stderr)
            return 2
        case _:
            print("error: give one NAME; `scripts/benchmarks.sh` lists them", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
