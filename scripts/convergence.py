"""Train the table of docs/convergence.md: does accuracy hold at large batches, and with engines that are not exact?

python scripts/convergence.py            list the runs, which of them are missing, and the hours that these need
python scripts/convergence.py run [N]    train the missing ones, at most N of them, one at a time
python scripts/convergence.py --page     write the page and its picture from the rows
python scripts/convergence.py --check    exit with 1 if the page is not up to date

Each run is one `imagenet-fast train`. Its row goes to docs/results/convergence.json when it ends. Ctrl-C or SIGTERM
stops the run at hand, which saves itself; the same command goes on with it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import benchmarks
from convergence_plan import (
    BATCHES,
    ENGINES,
    ENGINES_AT,
    FOLDER,
    HELD_OUT,
    OPTIMIZERS,
    SEEDS,
    SMALL,
    TUNED,
    Row,
    Run,
    command,
    plan,
    rates,
    tried_rates,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "convergence.md"
PICTURE = PAGE.with_suffix(".png")


def hold_out(images: Path, place: Path) -> None:
    """Make ``place`` of CIFAR-10's training images: every tenth of a class is for validation, by links."""
    if place.exists():
        return
    made = place.with_name(f"{place.name}.part")
    for folder in sorted((images / "train").resolve().iterdir()):
        for split in ("train", "val"):
            (made / split / folder.name).mkdir(parents=True, exist_ok=True)
        for number, file in enumerate(sorted(folder.iterdir())):
            link = made / ("train" if number % 10 else "val") / folder.name / file.name
            if not link.is_symlink():
                link.symlink_to(file)
    made.rename(place)


def train(run: Run, text: str) -> tuple[int, Row | None]:
    """Train a run or go on with it; return the exit code, and its row if it has ended."""
    out = f"{FOLDER}/{run.name}"
    _, *words = shlex.split(text)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "imagenet_fast", *words, "--out", out, "--resume", "auto"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    # It gets Ctrl-C from the terminal itself, and needs a moment to save.
    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    code = process.wait()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    file = ROOT / out / "outcome.json"
    outcome = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    diverged = code == 1 and outcome.get("wrong_from") is not None
    if code not in (0, 3) and not diverged:
        return code, None
    row = row_of(run, text, {**outcome, "top1": None} if diverged else outcome)
    return 0, row | ({"curve": curve(ROOT / out)} if run.group == "curves" else {})


def curve(folder: Path) -> list[float]:
    """Return top-1 after every epoch of a run."""
    events = map(json.loads, (folder / "events.jsonl").read_text(encoding="utf-8").splitlines())
    tops = {event["epoch"]: event["top1"] for event in events if event["event"] == "eval"}
    return [tops[epoch] for epoch in sorted(tops)]


def row_of(run: Run, text: str, outcome: Row) -> Row:
    """Return the row of a run; ``top1`` is None if it diverged."""
    kept = ("status", "top1", "top1_mirror", "epochs", "steps", "train_s", "images_per_s", "sent_bytes_per_step")
    about = {"run": run.name, "group": run.group, "case": run.case, "batch": run.batch, "rate": run.rate}
    return {**about, "seed": run.seed, **{key: outcome.get(key) for key in kept}, "command": text}


def train_missing(most: int) -> int:
    """Train missing runs, at most ``most``, and write each row and the page; return the exit code."""
    import torch

    from imagenet_fast.data.download import fetch_dataset
    from imagenet_fast.distributed.init import computes_bf16

    if not computes_bf16(torch.device("cpu")):
        print("the table is of runs in bf16, and this CPU would compute in fp32; train on another", file=sys.stderr)
        return 2
    hold_out(fetch_dataset("cifar10", None, None), ROOT / HELD_OUT)
    while most > 0:
        result = benchmarks.read("convergence")
        rows = current(result.pop("rows"))
        there = {row["run"] for row in rows}
        missing = ((run, command(run, rows)) for run in plan(rows) if run.name not in there)
        run, text = next(((run, text) for run, text in missing if text is not None), (None, None))
        if run is None or text is None:
            break
        most -= 1
        print(f"$ {text}", flush=True)
        code, row = train(run, text)
        if row is None:
            print(f"{run.name} ended with exit code {code}; the same command goes on with it", file=sys.stderr)
            return code
        about = {"date": date.today().isoformat(), "machine": benchmarks.machine()}
        rows.append(row | about)
        benchmarks.write({**result, **about, "versions": benchmarks.versions(), "rows": rows})
        write_page()
    return 0


def current(rows: list[Row]) -> list[Row]:
    """Return the rows without those that had another rate than the one that was chosen since; remove their runs."""
    commands = {run.name: command(run, rows) for run in plan(rows)}
    kept = [row for row in rows if commands.get(row["run"]) in (None, row["command"])]
    for row in rows:
        if row not in kept:
            shutil.rmtree(ROOT / FOLDER / row["run"], ignore_errors=True)
    return kept


def cell(rows: Sequence[Row]) -> str:
    """Return mean and standard deviation of top-1 over seeds, with the number of runs until there are all."""
    there = [row["top1"] for row in rows if row["top1"] is not None]
    lost = len(rows) - len(there)
    if not rows:
        return "not run yet"
    text = f"{fmean(there):.2f}" if there else ""
    if len(there) > 1:
        text += f" ± {stdev(there):.2f}"
    notes = [f"{len(rows)} of {len(SEEDS)} seeds"] if len(rows) < len(SEEDS) else []
    notes += [f"{lost} diverged"] if lost else []
    return f"{text} ({', '.join(notes)})".strip() if notes else text


def difference(rows: Iterable[Row], exact: Iterable[Row]) -> str:
    """Return by how many points top-1 differs from that of ``exact``, the mean over the seeds that both have."""
    tops = {row["seed"]: row["top1"] for row in exact}
    apart = [row["top1"] - tops[row["seed"]] for row in rows if None not in (row["top1"], tops.get(row["seed"]))]
    return f"{fmean(apart):+.2f}" if apart else ""


def share(rows: Iterable[Row], exact: Iterable[Row]) -> str:
    """Return what share of the bytes of ``exact`` the rows sent in all steps, in percent."""
    sent, whole = ([row["sent_bytes_per_step"] for row in some] for some in (rows, exact))
    return f"{100 * fmean(sent) / fmean(whole):.0f}" if sent and whole else ""


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with all columns to the left."""
    return "\n".join(benchmarks.markdown(headings, lines, [""] * len(headings)))


def learning_rate(row: Row) -> str:
    """Return the learning rate in the command of a run, at most two decimals."""
    (rate,) = re.findall(r"\blr=([^,}]+)", row["command"])
    return f"{round(float(rate), 2):g}" if float(rate) >= 1 else rate


def machines(rows: Iterable[Row]) -> str:
    """Return the processors that the rows were trained on, each with its number of rows."""
    counts = Counter(row["machine"].split("),")[0] + ")" for row in rows if "machine" in row)
    return ", ".join(f"{count} on {machine}" for machine, count in counts.most_common())


def page(rows: list[Row]) -> str:
    """Return the page."""

    def of(group: str, case: str, batch: int) -> list[Row]:
        return [row for row in rows if (row["group"], row["case"], row["batch"]) == (group, case, batch)]

    def tries(case: str, batch: int) -> str:
        tried = tried_rates(rows, case, batch)
        tops = {rate: f"{tried[rate]:.2f}" if rate in tried else "not run yet" for rate in rates(rows, case, batch)}
        return ", ".join(f"{rate:g}: {top}" for rate, top in tops.items())

    def first(values: Iterable[str]) -> str:
        return next(iter(values), "not run yet")

    def small(case: str) -> list[str]:
        found = of("small", case, 256)
        epochs = first(f"{row['epochs']}" for row in found)
        return [case, epochs, first(f"{row['train_s']:.0f}" for row in found if row["seed"] == 1), cell(found)]

    def settings(batch: int) -> list[str]:
        each = [of("batches", case, batch) for case in OPTIMIZERS]
        steps = first(f"{row['steps']}" for found in each for row in found)
        return [f"{batch}", steps, *(first(map(learning_rate, found)) for found in each)]

    counted, all_runs = len(rows), len(plan(rows))
    state = f"{counted} of {all_runs} runs have been trained: {machines(rows)}." if rows else NOTHING
    exact = of("batches", "sgd", ENGINES_AT)
    others = ((case, of("engines", case, ENGINES_AT)) for case in ENGINES)
    engines = [["bf16, exact", cell(exact), "", "100" if exact else ""]]
    engines += [[case, cell(found), difference(found, exact), share(found, exact)] for case, found in others]
    parts = {
        "STATE": state,
        "PICTURE": f"\n![Top-1 over batch and epochs]({PICTURE.name})\n" if drawn(rows) else "",
        "BATCHES": table(
            ["batch", "SGD", "LARS", "LARC"],
            ([f"{batch}", *(cell(of("batches", case, batch)) for case in OPTIMIZERS)] for batch in BATCHES),
        ),
        "SETTINGS": table(
            ["batch", "steps", *(f"{case.upper()}'s learning rate" for case in OPTIMIZERS)], map(settings, BATCHES)
        ),
        "ENGINES": table(
            ["engine, wire dtype", "top-1, %", "minus bf16, same seeds, points", "bytes beside bf16, %"], engines
        ),
        "RATES": table(
            ["optimizer", *(f"batch {batch}" for batch in TUNED)],
            ([case.upper(), *(tries(case, batch) for batch in TUNED)] for case in OPTIMIZERS),
        ),
        "SMALL": table(["recipe", "epochs", "seed 1, s", "top-1, %"], map(small, ("mild", "plain"))),
        "EPOCHS": equal_time(rows),
        "COMMAND": example(rows),
    }
    text = TEXT
    for word, part in parts.items():
        text = text.replace(f"{{{word}}}", part)
    return text


def equal_time(rows: Iterable[Row]) -> str:
    """Return how the epochs of the plain recipe were chosen, and how long they took."""
    timed = {row["case"]: row for row in rows if row["group"] == "small" and row["seed"] == 1}
    if not timed.keys() >= SMALL.keys():
        return "The plain recipe trains the fewest epochs that take at least as long as mild's."
    mild, probe, plain = (timed[case] for case in SMALL)
    return textwrap.fill(
        "The plain recipe trains the fewest epochs that should take at least as long as mild's "
        f"{mild['epochs']}. An epoch timed before took {probe['train_s']:.0f} s, so these are {plain['epochs']}. In "
        f"the run they took {plain['train_s'] / plain['epochs']:.0f} s each: the plain recipe had "
        f"{100 * plain['train_s'] / mild['train_s'] - 100:.0f} % more time. Seeds 2 and 3 trained beside other "
        "programs, so only seed 1's times are shown.",
        width=120,
    )


def example(rows: list[Row]) -> str:
    """Return the command of the first cell, or of the first run to be trained, as lines of the page."""
    of_cells = [row["command"] for row in rows if row["group"] == "batches"]
    text: str = next(iter(of_cells), None) or command(plan()[0], []) or ""
    return "\n".join(f"    {line}" for line in benchmarks.wrapped(text))


def drawn(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the picture's first part."""
    return [row for row in rows if row["group"] == "batches" and row["top1"] is not None]


def draw(rows: list[Row]) -> None:
    """Draw top-1 over the batch and over the epochs."""
    from imagenet_fast.metrics.plots import new_figure

    curves = [row for row in rows if row["group"] == "curves" and row["curve"]]
    figure = new_figure(PICTURE, 11 if curves else 7, 4)
    parts = figure.subplots(1, 2 if curves else 1, squeeze=False)[0]
    draw_batches(parts[0], drawn(rows))
    if curves:
        draw_curves(parts[1], curves)
    for axes in parts:
        axes.set_ylabel("top-1 (%)")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(PICTURE)


def draw_batches(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw top-1 over the batch: the mean of each optimizer, with bars of a standard deviation."""
    for case in OPTIMIZERS:
        tops = {
            batch: [row["top1"] for row in rows if (row["case"], row["batch"]) == (case, batch)] for batch in BATCHES
        }
        tops = {batch: some for batch, some in tops.items() if some}
        bars = [stdev(some) if len(some) > 1 else 0.0 for some in tops.values()]
        if tops:
            means = list(map(fmean, tops.values()))
            axes.errorbar(list(tops), means, bars, marker="o", markersize=4, capsize=3, label=case.upper())
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [f"{batch}" for batch in BATCHES])
    axes.set_xlabel("batch")


def draw_curves(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw top-1 after each epoch: a colour for each optimizer, a line style for each batch."""
    for row in rows:
        epochs = range(1, len(row["curve"]) + 1)
        colour = f"C{list(OPTIMIZERS).index(row['case'])}"
        style = ("-", "--", ":")[TUNED.index(row["batch"])]
        axes.plot(epochs, row["curve"], style, color=colour, label=f"{row['case'].upper()}, {row['batch']}")
    axes.set_xlabel("epoch")


def write_page() -> None:
    """Write the page from the rows, and its picture if there is anything to draw."""
    rows = benchmarks.read("convergence")["rows"]
    PAGE.write_text(page(rows), encoding="utf-8")
    if drawn(rows):
        draw(rows)


NOTHING = "Nothing has been trained for this page yet."
TEXT = (Path(__file__).parent / "convergence.md").read_text(encoding="utf-8")
"""The page, with a word in braces where a table goes."""


def main(arguments: Sequence[str]) -> int:
    """List, train, write or compare; return the exit code."""
    match arguments:
        case []:
            rows = benchmarks.read("convergence")["rows"]
            there, runs = {row["run"] for row in rows}, plan(rows)
            missing = [run for run in runs if run.name not in there]
            for run in runs:
                print(f"{'done   ' if run.name in there else 'missing'}  {run.name}")
            hours = sum(run.seconds for run in missing) / 3600
            print(f"{len(missing)} of {len(runs)} runs are missing: about {hours:.1f} hours on two cores")
        case ["run"]:
            return train_missing(1000)
        case ["run", count] if count.isdecimal():
            return train_missing(int(count))
        case ["--page"]:
            write_page()
        case ["--check"]:
            if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page(benchmarks.read("convergence")["rows"]):
                print(f"{PAGE.name} is not up to date; run `python scripts/convergence.py --page`", file=sys.stderr)
                return 1
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
