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
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import benchmarks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "convergence.md"
PICTURE = PAGE.with_suffix(".png")
FOLDER = "runs/convergence"
HELD_OUT = f"{FOLDER}/held-out"

BATCHES = (256, 1024, 2048, 4096, 8192, 16384)
TUNED = (256, 2048, 8192)
"""Batches at which rates are tried; the others take the rate of the nearest one, by the scaling rule."""
SEEDS = (1, 2, 3)
EPOCHS = 8
IMAGES, LEFT = 50_000, 45_000
"""Training images, and those that are left while rates are tried."""
IMAGES_PER_S, START_S = 1550, 20
"""Speed of the network on two cores, and the time to start and to evaluate; only for the hours of the list."""
SMALL_S = 700
"""About the time of a run of ResNet-18, by README's first run."""

NETWORK = (
    f"epochs={EPOCHS}", "micro_batch=128", f"first_eval={EPOCHS}", "target_top1=100", "target_mirrored=false",
    "ema_decay=0", "schedule.warmup_epochs=2", "schedule.start_lr=0",
)  # fmt: skip
"""Changes of cifar10-93 for every batch. Two ranks of 128 images: batch norm sees as many, and so the batch never
changes what it computes. No EMA of weights, because it would span another time at each batch."""
OPTIMIZERS = {
    "sgd": '{{kind="sgd", lr={rate:g}, momentum=0.9, weight_decay=1.33e-3}}',
    "lars": '{{kind="lars", lr={rate:g}, momentum=0.9, weight_decay=1.33e-3}}',
    "larc": '{{kind="lars", clip=true, trust_coefficient=0.1, lr={rate:g}, momentum=0.9, weight_decay=1.33e-3}}',
}
RATES: dict[str, dict[int, tuple[float, ...]]] = {
    "sgd": {256: (0.125, 0.25, 0.5), 2048: (0.5, 1, 2), 8192: (2, 4, 8)},
    "lars": {256: (1, 2, 4), 2048: (12, 24, 48), 8192: (6, 12, 24)},
    "larc": {256: (0.125, 0.25, 0.5), 2048: (0.5, 1, 2), 8192: (2, 4, 8)},
}
"""Rates that are tried first. SGD's middle one at 256 is that of cifar10-93 in its effect on a constant gradient."""
MOST_RATES = 6
"""Rates that are tried at most: beyond the best one, while it is the smallest or the largest."""
SPARSE = 'kind="sparse", sparsity=0.875, chunk=4096'
ENGINES = {
    "int8": '{kind="lazy", wire="int8"}',
    "fp8": '{kind="lazy", wire="fp8"}',
    "powersgd": '{kind="powersgd", rank=4}',
    "sparse": f"{{{SPARSE}, dense_epochs=0, ramp_epochs=0}}",
    "sparse, warm-up": f"{{{SPARSE}, dense_epochs=2, ramp_epochs=1}}",
    "sparse, correction": f"{{{SPARSE}, dense_epochs=0, ramp_epochs=0, momentum_correction=true}}",
    "sparse, correction, warm-up": f"{{{SPARSE}, dense_epochs=2, ramp_epochs=1, momentum_correction=true}}",
}
"""Engines that are not exact, each with SGD at ``ENGINES_AT``."""
ENGINES_AT = 8192
SMALL = {
    "mild": (
        "epochs=8", "first_eval=8", "data.sizes=[[1, 32], [4, 36], [5, 40], [6, 44], [7, 48]]", 'loss="bce"',
        "label_smoothing=0.08", "ema_decay=0.99309", 'model.blurpool="conv_maxpool"',
        'model.init=["kaiming_normal", "bn_uniform", "linear_log_constant_bias"]', "eval_mirror=true",
        "target_top1=100",
    ),
    "probe": ("epochs=1", "first_eval=1", "data.sizes=[]", "schedule.warmup_epochs=0.5", "target_top1=100"),
    "plain": ("data.sizes=[]", "eval_mirror=true", "target_top1=100"),
}  # fmt: skip
"""Changes of cifar10-resnet18. ``probe`` times an epoch of ``plain``, which then trains as long as ``mild``."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training of the table."""

    group: str
    """Part of the page: ``rates``, ``batches``, ``engines`` or ``small``."""
    case: str
    """Optimizer, engine or recipe."""
    seed: int = 1
    batch: int = 256
    rate: float | None = None
    """Rate that is tried; None: the chosen one."""

    @property
    def name(self) -> str:
        words = [self.group, self.case.replace(", ", "-"), str(self.batch)]
        return "-".join([*words, f"rate{self.rate:g}" if self.rate is not None else f"seed{self.seed}"])

    @property
    def seconds(self) -> float:
        """About the time that it takes."""
        if self.group == "small":
            return SMALL_S / 8 if self.case == "probe" else SMALL_S
        return EPOCHS * (LEFT if self.group == "rates" else IMAGES) / IMAGES_PER_S + START_S


def plan(rows: Sequence[Row] = ()) -> list[Run]:
    """Return all runs in order of importance.

    Rates come before their use. One seed of everything is followed by the optimizers' other seeds, and then the
    engines'. Before these come all seeds of what README and the engines' pages compare: LARS at eight times the least
    batch, int8 beside bf16, mild beside plain.
    """

    def tried(case: str) -> Iterator[Run]:
        return (Run("rates", case, 1, batch, rate) for batch in TUNED for rate in rates(rows, case, batch))

    def batches(case: str, seed: int) -> Iterator[Run]:
        return (Run("batches", case, seed, batch) for batch in BATCHES)

    def small(seed: int) -> Iterator[Run]:
        return (Run("small", case, seed) for case in SMALL if case != "probe" or seed == 1)

    def others(seed: int) -> Iterator[Run]:
        yield from (Run("engines", case, seed, ENGINES_AT) for case in ENGINES)
        yield from small(seed)

    first = [run for case in ("sgd", "lars") for run in (*tried(case), *batches(case, 1))]
    for seed in SEEDS:
        first += [Run("batches", "lars", seed, batch) for batch in (BATCHES[0], 8 * BATCHES[0])]
        first += [Run("batches", "sgd", seed, ENGINES_AT), Run("engines", "int8", seed, ENGINES_AT)]
        first += small(seed)
    first += [*others(1), *tried("larc"), *batches("larc", 1)]
    later = [run for seed in SEEDS[1:] for case in OPTIMIZERS for run in batches(case, seed)]
    rest = [run for seed in SEEDS[1:] for run in others(seed)]
    return list(dict.fromkeys(first + later + rest))


def tried_rates(rows: Iterable[Row], case: str, batch: int) -> dict[float, float]:
    """Return top-1 on the held-out images by rate; a run that diverged has 0."""
    here = [row for row in rows if (row["group"], row["case"], row["batch"]) == ("rates", case, batch)]
    return {row["rate"]: row["top1"] or 0.0 for row in here}


def rates(rows: Sequence[Row], case: str, batch: int) -> list[float]:
    """Return the rates to try, in order: those of ``RATES``, and more where the best so far is at an end."""
    found, tried = list(RATES[case][batch]), tried_rates(rows, case, batch)
    while len(found) < MOST_RATES and tried.keys() >= set(found):
        best = max(found, key=lambda rate: tried[rate])
        if best == found[0]:
            found.insert(0, best / 2)
        elif best == found[-1]:
            found.append(best * 2)
        else:
            break
    return found


def rate_for(rows: Sequence[Row], case: str, batch: int) -> float | None:
    """Return the rate of an optimizer at a batch; None while rates that it follows from have not been tried."""
    near = min(reversed(TUNED), key=lambda tuned: max(batch / tuned, tuned / batch))
    tried = tried_rates(rows, case, near)
    if not tried.keys() >= set(rates(rows, case, near)):
        return None
    ratio = batch / near
    return max(tried, key=lambda rate: tried[rate]) * (math.sqrt(ratio) if case == "lars" else ratio)


def plain_epochs(rows: Iterable[Row]) -> int | None:
    """Return the epochs in which the plain recipe trains at least as long as mild does; None: not known yet."""
    seconds = {row["case"]: row["train_s"] for row in rows if row["group"] == "small" and row["seed"] == 1}
    return math.ceil(seconds["mild"] / seconds["probe"]) if {"mild", "probe"} <= seconds.keys() else None


def command(run: Run, rows: list[Row]) -> str | None:
    """Return the command of a run; None if it follows from runs that are missing."""
    data: list[str] = []
    if run.group == "small":
        recipe, changes = "cifar10-resnet18", list(SMALL[run.case])
        if run.case == "plain":
            if (epochs := plain_epochs(rows)) is None:
                return None
            changes += [f"epochs={epochs}", f"first_eval={epochs}"]
    else:
        recipe, optimizer = "cifar10-93", "sgd" if run.group == "engines" else run.case
        rate = rate_for(rows, optimizer, run.batch) if run.rate is None else run.rate
        if rate is None:
            return None
        changes = [f"global_batch={run.batch}", *NETWORK, f"optim={OPTIMIZERS[optimizer].format(rate=rate)}"]
        if run.group == "engines":
            changes.append(f"sync={ENGINES[run.case]}")
        if run.group == "rates":
            data = ["--data", HELD_OUT]
    words = ["imagenet-fast", "train", "--recipe", recipe, "--nproc", "2", "--seed", str(run.seed), *data]
    return shlex.join([*words, *(word for change in changes for word in ("--set", change))])


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
    return 0, row_of(run, text, {**outcome, "top1": None} if diverged else outcome)


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
        result |= {"date": date.today().isoformat(), "machine": benchmarks.machine()}
        benchmarks.write({**result, "versions": benchmarks.versions(), "rows": [*rows, row]})
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


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with all columns to the left."""
    return "\n".join(benchmarks.markdown(headings, lines, [""] * len(headings)))


def page(rows: list[Row]) -> str:
    """Return the page."""

    def of(group: str, case: str, batch: int) -> list[Row]:
        return [row for row in rows if (row["group"], row["case"], row["batch"]) == (group, case, batch)]

    def tries(case: str, batch: int) -> str:
        tried = tried_rates(rows, case, batch)
        tops = {rate: f"{tried[rate]:.2f}" if rate in tried else "not run yet" for rate in rates(rows, case, batch)}
        return ", ".join(f"{rate:g}: {top}" for rate, top in tops.items())

    def small(case: str) -> list[str]:
        found = of("small", case, 256)
        seconds = next((f"{row['train_s']:.0f}" for row in found if row["seed"] == 1), "not run yet")
        return [case, str(found[0]["epochs"]) if found else "not run yet", seconds, cell(found)]

    counted, all_runs = len(rows), len(plan(rows))
    state = (
        f"{counted} of {all_runs} runs have been trained." if rows else "Nothing has been trained for this page yet."
    )
    exact = of("batches", "sgd", ENGINES_AT)
    others = ((case, of("engines", case, ENGINES_AT)) for case in ENGINES)
    engines = [["bf16, exact", cell(exact), ""]]
    engines += [[case, cell(found), difference(found, exact)] for case, found in others]
    parts = {
        "STATE": state,
        "PICTURE": f"\n![Top-1 over the batch of each optimizer]({PICTURE.name})\n" if drawn(rows) else "",
        "BATCHES": table(
            ["batch", "SGD", "LARS", "LARC"],
            ([f"{batch}", *(cell(of("batches", case, batch)) for case in OPTIMIZERS)] for batch in BATCHES),
        ),
        "ENGINES": table(["engine, wire dtype", "top-1, %", "minus bf16, same seeds, points"], engines),
        "RATES": table(
            ["optimizer", *(f"batch {batch}" for batch in TUNED)],
            ([case.upper(), *(tries(case, batch) for batch in TUNED)] for case in OPTIMIZERS),
        ),
        "SMALL": table(["recipe", "epochs", "seed 1, s", "top-1, %"], map(small, ("mild", "plain"))),
        "COMMAND": example(rows),
    }
    text = TEXT
    for word, part in parts.items():
        text = text.replace(f"{{{word}}}", part)
    return text


def example(rows: list[Row]) -> str:
    """Return the command of the first run that was trained, or else of the first to be, as lines of the page."""
    text: str = rows[0]["command"] if rows else command(plan()[0], []) or ""
    return "\n".join(f"    {line}" for line in benchmarks.wrapped(text))


def drawn(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that the picture shows."""
    return [row for row in rows if row["group"] == "batches" and row["top1"] is not None]


def draw(rows: list[Row]) -> None:
    """Draw top-1 over the batch: the mean of each optimizer, with bars of a standard deviation."""
    from imagenet_fast.metrics.plots import new_figure

    figure = new_figure(PICTURE, 7, 4)
    axes = figure.subplots()
    for case in OPTIMIZERS:
        tops: dict[int, list[float]] = {}
        for row in rows:
            if row["case"] == case:
                tops.setdefault(row["batch"], []).append(row["top1"])
        if not tops:
            continue
        batches = sorted(tops)
        means = [fmean(tops[batch]) for batch in batches]
        bars = [stdev(tops[batch]) if len(tops[batch]) > 1 else 0.0 for batch in batches]
        axes.errorbar(batches, means, bars, marker="o", markersize=4, capsize=3, label=case.upper())
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [f"{batch}" for batch in BATCHES])
    axes.set(xlabel="batch", ylabel="top-1 (%)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(PICTURE)


def write_page() -> None:
    """Write the page from the rows, and its picture if there is anything to draw."""
    rows = benchmarks.read("convergence")["rows"]
    PAGE.write_text(page(rows), encoding="utf-8")
    if shown := drawn(rows):
        draw(shown)


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
