"""Numbers that go wrong end a run on all ranks at once, in one sentence that says where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tests
from imagenet_fast.checkpoint import CheckpointWriter, newest
from imagenet_fast.metrics import MetricLogger
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.training.checkpoint_manager import CheckpointManager
from imagenet_fast.training.nonfinite import NonFiniteCounter, NonFiniteLoss
from imagenet_fast.training.nonfinite_report import explain
from imagenet_fast.training.train_step import TrainingStep, build_step
from tests.conftest import tables
from tests.parallel.small import CPU, UNDIVIDED, Tiny, images_of
from tests.ranks import run
from tests.sync.loops import unmeasured

Spoil = Callable[[TrainingStep], None]
SILENT = MetricLogger(lambda: 0.0)
ENGINES: dict[str, dict[str, Any]] = {
    "lazy": {"kind": "lazy", "wire": "fp32", "threshold_mb": 0.01},
    "hybrid": {"kind": "hybrid", "wire": "bf16"},
    "dear": {"kind": "dear", "wire": "fp32"},
    "sparse": {"kind": "sparse", "chunk": 64, "sparsity": 0.8, "dense_epochs": 0, "ramp_epochs": 0},
    "ddp": {"kind": "ddp", "wire": "fp32"},
}
GUARDED = {"kind": "hybrid", "wire": "fp16"}
"""With gradients that are looked at: a step that cannot be used changes no weight."""


def test_streak_counts_nonfinite_losses():
    streak = NonFiniteCounter(CPU)
    seen = []
    for loss in (1.0, torch.nan, torch.inf, 0.0, 3e38, -torch.inf, torch.nan, torch.nan, -0.0):
        streak.add(torch.tensor(loss))
        seen.append(int(streak))
    assert seen == [0, 1, 2, 0, 0, 1, 2, 3, 0]
    streak.add(torch.tensor(torch.inf, dtype=torch.bfloat16))
    assert int(streak) == 1


def test_it_ends_alike_under_every_engine_and_names_the_layer_and_the_rank():
    for (name, told), (_, other) in zip(*run(2, _with_every_engine), strict=True):
        assert told == other, "ranks tell the same"
        assert told.startswith("the loss has not been finite for 3 steps, from step 5 on: on rank "), (name, told)
        assert told.endswith("; no checkpoint had been written")
        assert "see to" in told or "lower optim.lr or lengthen schedule.warmup_epochs, and begin another run" in told
        assert EXPECTED.get(name, SPOILT) in told, (name, told)


SPOILT = "rank 0 8 of its 8 parameters are not finite, the first of them in features.0 (Conv2d); lower "
EXPECTED = {
    "sparse": "of its 8 parameters are not finite, the first of them in classifier.",  # others are unsent
    "layer": "rank 0 classifier.4 (Linear) is the first layer whose output is not finite though its input is; ",
    "seen": "rank 0 in step 5 classifier.4 (Linear) was the first layer whose output was not finite though its input ",
    "images": "rank 1 the images are not finite; see to data.mean, data.std and the images; ",
}


def _with_every_engine() -> list[tuple[str, str]]:
    told = [(name, _told(partial(_overflow, "classifier.4"), sync=sync)) for name, sync in ENGINES.items()]
    told.append(("layer", _told(partial(_overflow, "classifier.4"), sync=GUARDED)))
    for name in ("lazy", "hybrid", "ddp"):
        told.append(("seen", _told(partial(_overflow, "classifier.4"), watched=5, sync=ENGINES[name])))
    told.append(("images", _told(None, drawn_images=1, sync=GUARDED)))
    return told


def test_the_rank_that_holds_the_layer_says_so():
    for told in zip(*run(4, _with_every_layout), strict=True):
        assert len({*told}) == 1
        where, sentence = told[0]
        assert f"on rank {where} " in sentence
        assert " the first layer whose output" in sentence


def _with_every_layout() -> list[tuple[str, str]]:
    layouts = {
        Parallel(tensor=4): "0 classifier.4 (RowParallel)",
        Parallel(tensor=2): "0 classifier.4 (RowParallel)",
        Parallel(pipeline=2, micro_batches=2): "2 classifier.4 (Linear)",
        Parallel(pipeline=2, micro_batches=4, schedule="interleaved"): "0 classifier.4 (Linear)",
        Parallel(pipeline=2, tensor=2, micro_batches=2): "2 classifier.4 (RowParallel)",
    }
    wild = partial(_overflow, "classifier.4")
    told = [(where, _told(wild, layout, micro_batch=4)) for layout, where in layouts.items()]
    for layout, where in layouts.items():
        seen = _told(wild, layout, watched=5, micro_batch=4, sync=ENGINES["dear"])
        told.append((where.replace(" ", " in step 5 ", 1), seen))
    return told


def test_a_loss_that_is_not_finite_of_finite_logits_is_no_layers():
    (told,) = run(1, _told, _cross)
    assert "on rank 0 the loss is not finite, though the network's output is" in told


def test_nothing_is_saved_while_the_loss_is_not_finite(tmp_path: Path):
    """Hybrid and dear update a layer in the next forward. That of step 4 has weights that are wild, though finite."""
    for name, told in zip(("hybrid", "dear", "lazy"), run(2, _saving, tmp_path)[0], strict=True):
        assert told.endswith("; --resume goes on from the checkpoint of step 3 and looks at every layer in step 5")
        found = newest(tmp_path / name / "checkpoints")
        assert found is not None
        assert found.manifest.step == 3
        left = sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
        assert left == ["spoilt-step-00000004", "step-00000003"], "no later one has displaced it"
        shared = found.shared()
        assert all(tensor.isfinite().all() for tensor in shared["model"].values())


def _overflow(layer: str, take_step: TrainingStep) -> None:
    """Its weights become wild, though finite, where it is held."""
    with torch.no_grad(), suppress(AttributeError):
        take_step.state.model.get_submodule(layer).weight.fill_(3e38)
    with torch.no_grad(), suppress(AttributeError):
        take_step.state.model.get_submodule("classifier.1").bias.fill_(10.0)  # of which every image's overflow


def _cross(take_step: TrainingStep) -> None:
    """The first class is by far the likeliest, whatever is seen."""
    with torch.no_grad():
        take_step.state.model.get_submodule("classifier.6").bias.copy_(torch.tensor([3e38, -3e38, 0, 0, 0]))


def _saving(folder: Path) -> list[str]:
    wild = partial(_overflow, "classifier.4")
    return [_told(wild, folder=folder / name, sync=ENGINES[name]) for name in ("hybrid", "dear", "lazy")]


def test_who_is_told_to_stop_while_numbers_are_wrong_saves_nothing(tmp_path: Path):
    (told,) = run(1, partial(_told, partial(_overflow, "classifier.4"), folder=tmp_path, stop=6, nonfinite_steps=99))
    assert told.startswith("the loss has not been finite for 2 steps, from step 5 on: ")
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000003"]


def test_whoever_does_not_want_to_be_stopped_is_not_and_all_is_saved(tmp_path: Path):
    with pytest.raises(AssertionError, match="it has not ended"):
        run(1, partial(_told, partial(_overflow, "classifier.4"), folder=tmp_path, nonfinite_steps=0))
    found = newest(tmp_path / "checkpoints")
    assert found is not None
    assert found.manifest.step == 8


@unmeasured()
def _told(
    spoil: Spoil | None, parallel: Parallel = UNDIVIDED, drawn_images: int | None = None, folder: Path | None = None,
    watched: int | None = None, stop: int = 99, **changes: Any,
) -> str:  # fmt: skip
    """Why training ended that goes wrong after its fourth step, with a report and a checkpoint after every one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = tests.world(rank, ranks)
    own = {"sync": GUARDED, "nonfinite_steps": 3, "global_batch": 16, "micro_batch": 2, "ranks": 1}
    recipe = parse_recipe(
        "test", tables(**(own | {"data__image_size": 67, "checkpoint": {"every_steps": 1}} | changes))
    )
    data = recipe.data.model_copy(update={"image_size": 5})
    recipe = recipe.model_copy(update={"parallel": parallel, "data": data})
    batching = split_batch(recipe, ranks)
    torch.manual_seed(0)
    take_step = build_step(recipe, batching, Tiny(), world, 4)
    take_step.watched = watched
    job = Job("test", recipe, batching, None, folder or Path())
    writer = None
    if folder is not None:
        folder.mkdir(exist_ok=True)
        store = dist.distributed_c10d._get_default_store()
        writer = CheckpointWriter(folder / "checkpoints", world, dist.PrefixStore(folder.name, store), keep=1)
    keep = CheckpointManager(job, world, writer, 64, lambda: take_step.state.step >= stop)

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = (
            t.unflatten(0, (batching.readers, batching.accumulation, batching.micro_batch))[rank % batching.readers]
            for t in images_of("tiny", step, recipe.global_batch)
        )
        if step >= 4 and rank == drawn_images:
            images[:, :, 0, 2, 2] = torch.nan
        return zip(images, labels, strict=True)

    try:
        for step in range(8):
            take_step(batches(step), 0.05)
            take_step.meter.report(SILENT, step, 1, 0.05)
            if step == 3 and spoil is not None:
                take_step.state.settle()
                spoil(take_step)
            keep(take_step.state, False)
        if writer is not None:
            writer.wait()
    except NonFiniteLoss:
        return explain(take_step, keep, world)
    finally:
        if writer is not None:
            writer.close()
        take_step.state.sync.close()
    raise AssertionError("it has not ended")
