"""Train the table of docs/convergence.md: does accuracy hold at large batches, and with engines that are not exact?

python -m experiments.convergence            list the runs, and which of them are in runs/convergence
python -m experiments.convergence run [N]    train the others again, at most N of them, one at a time

Each row of docs/results/convergence.json has the command of its run, one `imagenet-fast train`, and is replaced when
that ends. Ctrl-C or SIGTERM stops the run at hand, which saves itself; the same command goes on with it.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from math import nan
from pathlib import Path
from statistics import fmean, stdev

import torch

from imagenet_fast.atomic_io import atomic_directory
from imagenet_fast.data.download import fetch_dataset
from imagenet_fast.distributed.init import computes_bf16
from imagenet_fast.metrics.past_run import read_run
from imagenet_fast.metrics.tables import new_figure
from scripts import results, tables
from scripts.results import ROOT, Row

FOLDER = ROOT / "runs" / "convergence"
PICTURE = tables.CONVERGENCE.with_suffix(".png")
KEPT = ("status", "top1", "top1_mirror", "epochs", "steps", "train_s", "images_per_s", "sent_bytes_per_step")


def hold_out(images: Path, place: Path) -> None:
    """Make ``place`` of CIFAR-10's training images: every tenth of a class is for validation, by links."""
    if place.exists():
        return
    with atomic_directory(place) as made:
        for folder in (images / "train").resolve().iterdir():
            for split in ("train", "val"):
                (made / split / folder.name).mkdir(parents=True)
            for number, file in enumerate(sorted(folder.iterdir())):
                (made / ("train" if number % 10 else "val") / folder.name / file.name).symlink_to(file)


def outcome_of(row: Row) -> Row:
    """Return what the run of a row has come to here; nothing if it has not ended."""
    file = FOLDER / row["run"] / "outcome.json"
    outcome: Row = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    diverged = outcome.get("wrong_from") is not None
    if outcome.get("status") not in ("reached", "finished") and not diverged:
        return {}
    return {key: outcome.get(key) for key in KEPT} | ({"top1": None} if diverged else {})


def train(row: Row) -> Row:
    """Train the run of a row, or go on with it, and return the new row.

    Raises:
        CalledProcessError: The run did not end.
    """
    out = FOLDER / row["run"]
    _, *words = shlex.split(row["command"])
    command = [sys.executable, "-m", "imagenet_fast", *words, "--out", str(out), "--resume", "auto"]
    process = subprocess.Popen(command, cwd=ROOT)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while process.poll() is None:
        with suppress(KeyboardInterrupt):  # it gets that from the terminal itself, and needs a moment to save
            process.wait()
    ended = outcome_of(row)
    if not ended:
        raise subprocess.CalledProcessError(process.returncode, row["command"])
    return row | ended | ({"curve": read_run(out).curve("eval", "top1")[1]} if "curve" in row else {})


def train_again(most: int) -> int:
    """Train at most ``most`` of the runs that have not ended here, and write rows and page; return the exit code.

    Those that have not ended anywhere come first.
    """
    if not computes_bf16(torch.device("cpu")):
        print("the table is of runs in bf16, and this CPU would compute in fp32; train on another", file=sys.stderr)
        return 2
    hold_out(fetch_dataset("cifar10", None, None), FOLDER / "held-out")
    result = results.read("convergence")
    rows = result.pop("rows")
    missing = [number for number, row in enumerate(rows) if not outcome_of(row)]
    for number in sorted(missing, key=lambda number: "status" in rows[number])[:most]:
        print(f"$ {rows[number]['command']}", flush=True)
        try:
            row = train(rows[number])
        except subprocess.CalledProcessError as failed:
            sentence = f"ended with exit code {failed.returncode}; the same command goes on with it"
            print(f"{rows[number]['run']} {sentence}", file=sys.stderr)
            return failed.returncode
        about = {"date": date.today().isoformat(), "machine": results.machine()}
        rows[number] = row | about
        results.write({**result, **about, "versions": results.versions(), "rows": rows})
        tables.write([tables.CONVERGENCE])
        draw(rows)
    return 0


def draw(rows: Sequence[Row]) -> None:
    """Draw top-1 over the batch, with bars of a standard deviation, and over the epochs."""
    figure = new_figure(11, 4)
    left, right = figure.subplots(1, 2)
    optimizers, styles = ("sgd", "lars", "larc"), {256: "-", 2048: "--", 8192: ":"}
    judged = [row for row in rows if row["group"] == "batches" and row.get("top1") is not None]
    batches = sorted({row["batch"] for row in judged})
    for case in optimizers:
        tops = {
            batch: [row["top1"] for row in judged if (row["case"], row["batch"]) == (case, batch)] for batch in batches
        }
        bars = [stdev(some) if len(some) > 1 else 0.0 for some in tops.values()]
        means = [fmean(some) if some else nan for some in tops.values()]
        left.errorbar(batches, means, bars, marker="o", markersize=4, capsize=3, label=case.upper())
    left.set_xscale("log", base=2)
    left.set_xticks(batches, [f"{batch}" for batch in batches])
    left.set_xlabel("batch")
    for row in (row for row in rows if row["group"] == "curves"):
        colour, label = f"C{optimizers.index(row['case'])}", f"{row['case'].upper()}, {row['batch']}"
        right.plot(range(1, len(row["curve"]) + 1), row["curve"], styles[row["batch"]], color=colour, label=label)
    right.set_xlabel("epoch")
    for axes in (left, right):
        axes.set_ylabel("top-1 (%)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(PICTURE)


def main(arguments: Sequence[str]) -> int:
    """List or train; return the exit code."""
    match arguments:
        case []:
            for row in results.read("convergence")["rows"]:
                print(f"{'here   ' if outcome_of(row) else 'missing'}  {row['run']}")
        case ["run"]:
            return train_again(1000)
        case ["run", count] if count.isdecimal():
            return train_again(int(count))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
