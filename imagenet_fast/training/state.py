"""All that a training is at one moment: what a checkpoint holds, and what a step changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_fast.distributed.reductions import all_reduce_sum, average_batch_norms
from imagenet_fast.metrics import RunResult
from imagenet_fast.parallel.parallelize import ParallelModel
from imagenet_fast.sync import GradientSync
from imagenet_fast.sync.reshard_state import reshard_sync_state
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.ema import ModelEma
from imagenet_fast.training.nonfinite_count import NonFiniteCounter
from imagenet_fast.training.optimizers import MomentumSGD
from imagenet_fast.training.precision import LossScaler


@dataclass
class TrainState:
    """What later steps depend on. Chance is no part of it: it follows from the step (`data/rng.py`,
    `training/seeding.py`), as do the epoch and the images."""

    model: nn.Module
    """What this rank trains of it."""
    division: ParallelModel | None
    """Of a model that several ranks hold in parts."""
    average: ModelEma | None
    """Follows the weights as they are updated, which an engine may put off: up to date after :meth:`settle`."""
    optimizer: MomentumSGD
    sync: GradientSync
    scale: LossScaler
    clock: Clock
    outcome: RunResult
    streak: NonFiniteCounter
    """Of losses that were not finite. It is in no checkpoint, as none is written meanwhile."""
    step: int = 0
    """How many have been taken."""
    sent_bytes: int = 0
    """That this rank has sent in them, for gradients and, of a divided model, for activations."""
    unjudged: bool = False
    """Whether the weights are those of a checkpoint that was not evaluated: a stop may have cut an evaluation off."""

    def settle(self) -> None:
        """Bring every weight up to date, where the engine leaves that to the next forward."""
        self.sync.settle()

    @property
    def judged(self) -> nn.Module:
        """What is evaluated in the end: the moving average where there is one, else the model; this rank's part."""
        return self.model if self.average is None else self.average.module

    def level_statistics(self) -> None:
        """Give :attr:`judged` the same batch-norm statistics on all ranks that hold the same layers."""
        average_batch_norms(self.judged, None if self.division is None else self.division.layout.stage)

    def statistics(self) -> dict[str, Tensor]:
        """A copy of the buffers of :attr:`judged`, for :meth:`put_back`."""
        return {name: buffer.clone() for name, buffer in self.judged.named_buffers()}

    def put_back(self, statistics: Mapping[str, Tensor]) -> None:
        """Undo what was done to the buffers of :attr:`judged` since."""
        _copy(statistics, dict(self.judged.named_buffers()))

    def whole(self) -> nn.Module:
        """:attr:`judged`, once settled, even where each rank has a part. Every rank must ask for it."""
        return self.judged if self.division is None else self.division.whole(self.judged)

    def is_sound(self) -> bool:
        """Whether the last loss and all weights are finite on every rank, once settled. Every rank must ask, and waits
        for its device."""
        weights = [param.detach() for param in self.model.parameters() if param.numel()]
        finite = torch.stack(torch._foreach_norm(weights, math.inf)).isfinite().all()
        (spoilt,) = all_reduce_sum(float(int(self.streak) > 0 or not finite), device=finite.device)
        return not spoilt

    def shared(self) -> dict[str, Any]:
        """What all ranks hold alike, or together, by the whole model's names; once settled. Every rank must ask."""
        return {
            "model": self._whole(self.model),
            "average": None if self.average is None else self._whole(self.average.module),
            "velocity": self._whole_velocity(),
            "scale": self.scale.state_dict(),
            "clock": self.clock.state_dict(),
            "outcome": asdict(self.outcome),
            "step": self.step,
        }

    def own(self) -> dict[str, Any]:
        """What is this rank's own: statistics of batch norms, and what its engine keeps. Settles."""
        return {
            "sync": self.sync.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "average": None if self.average is None else dict(self.average.module.named_buffers()),
            "averaged": None if self.average is None else self.average.state_dict(),
            "sent_bytes": self.sent_bytes,
        }

    @torch.no_grad()
    def load(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Continue from :meth:`shared`, and from this rank's :meth:`own` or, after another number of ranks or with
        another layout, from what :func:`joined` makes of those of all."""
        self._fill(self.model, shared["model"])
        if self.average is not None:
            self._fill(self.average.module, shared["average"])
            _copy(own["average"], dict(self.average.module.named_buffers()))
            self.average.load_state_dict(own["averaged"])
        parts = self._parts(shared["velocity"])
        for name, param in self.model.named_parameters():
            if param in self.optimizer.velocity:
                self.optimizer.velocity[param].copy_(parts[name])
        self.scale.load_state_dict(shared["scale"])
        self.clock.load_state_dict(shared["clock"])
        self.outcome.go_on(shared["outcome"])
        self.step = shared["step"]
        _copy(own["buffers"], dict(self.model.named_buffers()))
        self.sent_bytes = own["sent_bytes"]
        self.sync.load_state_dict(own["sync"])

    def _fill(self, model: nn.Module, whole: Mapping[str, Tensor]) -> None:
        model.load_state_dict(self._parts(whole))

    def _parts(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return whole if self.division is None else self.division.parts(whole)

    def _whole(self, trained: nn.Module) -> dict[str, Tensor]:
        return (trained if self.division is None else self.division.whole(trained)).state_dict()

    def _whole_velocity(self) -> dict[str, Tensor]:
        """By the names of the parameters, zero for those that are not trained."""
        velocity = self.optimizer.velocity
        if self.division is None:
            return {name: velocity[param] for name, param in self.model.named_parameters() if param in velocity}
        likeness = copy.deepcopy(self.model)  # a model of momenta is put together as one of weights is
        for param, like in zip(self.model.parameters(), likeness.parameters(), strict=True):
            like.data = velocity.get(param, torch.zeros_like(param))
        return self._whole(likeness)


def joined(parts: Iterable[Mapping[str, Any]], sharded: bool) -> dict[str, Any]:
    """From the :meth:`TrainState.own` of every rank one that each rank of another number of them, or of another layout,
    continues from: with mean statistics. ``sharded``: ranks had shards of layers."""
    own: dict[str, Any] = {"sync": [], "buffers": {}, "average": {}, "averaged": [], "sent_bytes": 0}
    for part in parts:
        own["sync"].append(part["sync"])
        own["averaged"] += part["averaged"] or []
        own["sent_bytes"] = own["sent_bytes"] or part["sent_bytes"]
        for kind in ("buffers", "average"):
            for name, buffer in (part[kind] or {}).items():
                own[kind].setdefault(name, []).append(buffer)
    for kind in ("buffers", "average"):
        own[kind] = {name: _mean(of_ranks) for name, of_ranks in own[kind].items()}
    return own | {"sync": reshard_sync_state(own["sync"], sharded)}


def _mean(tensors: list[Tensor]) -> Tensor:
    """Of whole numbers, such as counts of batches, the largest."""
    stacked = torch.stack(tensors)
    return stacked.mean(0) if stacked.is_floating_point() else stacked.amax(0)


def _copy(values: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(values[name])
