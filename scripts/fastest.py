"""Write the tables and the picture of `imagenet-fast plan --fastest` in docs/plan.md and README.md.

python scripts/fastest.py            write them
python scripts/fastest.py --check    exit with 1 if a table is not up to date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from imagenet_fast.plan.cluster import load_cluster
from imagenet_fast.plan.fastest import Way, fastest_ways, first_exact, published_trainings
from imagenet_fast.plan.rows import Published, known_results

ROOT = Path(__file__).parents[1]
PLACES = {
    "One DGX-H100": ("dgx-h100", 8),
    "64 DGX-H100": ("dgx-h100", 512),
    "8 DGX-A100": ("dgx-a100", 64),
    "4 cloud nodes, 25 Gbit/s": ("cloud-25g", 32),
    "8 RTX A5000, 10 Gbit/s": ("consumer-10g", 8),
}
SHOWN = 8
"""Rows of each table."""
WAY = "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {:,.0f} |"
PICTURE = ("plan", "--fastest", "--cluster", "dgx-h100", "--sweep", "gpus=8..2048", "--png", "docs/plan-fastest.png")


def ways(cluster: str, gpus: int) -> list[Way]:
    """Return the best ways to train ResNet-50."""
    return fastest_ways(load_cluster(cluster), published_trainings("resnet50"), gpus)[0]


def way_row(way: Way) -> str:
    """Return a row of a table."""
    engine = f"`{way.engine}`" + ("" if way.exact else ", accuracy not published")
    figures = (f"{way.minutes:.3g}", f"{way.least:.3g}-{way.most:.3g}", f"{way.gpu_hours:.3g}", way.held_back_by)
    return WAY.format(way.training, way.gpus, engine, way.micro_batch, way.epochs, *figures, way.node_images_per_s)


def tables() -> Iterator[str]:
    """Yield the lines of a table for each place."""
    for name, (cluster, gpus) in PLACES.items():
        yield from ("", f"{name} (`--cluster {cluster} --gpus {gpus}`):", "")
        yield "| training | GPUs | engine | at once | epochs | min | band | GPU h | held back by | images/s a node |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        yield from map(way_row, ways(cluster, gpus)[:SHOWN])
    yield ""


def logged(row: Published) -> str:
    """Return a submission of MLPerf beside the published training of the nearest batch, and its place."""
    found = [way for way in ways(row.cluster, row.gpus) if way.exact and way.training != "resnet50-8gpu-mild"]
    batch = row.gpus * row.batch
    near = min(found, key=lambda way: abs(way.global_batch - batch))
    best = found[0]
    return (
        f"| {row.name} | {row.gpus} | {batch} | {row.minutes:.3g} | {near.training} | {found.index(near) + 1} "
        f"| {near.gpus} | {near.minutes:.3g} ({near.least:.3g}-{near.most:.3g}) | {best.training}, {best.minutes:.3g} |"
    )


def held_out() -> Iterator[str]:
    """Yield the lines of the table of MLPerf's submissions."""
    yield from ("", "| system | GPUs | its batch | logged min | nearest | place | GPUs | predicted min | first, min |")
    yield "|---|---|---|---|---|---|---|---|---|"
    yield from (logged(row) for row in known_results().published if row.minutes is not None)
    yield ""


def best_ones() -> Iterator[str]:
    """Yield the lines of README's table."""
    yield "|on|training|engine|minutes|\n|---|---|---|---|"
    for name, place in PLACES.items():
        way = first_exact(ways(*place))
        yield f"|{name}|{way.training}|`{way.engine}`|{way.minutes:.2g}|"


SECTIONS = {"fastest": tables, "held out": held_out, "best": best_ones}


def rewritten(page: Path) -> str:
    """Return a page with its tables made anew: what stands between two comments that name a section."""

    def section(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n" + "\n".join(SECTIONS[match[1]]()) + "\n<!-- end -->"

    names = "|".join(SECTIONS)
    return re.sub(rf"<!-- ({names}) -->\n.*?<!-- end -->", section, page.read_text(encoding="utf-8"), flags=re.DOTALL)


def main() -> None:
    """Write the pages and the picture, or check the pages."""
    found = {page: rewritten(page) for page in (ROOT / "docs" / "plan.md", ROOT / "README.md")}
    if "--check" in sys.argv:
        sys.exit(any(page.read_text(encoding="utf-8") != text for page, text in found.items()))
    for page, text in found.items():
        page.write_text(text, encoding="utf-8")
    from typer.testing import CliRunner

    from imagenet_fast.cli.main import app

    CliRunner().invoke(app, PICTURE, catch_exceptions=False)


if __name__ == "__main__":
    main()
