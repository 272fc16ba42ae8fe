"""A run that goes on: the checkpoint it goes on from, and the state of every rank."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from imagenet_fast.checkpoint import Checkpoint, newest, open_checkpoint
from imagenet_fast.data.fingerprint import differences as differences_of_data
from imagenet_fast.data.loaders import Loaders
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.reductions import all_reduce_sum, broadcast_error
from imagenet_fast.errors import UserError, warn
from imagenet_fast.launch.run_lock import CHECKPOINTS, check_replaceable, hold
from imagenet_fast.metrics.run_result import read_outcome
from imagenet_fast.models.weights import Weights, classes_of
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.resume_compat import differences
from imagenet_fast.recipe.schema import Model
from imagenet_fast.training.state import TrainState, joined

_PATIENCE_S = 5.0  # for what another node has written to be seen over NFS


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on; the same on every rank."""

    checkpoint: Checkpoint
    shared: dict[str, Any]
    elsewhere: bool
    """On another number of ranks, or with another layout."""
    found_at: float
    """By the clock on the wall."""
    wrong_from: int | None
    """The step from which on numbers had gone wrong, if the run has ended for that."""

    @property
    def step(self) -> int:
        return self.checkpoint.manifest.step

    def load(self, state: TrainState, world: DistContext) -> None:
        """Put ``state`` where the checkpoint has it."""
        checkpoint = self.checkpoint
        if self.elsewhere:
            parts = (part for _, part in checkpoint.parts(world.device))
            own = joined(parts, sharded=checkpoint.manifest.layout.get("tp", 1) > 1)
        else:
            own = checkpoint.part(world.rank, world.device)
        state.load(self.shared, own)
        state.outcome.resumed += 1
        state.outcome.gap_s += self.gap_s
        state.unjudged = checkpoint.manifest.top1 is None

    def check_contents(self, dataset: Loaders, model: Model) -> None:
        """Raise UserError where classes, images or labels are others by now, as far as the checkpoint tells: an early
        one tells no more than the number of classes of its ``model``."""
        if "data" in self.shared:
            changed = differences_of_data(self.shared["data"], dataset.contents)
        else:
            before = classes_of(Weights(str(self.checkpoint.folder), self.shared["model"]), model)
            changed = [f"{dataset.classes} classes for {before}"] if before not in (0, dataset.classes) else []
        if changed:
            raise UserError(
                f"the data has {' and '.join(changed)} since {self.checkpoint.folder} was written; restore it, or "
                "begin another run with --init-from"
            )

    def check_images(self, images: int) -> None:
        """Raise UserError where the training set has another number of them by now."""
        if (before := self.shared["images"]) != images:
            raise UserError(
                f"the training set has {images} images and had {before} when {self.checkpoint.folder} was written; "
                "restore it, or begin another run with --init-from"
            )

    def check_length(self, epochs: int, steps_per_epoch: int) -> None:
        """Raise UserError where the run has trained for longer than it is to take."""
        if self.step > epochs * steps_per_epoch:
            trained = self.step / steps_per_epoch
            raise UserError(
                f"epochs is {epochs}, and {self.checkpoint.folder} has been trained for {trained:.4g} epochs; give "
                f"epochs={math.ceil(trained)} or more, or begin another run with --init-from"
            )

    @property
    def gap_s(self) -> float:
        """Since the checkpoint; nothing where the clock was set back."""
        saved_at: float = self.shared["saved_at"]
        return max(0.0, self.found_at - saved_at)


def find_resumption(job: Job, world: DistContext) -> ResumePoint | None:
    """Where ``job`` goes on, which rank 0 finds; None where there is no checkpoint yet.

    Raises UserError, the same on every rank, where it cannot go on from there.
    """
    found, refusal, checkpoint, wrong_from = "", "", None, None
    if world.is_main:
        try:
            hold(job.folder)
            checkpoint = newest(job.folder / CHECKPOINTS)
            if checkpoint is not None:
                found, wrong_from = checkpoint.folder.name, _wrong_from(job.folder)
            else:
                check_replaceable(job.folder)
        except UserError as error:
            refusal = str(error)
    if refusal := broadcast_error(refusal, world.device):
        raise UserError(refusal)
    told = [(found, wrong_from)]
    dist.broadcast_object_list(told, src=0, device=world.device)
    found, wrong_from = told[0]
    if not found:
        return None
    root = common_folder(job.folder / CHECKPOINTS, world)
    if root is None:
        raise UserError(
            f"not every node sees the checkpoints that rank 0 has in {job.folder}; put the run where all of them do"
        )
    checkpoint = open_checkpoint(root / found)
    shared = checkpoint.shared(world.device)
    _check_recipe(job, shared["recipe"])
    manifest = checkpoint.manifest
    elsewhere = (manifest.world, manifest.layout) != (world.size, job.recipe.parallel.axes(world.size))
    return ResumePoint(checkpoint, shared, elsewhere, time.time(), wrong_from)


def _wrong_from(folder: Path) -> int | None:
    """Of the run in ``folder``; None where it has left nothing that can be read, which its checkpoints do not need."""
    try:
        outcome = read_outcome(folder)
    except UserError:
        warn(f"{folder / 'outcome.json'} is damaged; the run goes on from its checkpoint without it")
        return None
    return None if outcome is None else outcome.wrong_from


def _check_recipe(job: Job, begun: Mapping[str, Any]) -> None:
    """Raise UserError where the recipe is another one than that the run was ``begun`` with."""
    changed = differences(begun, job.recipe)
    if changed:
        raise UserError(
            f"{job.folder} was begun with another recipe and cannot go on with this one: {', '.join(changed)}; "
            "change that back, or give another --out"
        )


def common_folder(folder: Path, world: DistContext, make: bool = False) -> Path | None:
    """Rank 0's ``folder`` as this rank sees it: by its own path or by rank 0's. None, on every rank, where some rank
    sees it by neither. ``make``: rank 0 makes it, in a directory that is there.

    Raises UserError, on every rank, where rank 0 cannot write there.
    """
    told = [str(folder.absolute()), uuid.uuid4().hex]
    dist.broadcast_object_list(told, src=0, device=world.device)
    mark = f".seen-{told[1]}"
    refusal = ""
    if world.is_main:
        try:
            if make:
                folder.mkdir(exist_ok=True)
            (folder / mark).touch()
        except OSError as error:
            refusal = f"{folder} cannot be written ({error.strerror}); make it writable, or free space there"
    if refusal := broadcast_error(refusal, world.device):
        raise UserError(refusal)
    deadline = time.monotonic() + (0.0 if world.size == world.local_size else _PATIENCE_S)
    while (seen := _first_with(mark, folder.absolute(), Path(told[0]))) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    (missing,) = all_reduce_sum(float(seen is None), device=world.device)
    if world.is_main:
        with suppress(OSError):
            (folder / mark).unlink()
    return None if missing else seen


def _first_with(name: str, *folders: Path) -> Path | None:
    return next((folder for folder in folders if (folder / name).exists()), None)
