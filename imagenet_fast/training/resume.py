"""Resume a run: find its checkpoint, and load the state of every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from imagenet_fast.checkpoint import Checkpoint, newest, open_checkpoint
from imagenet_fast.checkpoint.folder import Damage, damaged_part, read_survey
from imagenet_fast.checkpoint.tree import HostCopy, read_tree
from imagenet_fast.data.fingerprint import Contents
from imagenet_fast.data.fingerprint import differences as differences_of_data
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.distributed.messages import barrier, common_folder, from_main, raise_on_all_ranks, to_main
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.events import read_events
from imagenet_fast.recipe.job import Job, differences
from imagenet_fast.recipe.parallel_config import chunks_of
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.run.run_dir import RunDir
from imagenet_fast.training.state import TrainState, joined


@dataclass(frozen=True)
class ResumePoint:
    """Checkpoint from which a run resumes; the same on every rank."""

    checkpoint: Checkpoint
    elsewhere: bool
    """True if the number of ranks, their layout or their parts of the model have changed."""
    gap_s: float
    """Seconds since the checkpoint was saved; 0 if the clock was set back."""

    @property
    def step(self) -> int:
        """Last step before the checkpoint."""
        return self.checkpoint.manifest.step

    def load(self, state: TrainState, world: DistContext, recipe: Recipe) -> ResumePoint:
        """Load the checkpoint into ``state``, evaluated again if ``recipe`` judges otherwise; return the rest."""
        checkpoint = self.checkpoint
        own = self._joined(world) if self.elsewhere else checkpoint.part(world.rank, world.device)
        barrier()  # disks are unlike fast
        try:
            state.load(checkpoint.shared, own)
        except (KeyError, RuntimeError):
            if change := _change_of_network(checkpoint.shared, state):
                raise UserError(
                    f"the network {change} since {checkpoint.folder} was written; restore it, or begin another run "
                    "with --init-from"
                ) from None
            raise
        if world.is_main and state.outcome.status == "reached":  # perhaps earlier, if the target was higher until now
            with suppress(UserError):
                events = read_events(checkpoint.folder.parents[1])
                state.outcome.judge(e for e in events if e["event"] == "eval" and e["step"] <= self.step)
        state.outcome.resumed += 1
        state.outcome.gap_s += self.gap_s
        measured = [top1 is not None for top1 in (state.outcome.top1_mirror, state.outcome.top1_shift)]
        otherwise = recipe.target_mirrored and measured != [recipe.eval_mirror, recipe.eval_shift > 0]
        state.needs_eval = checkpoint.manifest.top1 is None or otherwise
        if state.needs_eval:
            state.outcome.clear_target()
        return replace(self, checkpoint=replace(checkpoint, shared={}))  # weights and momenta take memory

    def _joined(self, world: DistContext) -> Any:
        """Return the parts of all ranks as one, which rank 0 reads for all: they may be many."""
        content = [b""]
        with raise_on_all_ranks():
            if world.is_main:
                parts = (part for _, part in self.checkpoint.parts(world.device))
                own = joined(parts, sharded=self.checkpoint.manifest.layout.get("tp", 1) > 1)
                content = [b"".join(HostCopy().take(own))]
        with here.waiting():
            dist.broadcast_object_list(content, device=world.device)
        return read_tree(content[0], world.device)

    def check_data(self, contents: Contents) -> None:
        """Raise UserError if classes, images or labels have changed to ``contents`` since."""
        if changed := differences_of_data(self.checkpoint.shared["data"], contents):
            raise UserError(
                f"the data has {' and '.join(changed)} since {self.checkpoint.folder} was written; restore it, or "
                "begin another run with --init-from"
            )

    def check_length(self, epochs: int, steps_per_epoch: int) -> None:
        """Raise UserError if the run has already trained for longer than ``epochs``."""
        if self.step > epochs * steps_per_epoch:
            trained = self.step / steps_per_epoch
            raise UserError(
                f"epochs is {epochs}, and {self.checkpoint.folder} has been trained for {trained:.4g} epochs; give "
                f"epochs={math.ceil(trained)} or more, or begin another run with --init-from"
            )


def find_resumption(job: Job, world: DistContext) -> ResumePoint | None:
    """Return where ``job`` resumes, found by rank 0, or None if there is no checkpoint yet.

    Raises:
        UserError: The same on every rank, if the run cannot be resumed.
    """
    saved = RunDir(job.folder).checkpoints
    with raise_on_all_ranks():
        there = world.is_main and any(read_survey(saved))
    if not from_main(there):
        return None
    root = common_folder(saved, world)
    if root is None:
        raise UserError(
            f"not every node sees the checkpoints that rank 0 has in {job.folder}; put the run where all of them do"
        )
    last = _newest(root, world)
    name = from_main("" if last is None else last.folder.name)
    checkpoint = last or open_checkpoint(root / name)
    begun, gap_s = checkpoint.shared["recipe"], time.time() - checkpoint.shared["saved_at"]
    if changed := differences(begun, job.recipe):
        raise UserError(
            f"{job.folder} was begun with another recipe and cannot go on with this one: {', '.join(changed)}; "
            "change that back, or give another --out"
        )
    manifest, parallel = checkpoint.manifest, job.recipe.parallel
    elsewhere = (manifest.world, manifest.layout) != (world.size, parallel.axes(world.size))
    elsewhere |= chunks_of(begun["parallel"]["schedule"]) != chunks_of(parallel.schedule)  # a rank has other layers
    return ResumePoint(checkpoint, elsewhere, max(0.0, gap_s))


def _newest(root: Path, world: DistContext) -> Checkpoint | None:
    """Return the newest whole checkpoint on rank 0; each rank reads a share of the parts of those that it considers."""
    last, share = None, slice(world.rank, None, world.size)

    def check(folder: Path) -> Damage | None:
        from_main(folder.name)
        return next(filter(None, to_main(damaged_part(folder, share))), None)

    with raise_on_all_ranks():
        if world.is_main:
            try:
                last = newest(root, check=check)
            finally:
                from_main("")
        else:
            while name := from_main():
                to_main(damaged_part(root / name, share))
    return last


def _change_of_network(shared: Mapping[str, Any], state: TrainState) -> str:
    """Return how the model differs from that of a checkpoint, in words; empty if not, or if ranks divide the model."""
    if state.division is not None:
        return ""
    models = (shared["model"], state.model.state_dict())
    before, now = ({name: list(tensor.shape) for name, tensor in model.items()} for model in models)
    for name in now | before:
        if now.get(name) != before.get(name):
            return f"has {name} of shape {now.get(name, 'none')}, and had {before.get(name, 'none')}"
    for name, param in state.model.named_parameters():
        if param.requires_grad and name not in shared["velocity"]:
            return f"trains {name}, which was frozen,"
    return ""
