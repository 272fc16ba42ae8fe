"""A training that was saved, and goes on in other processes: to the bit as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tests
from imagenet_fast.checkpoint.staging import StagingBuffer, read_tree
from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.training.state import joined
from imagenet_fast.training.train_step import TrainingStep, build_step
from tests.conftest import tables
from tests.parallel.small import CPU, UNDIVIDED, Tiny, images_of
from tests.ranks import run
from tests.sync.loops import LINK, unmeasured

LARS = {"kind": "lars", "lr": 0.1, "weight_decay": 1e-3, "trust_coefficient": 0.05}
SETTINGS: dict[str, dict[str, Any]] = {
    "allreduce": {"sync": {"kind": "allreduce", "wire": "fp32"}},
    "ring": {"sync": {"kind": "ring", "wire": "bf16"}},
    "lazy": {"sync": {"kind": "lazy", "wire": "fp32", "threshold_mb": 0.05}},
    "lazy, planned": {"sync": {"kind": "lazy", "wire": "bf16"}},
    "hybrid, LARS": {"sync": {"kind": "hybrid", "wire": "fp32"}, "optim": LARS},
    "dear, averaged": {"sync": {"kind": "dear", "wire": "bf16"}, "ema_decay": 0.9},
    "int8": {"sync": {"kind": "lazy", "wire": "int8", "bf16_steps": 2}},
    "hybrid fp8": {"sync": {"kind": "hybrid", "wire": "fp8"}},
    "sparse": {"sync": {"kind": "sparse", "chunk": 256, "sparsity": 0.8, "dense_epochs": 0.5, "ramp_epochs": 0.5}},
    "sparse, deferred, corrected": {
        "sync": {
            "kind": "sparse", "chunk": 256, "sparsity": 0.8, "dense_epochs": 0.25, "ramp_epochs": 0,
            "timing": "hybrid", "momentum_correction": True,
        }
    },
    "powersgd": {"sync": {"kind": "powersgd", "rank": 2, "dense_epochs": 0.25}},
    "ddp": {"sync": {"kind": "ddp", "wire": "fp32", "bucket_cap_mb": 0.01}},
    "ddp, accumulated": {"global_batch": 24, "sync": {"kind": "ddp", "wire": "bf16", "bucket_cap_mb": 0.01}},
    "ddp, powersgd": {"sync": {"kind": "ddp", "wire": "fp32", "powersgd_rank": 2}},
    "auto": {"sync": {"kind": "auto", "wire": "fp32"}},
    "auto, inexact": {"sync": {"kind": "auto", "wire": "bf16", "inexact": True}},
    "clipped, accumulated": {"clip_norm": 0.5, "global_batch": 24, "sync": {"kind": "ring", "wire": "fp32"}},
    "fp16": {"precision": {"kind": "fp16"}, "sync": {"kind": "hybrid", "wire": "fp16"}},
}  # fmt: skip


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.ci), 3])
def test_with_every_engine_it_goes_on_to_the_bit(world: int):
    run(world, _same_with_every_engine)


def _same_with_every_engine() -> None:
    for name, settings in SETTINGS.items():
        straight = _trained("normalised", 9, [], **settings)
        for stop in (1, 7):  # before and after what is learnt from the first steps
            _assert_same(straight, _trained("normalised", 9, [stop], **settings), f"{name}, stopped after {stop}")


def test_on_one_machine_what_is_measured_changes_no_bit():
    """Else a run that is killed before its first checkpoint would end otherwise than it would have."""
    run(3, _same_however_fast)


def _same_however_fast() -> None:
    for sync in ("ring", "lazy", "hybrid", "dear", "sparse", "powersgd"):
        settings = {"sync": {"kind": sync, "wire": "fp32"} if sync != "powersgd" else {"kind": sync, "rank": 2}}
        ends = [
            _trained("wide", 8, [], link=link, **settings)
            for link in (LinkModel(1e-4, 1e-8), LinkModel(3e-6, 1e-7), LinkModel(1.0, 0.0))
        ]
        for end in ends[1:]:
            _assert_same(ends[0], end, sync)


def test_with_every_layout_it_goes_on_to_the_bit():
    run(4, _same_with_every_layout)


def _same_with_every_layout() -> None:
    for parallel in (Parallel(tensor=4), Parallel(tensor=2), Parallel(pipeline=2, micro_batches=2)):
        for sync in (
            {"kind": "hybrid", "wire": "fp32", "fuse_mb": 1},
            {"kind": "lazy", "wire": "int8", "threshold_mb": 1},
        ):
            straight = _trained("wide", 8, [], parallel, global_batch=16, sync=sync, ema_decay=0.9)
            resumed = _trained("wide", 8, [3, 6], parallel, global_batch=16, sync=sync, ema_decay=0.9)
            _assert_same(straight, resumed, f"{parallel.layout(4)} {sync['wire']}")


@pytest.mark.parametrize("sync", [{"kind": "lazy", "wire": "int8", "threshold_mb": 1}, SETTINGS["sparse"]["sync"]])
def test_other_ranks_go_on_with_the_same_weights_and_the_same_rest(sync: dict[str, Any], tmp_path: Path):
    """``tp4``, then ``dp2``, then ``pp2dp2``, then three ranks; what is left behind keeps its share in the mean."""
    layouts = {4: Parallel(tensor=4), 2: UNDIVIDED}
    run(4, _train_and_save, tmp_path / "tp4", None, layouts[4], sync)
    run(2, _train_and_save, tmp_path / "dp2", tmp_path / "tp4", layouts[2], sync)
    run(4, _train_and_save, tmp_path / "pp2dp2", tmp_path / "dp2", Parallel(pipeline=2, micro_batches=2), sync)
    run(3, _train_and_save, tmp_path / "dp3", tmp_path / "pp2dp2", UNDIVIDED, sync)


@unmeasured()
def _train_and_save(folder: Path, before: Path | None, parallel: Parallel, sync: dict[str, Any]) -> None:
    begin, batches = _preparation("wide", parallel, {"global_batch": 48, "sync": sync, "ema_decay": 0.9})
    rank, ranks = dist.get_rank(), dist.get_world_size()
    take_step = begin()
    if before is not None:
        shared, owns = _files(before)
        own = joined(owns, sharded=before.name == "tp4")
        take_step.state.load(shared, own)
        again, left = _read_back(take_step.state.shared()), _read_back(take_step.state.own())
        for kind in ("model", "average", "velocity"):
            assert again[kind].keys() == shared[kind].keys()
            assert all(torch.equal(again[kind][name], tensor) for name, tensor in shared[kind].items()), kind
        assert again["step"] == shared["step"]
        rest = _rest(own["sync"])
        for name, value in _rest(left["sync"]).items():
            assert torch.equal(value, rest.get(name, torch.zeros_like(value))), name
        for name, value in rest.items() if before.name == "dp2" else ():
            torch.testing.assert_close(value, torch.stack([_rest(theirs["sync"])[name] for theirs in owns]).mean(0))
        assert any(value.any() for value in rest.values())
    for step in range(take_step.state.step, take_step.state.step + 4):
        take_step(batches(step), 0.05)
    shared, own = _through_a_file(take_step)
    folder.mkdir(exist_ok=True)
    torch.save(own, folder / f"{rank}")
    if rank == 0:
        torch.save(shared, folder / "shared")
    take_step.state.sync.close()
    dist.barrier()
    assert len(list(folder.iterdir())) == ranks + 1


def _files(folder: Path) -> tuple[Any, list[Any]]:
    parts = sorted(path for path in folder.iterdir() if path.name != "shared")
    return torch.load(folder / "shared"), [torch.load(path) for path in parts]


def _rest(sync: Any) -> dict[str, Tensor]:
    """Return the gradients left behind, by parameter."""
    found = {}
    for pool in sync if isinstance(sync, list) else [sync]:
        engine = pool["engine"]
        kept = engine.get("residual") if engine.get("left") is None else engine["left"]
        for name, (start, flag) in engine["places"].items() if kept is not None else ():
            found[name] = kept[start:flag].clone()
    return found


def _trained(
    kind: str, steps: int, stops: list[int], parallel: Parallel = UNDIVIDED, lr: float = 0.05,
    link: LinkModel = LINK, **changes: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Return this rank's state after so many steps, with a network like ``link``.

    At each of ``stops`` all is built anew from what was saved.
    """
    with unmeasured(link), patch("imagenet_fast.sync.layer_timer.seconds_between", _seconds):
        return _trained_on_it(kind, steps, stops, parallel, lr, changes)


def _seconds(begin: object, end: object) -> float:
    """Say how long every layer took: ``auto`` would choose another engine whenever the machine is busy."""
    return 1e-4


def _trained_on_it(
    kind: str, steps: int, stops: list[int], parallel: Parallel, lr: float, changes: dict[str, Any]
) -> dict[str, Tensor]:
    begin, batches = _preparation(kind, parallel, changes)
    take_step = begin()
    for step in range(steps):
        if step in stops:
            saved = _through_a_file(take_step)
            take_step.state.sync.close()
            take_step = begin()
            take_step.state.load(*saved)
            assert take_step.state.step == step
        take_step(batches(step), lr)
    state = take_step.state
    state.settle()
    found = {name: tensor.clone() for name, tensor in state.judged.state_dict().items()}
    found |= {f"momentum {number}": v.clone() for number, v in enumerate(state.optimizer.velocity.values())}
    state.sync.close()
    return found


def _preparation(
    kind: str, parallel: Parallel, changes: dict[str, Any]
) -> tuple[Callable[[], TrainingStep], Callable[[int], Iterator[tuple[Tensor, Tensor]]]]:
    """Return a function that builds a step from fresh weights, and this rank's images of each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = {"global_batch": 12, "micro_batch": 2, "ranks": 1, "model": {"kind": "resnet18"}, "data__image_size": 67}
    recipe = parse_recipe("test", tables(**(own | changes)))
    data = recipe.data.model_copy(update={"image_size": 5})
    recipe = recipe.model_copy(update={"parallel": parallel, "data": data})
    batching = split_batch(recipe, ranks)

    def begin() -> TrainingStep:
        torch.manual_seed(0)
        model = _normalised() if kind == "normalised" else Tiny(units=128)  # of which layers are long enough for codes
        return build_step(recipe, batching, model, tests.world(rank, ranks), 4)

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = (
            t.unflatten(0, (batching.readers, batching.accumulation, batching.micro_batch))[rank % batching.readers]
            for t in images_of("tiny", step, recipe.global_batch)
        )
        return zip(images, labels, strict=True)

    return begin, batches


def _normalised() -> nn.Module:
    """Batch norms, several kinds of layer, and one that is used twice."""
    again = nn.Conv2d(8, 8, 1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), again, nn.BatchNorm2d(8), nn.ReLU(), again, nn.Flatten(),
        nn.Linear(72, 64), nn.ReLU(), nn.Linear(64, 5),
    )  # fmt: skip


def _through_a_file(take_step: TrainingStep) -> tuple[Any, Any]:
    """The state of all, and this rank's own, as they are in a checkpoint's files."""
    take_step.state.settle()
    own = take_step.state.own()
    return _read_back(take_step.state.shared()), _read_back(own)


def _read_back(tree: Any) -> Any:
    copy = StagingBuffer()
    copy.take(tree)
    return read_tree(b"".join(bytes(chunk) for chunk in copy.chunks()), CPU)


def _assert_same(one: dict[str, Tensor], other: dict[str, Tensor], case: str) -> None:
    assert one.keys() == other.keys()
    apart = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not apart, f"{case}: {len(apart)} of {len(one)} tensors differ, as {apart[:3]}"
