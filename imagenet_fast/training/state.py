"""Hold the training state: what a step changes and what a checkpoint contains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_fast.distributed.reductions import RunningMeans, average_batch_norms, gather_rows
from imagenet_fast.parallel.ddp import GradientSync
from imagenet_fast.parallel.parallelize import ParallelModel
from imagenet_fast.run.result import RunResult
from imagenet_fast.sync.kept_state import reshard_sync_state
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.ema import ModelEma
from imagenet_fast.training.nonfinite import must_be_finite
from imagenet_fast.training.optimizers import SGD
from imagenet_fast.training.precision import LossScaler


@dataclass
class TrainState:
    """Everything that later steps depend on.

    Random numbers are not part of it: they follow from the step (``data/order.py``, ``seed_step``), as do the epoch and
    the images.
    """

    model: nn.Module
    """The part of the model that this rank trains."""
    division: ParallelModel | None
    """Division of the model over ranks; None if each rank holds all of it."""
    average: ModelEma | None
    """Moving average of the weights, or None.

    It is updated with each weight, and engines may defer updates: it is up to date after ``settle``.
    """
    optimizer: SGD
    sync: GradientSync
    scale: LossScaler
    clock: Clock
    outcome: RunResult
    streak: Tensor
    """That of ``Meter``; in no checkpoint, as none is written while it is above 0."""
    step: int = 0
    """Number of steps taken."""
    sent_bytes: int = 0
    """Bytes this rank has sent in these steps, for gradients and, if the model is divided, for activations."""
    needs_eval: bool = False
    """True if the weights are of a checkpoint without an evaluation: a stop may have cut the evaluation off."""

    def settle(self) -> None:
        """Apply the weight updates that the engine has deferred to the next forward."""
        self.sync.settle()

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate, as far as this rank holds it: the moving average if there is one, else the model."""
        return self.model if self.average is None else self.average.module

    @contextmanager
    def averaged_statistics(self) -> Iterator[None]:
        """Average the batch-norm statistics of ``eval_model`` over all ranks that hold the same layers.

        They stay so, unless an error or a stop ends the block: then all buffers are as they were.
        """
        before = {name: buffer.clone() for name, buffer in self.eval_model.named_buffers()}
        average_batch_norms(self.eval_model, None if self.division is None else self.division.layout.stage)
        try:
            yield
        except BaseException:
            _copy(before, dict(self.eval_model.named_buffers()))
            raise

    def whole(self) -> nn.Module:
        """Return all of ``eval_model``, even if the model is divided over ranks.

        Call ``settle`` first. Every rank must call it.
        """
        return self.eval_model if self.division is None else self.division.whole(self.eval_model)

    def changed(self) -> dict[str, list[Tensor]]:
        """Return the tensors that a step changes, by what they are; not those of the engine."""
        average = [] if self.average is None else [*self.average.module.parameters(), *self.average.module.buffers()]
        return {
            "weights": list(self.model.parameters()), "statistics": list(self.model.buffers()),
            "momentum": list(self.optimizer.velocity.values()), "averages": average,
            "loss scale": list(self.scale.state_dict().values()), "counts": [self.streak],
        }  # fmt: skip

    def is_finite(self) -> bool:
        """Return whether the state is sound on every rank. Call ``settle`` first. Every rank must call it."""
        return not gather_rows([not self.is_sound()]).any()

    def is_sound(self) -> bool:
        """Return whether weights, buffers and the last loss are finite on this rank; waits for its device."""
        values = [value for model in {self.model, self.eval_model} for value in must_be_finite(model)]
        finite = torch.stack(torch._foreach_norm(values, math.inf)).isfinite().all()
        skipped = self.sync.found_inf is not None and bool(self.sync.found_inf)  # an overflow, which changed nothing
        return bool(finite) and (skipped or int(self.streak) == 0)

    def shared(self) -> dict[str, Any]:
        """Return the state that ranks hold alike or in parts, under the whole model's names.

        Call ``settle`` first. Every rank must call it.
        """
        return {
            "model": self._whole(self.model),
            "average": None if self.average is None else self._whole(self.average.module),
            "velocity": self._whole_velocity(),
            "scale": self.scale.state_dict(),
            "outcome": asdict(self.outcome) | {"run_s": self.clock.run_s(), "train_s": self.clock.train_s()},
            "step": self.step,
        }

    def own(self) -> dict[str, Any]:
        """Settle, and return the state of this rank alone: batch-norm statistics and the engine's state."""
        return {
            "sync": self.sync.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "average": None if self.average is None else dict(self.average.module.named_buffers()),
            "sent_bytes": self.sent_bytes,
        }

    @torch.no_grad()
    def load(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Continue from values of ``shared`` and ``own``; on other ranks than before, from what is ``joined``."""
        self.model.load_state_dict(self._parts(shared["model"]))
        if self.average is not None:
            self.average.module.load_state_dict(self._parts(shared["average"]))
            _copy(own["average"], dict(self.average.module.named_buffers()))
        parts = self._parts(shared["velocity"])
        velocity = self.optimizer.velocity
        for name, param in self.model.named_parameters():
            if param in velocity:
                velocity[param].copy_(parts[name])
        self.scale.load_state_dict(shared["scale"])
        self.outcome.resume_from(shared["outcome"])
        self.clock.go_on(self.outcome.run_s, self.outcome.train_s)
        self.step = shared["step"]
        self.streak.zero_()
        _copy(own["buffers"], dict(self.model.named_buffers()))
        self.sent_bytes = own["sent_bytes"]
        self.sync.load_state_dict(own["sync"])

    def _parts(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return whole if self.division is None else self.division.parts(whole)

    def _whole(self, trained: nn.Module) -> dict[str, Tensor]:
        return (trained if self.division is None else self.division.whole(trained)).state_dict()

    def _whole_velocity(self) -> dict[str, Tensor]:
        """Return the momenta by parameter name; in a divided model, 0 for parameters that are not trained."""
        velocity, named = self.optimizer.velocity, dict(self.model.named_parameters())
        if self.division is None:
            return {name: velocity[param] for name, param in named.items() if param in velocity}
        own = {name: velocity.get(param, torch.zeros_like(param, requires_grad=False)) for name, param in named.items()}
        return self.division.whole_params(own)


def joined(parts: Iterable[Mapping[str, Any]], sharded: bool) -> dict[str, Any]:
    """Merge the ``TrainState.own`` of every rank into one, for each rank of another number of ranks or layout.

    Batch-norm statistics are averaged. At most two values are held at a time: those of many ranks together may be
    larger than a device's memory. ``sharded`` tells whether ranks held shards of layers.
    """
    own: dict[str, Any] = {"sent_bytes": 0}
    statistics = {"buffers": RunningMeans(), "average": RunningMeans()}

    def of_engines() -> Iterator[Any]:
        for part in parts:
            own["sent_bytes"] = own["sent_bytes"] or part["sent_bytes"]
            for kind, means in statistics.items():
                for name, buffer in (part[kind] or {}).items():
                    means.add(name, buffer)
            yield part["sync"]

    own["sync"] = reshard_sync_state(of_engines(), sharded)
    return own | {kind: means.values for kind, means in statistics.items()}


def _copy(values: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(values[name])
