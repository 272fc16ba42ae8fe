"""Pipeline schedules and their constraints."""

from __future__ import annotations


def chunks_of(schedule: str) -> int:
    """Return the number of stages per rank: 2 for ``interleaved``, else 1."""
    return 2 if schedule == "interleaved" else 1


def misfit(schedule: str, ranks: int, micro_batches: int) -> str | None:
    """Return why ``schedule`` cannot run ``micro_batches`` micro-batches on ``ranks`` ranks, or None if it can.

    The reason is one sentence that also names a fix.
    """
    rounds = max(1, micro_batches // ranks)
    match schedule:
        case "1f1b" if micro_batches < ranks:
            return (
                f"schedule 1f1b has a micro-batch for each of {ranks} stages at least, and {micro_batches} are fewer; "
                "raise micro_batches, or take gpipe"
            )
        case "interleaved" if micro_batches % rounds:
            return (
                f"schedule interleaved takes micro-batches in equal rounds, and {micro_batches} do not make {rounds}; "
                f"take a multiple of {ranks}"
            )
        case "gpipe" | "1f1b" | "interleaved":
            return None
        case _:
            return (
                f"schedule {schedule} is not one of gpipe, 1f1b and interleaved; those without a bubble assign "
                "gradients where no engine sees them, so replicas would drift apart"
            )
