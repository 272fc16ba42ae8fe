"""Write the tables of the pages: what stands there between `<!-- table NAME -->` and `<!-- end -->`.

python -m scripts.tables            write the tables of docs/benchmarks.md, docs/convergence.md and docs/plan.md
python -m scripts.tables --check    exit with 1 if a page is not up to date
python -m scripts.tables NAME       measure a benchmark again: rewrite docs/results/NAME.json and the tables

A file in docs/results declares its table: `columns`, each with a heading and a cell, which is a Python f-string of a
row's fields. With `across`, rows that agree in all columns share a line, and each has a cell there in the column of its
own; if it says nothing of the cell, that is the accuracy over seeds, also `beside` that of other rows. `where`, `sort`
and `first` choose rows. A file may have several `tables`, which say what they have of their own: `table NAME TABLE`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from imagenet_fast.plan.cluster import load_cluster
from imagenet_fast.plan.fastest import fastest_ways, published_trainings
from imagenet_fast.plan.rows import Published, known_results
from imagenet_fast.units import size_text
from scripts import results
from scripts.results import ROOT, Row

CONVERGENCE = ROOT / "docs" / "convergence.md"
PAGES = (ROOT / "docs" / "benchmarks.md", CONVERGENCE, ROOT / "docs" / "plan.md")
SHOWN = 3  # of a benchmark's commands at most so many are on the page
SEEDS = 3


def value(expression: str, row: Row) -> Any:
    """Return the value of an expression of a row's fields, or None if the row lacks one or has None there."""
    try:
        return eval(expression, {"size_text": size_text}, row)
    except (NameError, TypeError):
        return None


def cell(template: str, row: Row) -> str:
    """Return the text of a cell; it is empty if the row lacks a field."""
    return value(f"f'''{template}'''", row) or ""


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a Markdown table; columns of numbers stand to the right."""
    numbers = [all(re.fullmatch(r"[-+±\d.,% ()]*", line[place]) for line in lines) for place in range(len(headings))]
    yield f"| {' | '.join(headings)} |"
    yield f"|{'|'.join('--:' if number else '---' for number in numbers)}|"
    for line in lines:
        yield f"| {' | '.join(line)} |"


def table(declared: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table as it is declared."""
    where, sort = declared.get("where", "True"), declared.get("sort", "0")
    rows = sorted((row for row in declared["rows"] if value(where, row)), key=lambda row: value(sort, row))
    rows = rows[: declared.get("first")]
    headings = [column["heading"] for column in declared["columns"]]
    lines = [tuple(cell(column["cell"], row) for column in declared["columns"]) for row in rows]
    across = declared.get("across")
    if across is None:
        yield from markdown(headings, lines)
        return
    found: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    beside: dict[str, list[Row]] = {}
    for line, row in zip(lines, rows, strict=True):
        heading = cell(across["heading"], row)
        found.setdefault(line, {}).setdefault(heading, []).append(row)
        beside.setdefault(heading, []).extend([row] if value(across.get("beside", "False"), row) else [])

    def text(heading: str, those: list[Row]) -> str:
        if "cell" in across:
            return ", ".join(cell(across["cell"], row) for row in those)
        return accuracy(those, beside[heading])

    body = [[*line, *(text(heading, cells.get(heading, [])) for heading in beside)] for line, cells in found.items()]
    yield from markdown([*headings, *beside], body)


def accuracy(rows: Sequence[Row], exact: Sequence[Row]) -> str:
    """Return the top-1 of a row for each seed: mean and standard deviation, and how many are missing or diverged.

    In brackets is by how many points they differ from the ``exact`` rows, the mean over the seeds that both have.
    """
    tops = {row["seed"]: row["top1"] for row in rows if row["top1"] is not None}
    text = f"{fmean(tops.values()):.2f}" if tops else ""
    if len(tops) > 1:
        text += f" ± {stdev(tops.values()):.2f}"
    apart = [tops[row["seed"]] - row["top1"] for row in exact if row["seed"] in tops and row["top1"] is not None]
    notes = [f"{fmean(apart):+.2f}"] if apart and rows[0] not in exact else []
    if 0 < len(rows) < SEEDS:
        notes.append(f"{len(rows)} of {SEEDS} seeds")
    if len(tops) < len(rows):
        notes.append(f"{len(rows) - len(tops)} diverged")
    return f"{text} ({', '.join(notes)})".strip() if notes else text


def benchmark(result: dict[str, Any]) -> Iterator[str]:
    """Yield a benchmark's part of the page: its table, its commands, and when and where they ran."""
    yield from table(result)
    yield from ("", "<!-- run: not here -->")  # what tests/e2e/test_pages.py is to do with commands that take hours
    for command in result["commands"][:SHOWN]:
        yield from indented(command)
    if more := result["commands"][SHOWN:]:
        yield f"    # and {len(more)} more in docs/results/{result['name']}.json"
    when = date.fromisoformat(result["date"])
    source = f"[`{result['name']}`](results/{result['name']}.json)"
    seen = f"{source}, {when.day} {when:%B %Y}, torch {result['versions']['torch']}, {result['machine']}."
    yield from ("", " ".join(filter(None, [seen, result.get("conditions")])))


def indented(command: str) -> list[str]:
    """Return a command as lines of a block that a shell can read; an option keeps its value."""
    words = " ".join(shlex.quote(word).replace(" ", "\0") for word in shlex.split(command))
    kept = re.sub(r"(--\S+) (?!-)", "\\1\0", words)
    lines = textwrap.wrap(kept, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [f"    {line}" for line in " \\\n".join(lines).replace("\0", " ").splitlines()]


def held_out() -> Iterator[str]:
    """Yield the table of MLPerf's submissions beside the ways of `plan fastest`."""
    headings = ["system", "GPUs", "its batch", "logged min", "nearest", "place", "GPUs", "predicted min", "first, min"]
    rows = known_results().published
    yield from markdown(headings, [logged(row, row.minutes) for row in rows if row.minutes is not None])


def logged(row: Published, minutes: float) -> list[str]:
    """Return a submission beside the published training of the nearest batch, and its place."""
    ways, _ = fastest_ways(load_cluster(row.cluster, "published"), published_trainings("resnet50"), row.gpus)
    found = [way for way in ways if way.exact and way.training != "resnet50-8gpu-mild"]
    batch = row.gpus * row.batch
    near = min(found, key=lambda way: abs(way.global_batch - batch))
    place = [near.training, f"{found.index(near) + 1}", f"{near.gpus}"]
    predicted = f"{near.minutes:.3g} ({near.least:.3g}-{near.most:.3g})"
    best = f"{found[0].training}, {found[0].minutes:.3g}"
    return [row.name, f"{row.gpus}", f"{batch}", f"{minutes:.3g}", *place, predicted, best]


def names() -> list[str]:
    """Return the benchmarks that can be measured again."""
    stems = sorted(path.stem for path in results.RESULTS.glob("*.json"))
    return [name for name in stems if "commands" in results.read(name)]


def lines_of(name: str) -> Iterator[str]:
    """Yield what stands under the name of a table."""
    if name == "held out":
        return held_out()
    stem, _, part = name.partition(" ")
    result = results.read(stem)
    if not part:
        return benchmark(result)
    (own,) = (own for own in result["tables"] if own["name"] == part)
    return table(result | own)


def rewritten(page: Path) -> str:
    """Return a page with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        return "\n".join([match[1], "", *lines_of(match[2]), "", "<!-- end -->"])

    pattern = r"^(<!-- table (.+?) -->)$.*?^<!-- end -->$"
    return re.sub(pattern, made, page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def write(pages: Iterable[Path] = PAGES) -> None:
    """Write the tables of pages."""
    for page in pages:
        page.write_text(rewritten(page), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Write or compare the pages, or measure a benchmark; return the exit code."""
    match arguments:
        case []:
            write()
        case ["--check"]:
            if stale := [page.name for page in PAGES if page.read_text(encoding="utf-8") != rewritten(page)]:
                print(f"{', '.join(stale)}: not up to date; run `python -m scripts.tables`", file=sys.stderr)
                return 1
        case [name] if name in names():
            try:
                results.write(results.measure(name))
            except subprocess.CalledProcessError as failed:
                sentence = f"`{failed.cmd}` ended with exit code {failed.returncode}; nothing was written"
                print(f"error: {sentence}", file=sys.stderr)
                return failed.returncode
            write()
        case _:
            listed = ", ".join(names())
            print(f"error: there is no benchmark {' '.join(arguments)}; choose from {listed}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
