"""Write docs/convergence.md and its picture from docs/results/convergence.json."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scripts import benchmarks

PAGE = Path(__file__).parents[2] / "docs" / "convergence.md"
PICTURE = PAGE.with_suffix(".png")
OPTIMIZERS = ("sgd", "lars", "larc")
STYLES = {256: "-", 2048: "--", 8192: ":"}
"""Batches at which rates were tried and curves were drawn, with their lines."""
ENGINES_AT = (1024, 8192)
"""Batches at which engines are compared."""
SEEDS = 3

Row = dict[str, Any]


def cell(rows: Sequence[Row]) -> str:
    """Return mean and standard deviation of top-1 over the seeds, and how many diverged or are still missing."""
    tops = [row["top1"] for row in rows if row["top1"] is not None]
    text = f"{fmean(tops):.2f} ± {stdev(tops):.2f}" if len(tops) > 1 else "".join(f"{top:.2f}" for top in tops)
    if 0 < len(rows) < SEEDS:
        text += f" ({len(rows)} of {SEEDS} seeds)"
    return text if len(tops) == len(rows) else f"{text} ({len(rows) - len(tops)} diverged)".strip()


def difference(rows: Iterable[Row], exact: Iterable[Row]) -> str:
    """Return by how many points top-1 differs from that of ``exact``, the mean over the seeds that both have."""
    tops = {row["seed"]: row["top1"] for row in exact}
    apart = [row["top1"] - tops[row["seed"]] for row in rows if None not in (row["top1"], tops.get(row["seed"]))]
    return f"{fmean(apart):+.2f}" if apart else ""


def learning_rate(row: Row) -> str:
    """Return the learning rate in the command of a run, with at most two decimals."""
    (rate,) = re.findall(r"\blr=([^,}]+)", row["command"])
    return f"{round(float(rate), 2):g}" if float(rate) >= 1 else rate


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with all columns to the left."""
    return "\n".join(benchmarks.markdown(headings, lines, [""] * len(headings)))


def chosen(rows: Iterable[Row], group: str, case: str, batch: int) -> list[Row]:
    """Return the rows of a group, case and batch: one a seed."""
    return [row for row in rows if (row["group"], row["case"], row["batch"]) == (group, case, batch)]


def engine_tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return the tables of engines: by accuracy, beside larger batches of the same bytes, and by learning rate."""
    small, large = ENGINES_AT
    cases = dict.fromkeys(row["case"] for row in rows if row["group"] == "engines")
    exact = {batch: chosen(rows, "batches", "sgd", batch) for batch in ENGINES_AT}
    engines = [["bf16, exact", "100", cell(exact[small]), "", cell(exact[large]), ""]]
    for case in cases:
        found = {batch: chosen(rows, "engines", case, batch) for batch in ENGINES_AT}
        shares = [share(row, exact[batch][0]) for batch in ENGINES_AT for row in found[batch]]
        tops = (text for batch in ENGINES_AT for text in (cell(found[batch]), difference(found[batch], exact[batch])))
        engines.append([case, f"{fmean(shares):.0f}", *tops])

    sending = {case: chosen(rows, "engines", case, small) for case in cases}
    for batch in sorted({row["batch"] for row in rows if row["group"] == "batches" and row["batch"] >= small}):
        for case in ("sgd", "lars"):
            sending[f"bf16, batch {batch}, {case.upper()}"] = chosen(rows, "batches", case, batch)
    by_bytes = [(share(found[0], exact[small][0]), name, cell(found)) for name, found in sending.items() if found]

    tried: dict[str, dict[float, list[Row]]] = {}
    for row in rows:
        if row["batch"] == small and row["case"] in ("sparse", "sparse, correction"):
            tried.setdefault(row["case"], {}).setdefault(float(learning_rate(row)), []).append(row)
    rates = sorted({rate for found in tried.values() for rate in found})
    return {
        "ENGINES": table(
            [
                "engine, wire dtype", "bytes, %",
                *(text for batch in ENGINES_AT for text in (f"batch {batch}: top-1, %", "minus bf16, points")),
            ],
            engines,
        ),
        "BY_BYTES": table(
            ["engine at a batch of 1024, or a larger batch", "bytes of the whole run, %", "top-1, %"],
            ([name, f"{part:.0f}", top] for part, name, top in sorted(by_bytes, key=lambda one: -one[0])),
        ),
        "ENGINE_RATES": table(
            ["engine", *(f"rate {rate:g}" for rate in rates)],
            ([case, *(cell(found.get(rate, [])) for rate in rates)] for case, found in tried.items()),
        ),
    }  # fmt: skip


def share(row: Row, whole: Row) -> float:
    """Return the bytes that a run sends, in percent of those of another."""
    sent, all_of_it = (one["steps"] * one["sent_bytes_per_step"] for one in (row, whole))
    return float(100 * sent / all_of_it)


def page(rows: Sequence[Row]) -> str:
    """Return the page, of the rows that have been trained."""
    rows = [row for row in rows if "status" in row]

    def of(group: str, case: str, batch: int) -> list[Row]:
        return chosen(rows, group, case, batch)

    def tries(case: str, batch: int) -> str:
        tried = {row["rate"]: row["top1"] or 0.0 for row in of("rates", case, batch)}
        return ", ".join(f"{rate:g}: {tried[rate]:.2f}" for rate in sorted(tried))

    batches = sorted({row["batch"] for row in rows if row["group"] == "batches"})
    settings = [[of("batches", case, batch)[0] for case in OPTIMIZERS] for batch in batches]
    timed = {row["case"]: row for row in rows if row["group"] == "small" and row["seed"] == 1}
    mild, probe, plain = (timed[case] for case in ("mild", "probe", "plain"))
    machines = Counter(row["machine"].split("),")[0] + ")" for row in rows)
    return (Path(__file__).parent / "page.md").read_text(encoding="utf-8").format(
        RUNS=len(rows),
        **engine_tables(rows),
        MACHINES=", ".join(f"{count} on {machine}" for machine, count in machines.most_common()),
        PICTURE=PICTURE.name,
        BATCHES=table(
            ["batch", "SGD", "LARS", "LARC"],
            ([f"{batch}", *(cell(of("batches", case, batch)) for case in OPTIMIZERS)] for batch in batches),
        ),
        SETTINGS=table(
            ["batch", "steps", *(f"{case.upper()}'s learning rate" for case in OPTIMIZERS)],
            ([f"{found[0]['batch']}", f"{found[0]['steps']}", *map(learning_rate, found)] for found in settings),
        ),
        RATES=table(
            ["optimizer", *(f"batch {batch}" for batch in STYLES)],
            ([case.upper(), *(tries(case, batch) for batch in STYLES)] for case in OPTIMIZERS),
        ),
        SMALL=table(
            ["recipe", "epochs", "seed 1, s", "top-1, %"],
            (
                [row["case"], f"{row['epochs']}", f"{row['train_s']:.0f}", cell(of("small", row["case"], 256))]
                for row in (mild, plain)
            ),
        ),
        MILD_EPOCHS=mild["epochs"],
        PROBE_S=f"{probe['train_s']:.0f}",
        PLAIN_EPOCHS=plain["epochs"],
        EPOCH_S=f"{plain['train_s'] / plain['epochs']:.0f}",
        MORE_TIME=f"{100 * plain['train_s'] / mild['train_s'] - 100:.0f}",
        COMMAND="\n".join(f"    {line}" for line in benchmarks.wrapped(of("batches", "sgd", batches[0])[0]["command"])),
    )  # fmt: skip


def draw(rows: Sequence[Row]) -> None:
    """Draw top-1 over the batch, with bars of a standard deviation, and over the epochs."""
    from imagenet_fast.metrics.figures import new_figure

    figure = new_figure(PICTURE, 11, 4)
    left, right = figure.subplots(1, 2)
    judged = [row for row in rows if row["group"] == "batches" and row["top1"] is not None]
    batches = sorted({row["batch"] for row in judged})
    for case in OPTIMIZERS:
        tops = {
            batch: [row["top1"] for row in judged if (row["case"], row["batch"]) == (case, batch)] for batch in batches
        }
        tops = {batch: some for batch, some in tops.items() if some}
        bars = [stdev(some) if len(some) > 1 else 0.0 for some in tops.values()]
        left.errorbar(
            list(tops), list(map(fmean, tops.values())), bars, marker="o", markersize=4, capsize=3, label=case.upper()
        )
    left.set_xscale("log", base=2)
    left.set_xticks(batches, [f"{batch}" for batch in batches])
    left.set_xlabel("batch")
    for row in (row for row in rows if row["group"] == "curves"):
        colour = f"C{OPTIMIZERS.index(row['case'])}"
        label = f"{row['case'].upper()}, {row['batch']}"
        right.plot(range(1, len(row["curve"]) + 1), row["curve"], STYLES[row["batch"]], color=colour, label=label)
    right.set_xlabel("epoch")
    for axes in (left, right):
        axes.set_ylabel("top-1 (%)")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(PICTURE)


def main(arguments: Sequence[str]) -> int:
    """Write the page and its picture, or compare the page; return the exit code."""
    rows = benchmarks.read("convergence")["rows"]
    if "--check" not in arguments:
        PAGE.write_text(page(rows), encoding="utf-8")
        draw(rows)
    elif PAGE.read_text(encoding="utf-8") != page(rows):
        print(f"{PAGE.name} is not up to date; run `python -m experiments.convergence --page`", file=sys.stderr)
        return 1
    return 0
