"""Show the rows of each benchmark as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from statistics import mode
from typing import TYPE_CHECKING, Any

from rich.table import Table

from imagenet_fast.metrics.tables import compact_table, number
from imagenet_fast.units import size_text

if TYPE_CHECKING:
    from imagenet_fast.bench.collectives import AllReduceTime
    from imagenet_fast.bench.dataloaders import LoadingRate
    from imagenet_fast.bench.engines import EngineTime
    from imagenet_fast.bench.pipeline import PipelineTime
    from imagenet_fast.bench.presets import BatchRow, Rung

Column = tuple[str, str, str] | tuple[str, str, str, float] | tuple[str, Callable[[Any], str]]
"""A header; then a field's dotted name, its format, and a factor for its unit; or a function from a row to its cell."""


def rows_table(
    rows: Sequence[Any], text: Sequence[Column], numbers: Sequence[Column], title: str = "", note: str = ""
) -> Table:
    """Build a table of dataclass rows, with a title above and a note below; None is shown as a dash."""

    def cell(row: Any, shown: str | Callable[[Any], str], form: str = "", factor: float | None = None) -> str:
        if callable(shown):
            return shown(row)
        value = attrgetter(shown)(row)
        return number(value if value is None or factor is None else factor * value, form)

    columns = [*text, *numbers]
    table = compact_table(
        [header for header, *_ in text],
        [header for header, *_ in numbers],
        ([cell(row, *column[1:]) for column in columns] for row in rows),
    )
    table.title, table.caption = title or None, note or None
    return table


def without_repeats(rows: Sequence[Any], field: str) -> Callable[[Any], str]:
    """Return a function from a row to the text of ``field``, empty where the row before has the same."""
    again = {id(row) for before, row in pairwise(rows) if getattr(before, field) == getattr(row, field)}
    return lambda row: "" if id(row) in again else str(getattr(row, field))


def setting(time: EngineTime) -> str:
    """Describe what was replayed and where, such as ``1/4 of alexnet, 4 hosts of 2 ranks, 250mbit``."""
    model = f"1/{time.scale} of {time.model}" if time.scale > 1 else time.model
    hosts = f"{time.hosts} host{'s' if time.hosts > 1 else ''}"
    ranks = f" of {time.ranks_per_host} ranks" if time.ranks_per_host > 1 else ""
    return f"{model}, {hosts}{ranks}, {'loopback' if time.rate is None else time.rate}"


def common_wire(times: Sequence[EngineTime]) -> str:
    """Return the most frequent wire dtype."""
    return mode(t.wire for t in times)


def sync_title(times: Sequence[EngineTime]) -> str:
    """Describe the setting, with the times of computation and of one raw all-reduce."""
    main = next(t for t in times if t.wire == common_wire(times))
    return f"{setting(main)}, {main.wire}: compute {main.compute_s:.3f} s, raw all-reduce {main.raw_s:.3f} s"


def sync_table(times: Sequence[EngineTime]) -> Table:
    """Build a table with one row per engine."""
    wire = common_wire(times)
    return rows_table(
        times,
        [("engine", lambda t: t.engine if t.wire == wire else f"{t.engine} {t.wire}")],
        [
            ("s/step", "step_s", ".3f"),
            ("spread", lambda t: f"±{(t.step_s_max - t.step_s_min) / 2:.3f}"),
            ("sent MB", "sent_bytes", ".1f", 1e-6),
            *([("link MB", "kernel_bytes", ".1f", 1e-6)] if any(t.kernel_bytes is not None for t in times) else []),
            ("vs DDP", "ratio_to_ddp", ".2f"),
            ("vs limit", "ratio_to_limit", ".3f"),
            ("predicted", "predicted_s", ".3f"),
        ],
        sync_title(times),
        "vs DDP: DDP's time divided by the engine's. vs limit: the engine's time divided by the least possible.",
    )


def ladder_title(rungs: Sequence[Rung]) -> str:
    """Describe the setting of a ladder."""
    return f"{setting(rungs[0].time)}: compute {rungs[0].time.compute_s:.3f} s"


def ladder_table(rungs: Sequence[Rung]) -> Table:
    """Build a table with one row per step."""
    return rows_table(
        rungs,
        [("step", "step", "")],
        [
            ("s/step", "time.step_s", ".3f"),
            ("gain", lambda rung: "" if rung.gain is None else f"{rung.gain:.2f}"),
            ("total gain", "in_all", ".2f"),
            ("vs limit", "time.ratio_to_limit", ".3f"),
            ("predicted", "time.predicted_s", ".3f"),
        ],
        ladder_title(rungs),
    )


def batch_title(rows: Sequence[BatchRow]) -> str:
    """Describe the setting of a comparison by batch size."""
    return f"{setting(rows[0].hybrid)}, bf16"


def batch_table(rows: Sequence[BatchRow]) -> Table:
    """Build a table with one row per batch size.

    Limit and prediction are hybrid's.
    """
    return rows_table(
        rows,
        [],
        [
            ("batch", "batch", "d"),
            ("compute", "ddp.compute_s", ".3f"),
            ("ddp", "ddp.step_s", ".3f"),
            ("exposed", "ddp.exposed_s", ".3f"),
            ("hybrid", "hybrid.step_s", ".3f"),
            ("exposed", "hybrid.exposed_s", ".3f"),
            ("gain", "gain", ".1%"),
            ("vs limit", "hybrid.ratio_to_limit", ".3f"),
            ("predicted", "hybrid.predicted_s", ".3f"),
        ],
        batch_title(rows),
    )


def bandwidth_title(row: AllReduceTime) -> str:
    """Describe the network and the dtype of all-reduces."""
    ranks = f"{row.hosts * row.ranks_per_host} ranks"
    if row.rate is not None:
        ranks = f"{row.hosts} hosts" + (f" of {row.ranks_per_host} ranks" if row.ranks_per_host > 1 else "")
    link = row.rate or ("GPUs of one node" if row.backend == "nccl" else "loopback")
    return f"all-reduces by message size: {ranks}, {link}, {row.dtype}"


def bandwidth_table(rows: Sequence[AllReduceTime]) -> Table:
    """Build a table with one row per size and collective; bandwidths are in 10^6 bytes per second."""
    size = without_repeats(rows, "bytes")
    return rows_table(
        rows,
        [
            ("size", lambda row: size_text(row.bytes) if size(row) else ""),
            ("collective", lambda r: r.collective if r.dtype == rows[0].dtype else f"{r.collective} {r.dtype}"),
        ],
        [
            ("ms", "latency_s", ".4g", 1e3),
            ("spread", lambda row: f"±{500 * (row.latency_s_max - row.latency_s_min):.2g}"),
            ("alg MB/s", "algorithm_bandwidth", ".4g", 1e-6),
            ("bus MB/s", "bus_bandwidth", ".4g", 1e-6),
            ("link use", "utilisation", ".1%"),
        ],
        bandwidth_title(rows[0]),
    )


def pipeline_title(rows: Sequence[PipelineTime]) -> str:
    """Name the model and the number of ranks."""
    return rows[0].title


def loading_title(rates: Sequence[LoadingRate]) -> str:
    """Describe the images and what is made of them."""
    return rates[0].title
