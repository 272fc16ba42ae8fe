"""Results of benchmarks, docs/results/NAME.json, and how they are measured again.

A file declares a benchmark (commands, names of their cases, fields to leave out, columns of its table) and holds what
was measured (date, machine, versions, rows).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import asdict
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil
import torch

from imagenet_fast.atomic_io import atomic_write_text
from imagenet_fast.compare.report import summaries
from imagenet_fast.metrics.past_run import read_run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PACKAGES = ("torch", "torchvision", "nvidia-dali-cuda130", "opencv-python-headless")

Row = dict[str, Any]


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


def measure(name: str) -> dict[str, Any]:
    """Run a benchmark's commands, and return its results with the new rows.

    Raises:
        CalledProcessError: A command failed.
    """
    result = read(name)
    cases = result.get("cases", [None] * len(result["commands"]))
    busy_pct, rows = 0.0, []
    for command, case in zip(result["commands"], cases, strict=True):
        busy_pct = max(busy_pct, psutil.cpu_percent(interval=1.0))
        print(f"$ {command}", flush=True)
        named = {} if case is None else {"case": case}
        rows += [
            named | {key: row[key] for key in row if key not in result.get("left_out", ())} for row in run(command)
        ]
    for old in ("conditions", "rows"):
        result.pop(old, None)
    result |= {"date": date.today().isoformat(), "machine": machine(), "versions": versions()}
    if busy_pct >= 5:
        result["conditions"] = f"Other programs took {busy_pct:.0f} % of the cores just before a command."
    return {**result, "rows": rows}


def run(command: str) -> list[Row]:
    """Run one command, and return its rows: those that `bench` and `plan` write, or one for each run of a training."""
    _, *words = shlex.split(command)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        file, out = Path(folder) / "rows.json", Path(folder) / "out"
        place = ("--json", str(file)) if words[0] in ("bench", "plan") else ("--out", str(out))
        done = subprocess.run([sys.executable, "-m", "imagenet_fast", *words, *place], cwd=ROOT, check=False)
        if done.returncode not in (0, 3):  # 3: trained to the end without reaching the target
            raise subprocess.CalledProcessError(done.returncode, command)
        if file.exists():
            rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
            return rows
        return [trained(outcome.parent) for outcome in sorted(out.glob("**/outcome.json"))]


def trained(folder: Path) -> Row:
    """Return the row of a run: its outcome, its summary, the directory's name and the seed."""
    (summary,) = summaries([read_run(folder)])
    outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    row = {**asdict(summary), **outcome, "run": folder.name, "seed": recipe["seed"]}
    del row["folder"]
    return row


def machine() -> str:
    """Describe the hardware in words."""
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
