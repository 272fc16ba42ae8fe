"""The ``[parallel]`` table of a recipe: the axes of parallelism, and what pipeline schedules can do."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt, model_validator

from imagenet_fast.recipe.base import Table

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]


class Parallel(Table):
    """The axes of parallelism.

    Ranks that ``tensor`` and ``pipeline`` do not use are for data parallelism.
    """

    tensor: PositiveInt = 1
    """Ranks that share AlexNet's large fully connected layers, each with a shard; 1: off.

    They exchange activations instead of those layers' gradients (Krizhevsky's "one weird trick", arXiv 1404.5997). That
    is fewer bytes while those ranks together use fewer than 4096 images a step. But training waits for activations,
    while gradients can be sent during computation.
    """
    pipeline: PositiveInt = 1
    """Number of consecutive stages into which the model is split, each on ranks of its own; 1: off."""
    micro_batches: PositiveInt = 1
    """Micro-batches into which a pipeline splits the images it reads at once.

    With the schedule 1f1b at least as many as stages, so set it together with ``pipeline``; gpipe also takes fewer.
    With 1, only one stage works at a time.
    """
    schedule: PipelineSchedule = "1f1b"
    """Order of the forward and backward passes in a pipeline.

    Schedules without a bubble are not offered: they assign gradients where no engine sees them.
    """

    @property
    def ranks(self) -> int:
        """Ranks that hold one copy of the model; data parallelism multiplies them."""
        return self.tensor * self.pipeline

    def layout(self, ranks: int) -> str:
        """Return the name of the layout of ``ranks`` ranks: ``dp4``, ``tp4``, ``pp2dp2``."""
        return "".join(f"{axis}{size}" for axis, size in self.axes(ranks).items() if size > 1) or "dp1"

    def axes(self, ranks: int) -> dict[str, int]:
        """Return the size of each axis for ``ranks`` ranks."""
        return {"pp": self.pipeline, "dp": ranks // self.ranks, "tp": self.tensor}

    @property
    def as_written(self) -> str:
        """The setting as a recipe writes it, for error messages."""
        axes = [f"parallel.{axis} {getattr(self, axis)}" for axis in ("tensor", "pipeline") if getattr(self, axis) > 1]
        return " x ".join(axes)

    @model_validator(mode="after")
    def _schedule_fits(self) -> Parallel:
        """Check that the schedule and its micro-batches fit the pipeline."""
        if self.pipeline == 1 and (self.micro_batches > 1 or self.schedule != "1f1b"):
            raise ValueError("micro_batches and schedule are those of a pipeline; leave them out, or raise pipeline")
        if self.pipeline > 1 and (why := misfit(self.schedule, self.pipeline, self.micro_batches)) is not None:
            raise ValueError(why)
        return self


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
    return None
