"""A training that was saved goes on as if it had never stopped: to the bit on as many ranks, and alike on others."""

from __future__ import annotations

import gc
import io
import time
import weakref
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from shutil import copytree
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import tests
from imagenet_fast.checkpoint import CheckpointWriter
from imagenet_fast.checkpoint.tree import HostCopy, read_tree
from imagenet_fast.cost_model.step_simulator import LinkModel
from imagenet_fast.distributed import step_agreement
from imagenet_fast.distributed.messages import barrier
from imagenet_fast.errors import JobAborted
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.parallel_config import Parallel
from imagenet_fast.run.run_dir import RunDir
from imagenet_fast.training.resume import _newest
from imagenet_fast.training.state import joined
from imagenet_fast.training.trainer import Trainer
from imagenet_fast.training.training_step import TrainingStep
from tests.checkpoint.trees import stamp, state
from tests.conftest import tiers
from tests.data.small import image_data
from tests.e2e.command import events_of
from tests.parallel.small import CPU, UNDIVIDED, Loop, Tiny
from tests.ranks import run, with_ranks
from tests.sync.loops import LINK, unmeasured
from tests.training.jobs import job_of

LARS = {"kind": "lars", "lr": 0.1, "weight_decay": 1e-3, "trust_coefficient": 0.05}
SPARSE = {"kind": "sparse", "chunk": 256, "sparsity": 0.8}
INT8 = {"kind": "lazy", "wire": "int8", "threshold_mb": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "allreduce": {"sync": {"kind": "allreduce", "wire": "fp32"}},
    "ring": {"sync": {"kind": "ring", "wire": "bf16"}},
    "lazy": {"sync": {"kind": "lazy", "wire": "fp32", "threshold_mb": 0.05}},
    "lazy-planned": {"sync": {"kind": "lazy", "wire": "bf16"}},
    "hybrid-lars": {"sync": {"kind": "hybrid", "wire": "fp32"}, "optim": LARS},
    "dear-averaged": {"sync": {"kind": "dear", "wire": "bf16"}, "ema_decay": 0.9},
    "int8": {"sync": {"kind": "lazy", "wire": "int8"}},
    "sparse": {"sync": SPARSE | {"dense_epochs": 0.5, "ramp_epochs": 0.5}},
    "sparse-deferred-corrected": {
        "sync": SPARSE | {"dense_epochs": 0.25, "ramp_epochs": 0, "timing": "hybrid", "momentum_correction": True}
    },
    "powersgd": {"sync": {"kind": "powersgd", "rank": 2, "dense_epochs": 0.25}},
    "ddp": {"sync": {"kind": "ddp", "wire": "fp32", "bucket_cap_mb": 0.01}},
    "ddp-accumulated": {"global_batch": 24, "sync": {"kind": "ddp", "wire": "bf16", "bucket_cap_mb": 0.01}},
    "auto": {"sync": {"kind": "auto", "wire": "fp32"}},
    "auto-inexact": {"sync": {"kind": "auto", "wire": "bf16", "inexact": True}},
    "clipped-accumulated": {"clip_norm": 0.5, "global_batch": 24, "sync": {"kind": "ring", "wire": "fp32"}},
    "fp16": {"precision": {"kind": "fp16"}, "sync": {"kind": "hybrid", "wire": "fp16"}},
}  # fmt: skip
FIRST = ["dear-averaged", "int8", "powersgd", "sparse-deferred-corrected"]
PIPED = Parallel(pipeline=2, micro_batches=2)


def normalised() -> nn.Module:
    """Batch norms, several kinds of layer, and one that is used twice."""
    again = nn.Conv2d(8, 8, 1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), again, nn.BatchNorm2d(8), nn.ReLU(), again, nn.Flatten(),
        nn.Linear(72, 64), nn.ReLU(), nn.Linear(64, 5),
    )  # fmt: skip


def wide() -> nn.Module:
    """Layers long enough for codes."""
    return Tiny(units=128)


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.weekly)])
@pytest.mark.parametrize("name", tiers(FIRST, SETTINGS))
def test_on_as_many_ranks_it_goes_on_to_the_bit(name: str, ranks: int):
    """Before and after what is learnt from the first steps."""
    run(ranks, _goes_on, normalised, 9, [[1], [7]], UNDIVIDED, {"global_batch": 12} | SETTINGS[name])


@pytest.mark.ci
@pytest.mark.parametrize("sync", [{"kind": "hybrid", "wire": "fp32", "fuse_mb": 1}, INT8], ids=["hybrid", "int8"])
@pytest.mark.parametrize("layout", [Parallel(tensor=4), Parallel(tensor=2), PIPED], ids=["tp4", "tp2dp2", "pp2dp2"])
@with_ranks(4)
def test_in_a_layout_it_goes_on_to_the_bit(layout: Parallel, sync: dict[str, Any]):
    _goes_on(wide, 8, [[3, 6]], layout, {"global_batch": 16, "sync": sync, "ema_decay": 0.9})


def _goes_on(build: Any, steps: int, stops: list[list[int]], layout: Parallel, settings: dict[str, Any]) -> None:
    loop = Loop("tiny", layout, **settings)
    straight = _trained(loop, build, steps)
    for stop in stops:
        _assert_same(straight, _trained(loop, build, steps, stop))
    torch.set_float32_matmul_precision("highest")  # which fp16 has not


@pytest.mark.parametrize("kind", tiers(["lazy"], ["ring", "hybrid", "dear", "sparse", "powersgd"]))
@with_ranks(3)
def test_what_is_measured_on_a_machine_changes_no_bit(kind: str):
    """Else a run that is killed before its first checkpoint would end otherwise than it would have."""
    settings = {"rank": 2} if kind == "powersgd" else {"wire": "fp32"}
    loop = Loop("tiny", global_batch=12, sync={"kind": kind} | settings)
    links = (LinkModel(1e-4, 1e-8), LinkModel(3e-6, 1e-7), LinkModel(1.0, 0.0))
    first, *others = (_trained(loop, wide, 8, link=link) for link in links)
    for other in others:
        _assert_same(first, other)


def _trained(
    loop: Loop, build: Any, steps: int, stops: tuple[int, ...] | list[int] = (), link: LinkModel = LINK
) -> dict[str, Tensor]:
    """This rank's state after so many steps, with a network like ``link``. At each of ``stops`` all is built anew from
    what was saved. Every layer took as long: ``auto`` would choose another engine whenever the machine is busy."""
    with unmeasured(link), patch("imagenet_fast.sync.layer_timer.seconds_between", lambda begin, end: 1e-4):
        take_step = _begun(loop, build)
        for step in range(steps):
            if step in stops:
                saved = _through_a_file(take_step)
                take_step.state.sync.close()
                take_step = _begun(loop, build)
                take_step.state.load(*saved)
                assert take_step.state.step == step
            take_step(loop.batches(step), 0.05)
        state = take_step.state
        state.settle()
    found = {name: tensor.clone() for name, tensor in state.eval_model.state_dict().items()}
    found |= {f"momentum {number}": v.clone() for number, v in enumerate(state.optimizer.velocity.values())}
    state.sync.close()
    return found


def _begun(loop: Loop, build: Any) -> TrainingStep:
    torch.manual_seed(0)
    return loop.begin(build())


def _through_a_file(take_step: TrainingStep) -> tuple[Any, Any]:
    """The state of all, and this rank's own, as they are in a checkpoint's files."""
    take_step.state.settle()
    own = take_step.state.own()
    return _read_back(take_step.state.shared()), _read_back(own)


def _read_back(tree: Any) -> Any:
    return read_tree(b"".join(HostCopy().take(tree)), CPU)


def _assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


@pytest.mark.ci
@pytest.mark.parametrize("sync", [INT8, SETTINGS["sparse"]["sync"]], ids=["int8", "sparse"])
def test_other_ranks_go_on_with_the_same_weights_and_the_same_rest(sync: dict[str, Any], tmp_path: Path):
    """What is left behind keeps its share in the mean."""
    before = None
    for name, ranks, layout in (
        ("tp4", 4, Parallel(tensor=4)), ("dp2", 2, UNDIVIDED), ("pp2dp2", 4, PIPED), ("dp3", 3, UNDIVIDED),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        run(ranks, _train_and_save, tmp_path / name, before, layout, sync)
        before = tmp_path / name
        assert len(list(before.iterdir())) == ranks + 1


@unmeasured()
def _train_and_save(folder: Path, before: Path | None, layout: Parallel, sync: dict[str, Any]) -> None:
    loop = Loop("tiny", layout, global_batch=48, sync=sync, ema_decay=0.9)
    take_step = _begun(loop, wide)
    if before is not None:
        parts = sorted(path for path in before.iterdir() if path.name != "shared")
        shared, owns = torch.load(before / "shared"), [torch.load(path) for path in parts]
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
        take_step(loop.batches(step), 0.05)
    shared, own = _through_a_file(take_step)
    torch.save(own, folder / f"{loop.world.rank}")
    if loop.world.is_main:
        torch.save(shared, folder / "shared")
    take_step.state.sync.close()


def _rest(sync: Any) -> dict[str, Tensor]:
    """Return the gradients left behind, by parameter."""
    found = {}
    for pool in sync if isinstance(sync, list) else [sync]:
        for name, own in pool["engine"]["kept"].items():
            found[name] = own["residual"].clone()
    return found


PIPES = [{"pipeline": 2, "micro_batches": 2, "schedule": schedule} for schedule in ("1f1b", "interleaved", "1f1b")]
PARTS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "ranks": [(2, {}), (4, {}), (3, {})],
    "schedules": [(2, {"parallel": pipe}) for pipe in PIPES],
}
"""Of a run, each on so many ranks and with these changes of its recipe. Interleaved, each rank of a pipeline holds two
stages that do not follow one another, with batch norms of its own."""


@pytest.mark.ci
@pytest.mark.parametrize("parts", PARTS)
def test_a_run_in_unlike_parts_learns_what_an_unbroken_one_does(parts: str, tmp_path: Path):
    ranks, changes = PARTS[parts][0]
    run(ranks, _train, tmp_path / "straight", 99, changes, fresh=True)
    for (ranks, changes), steps in zip(PARTS[parts], (2, 2, 99), strict=True):
        ended = run(ranks, _train, tmp_path / "parts", steps, changes, fresh=True)
        assert ended == ["finished" if steps == 99 else "preempted"] * ranks
    first, second = (event["step"] for event in events_of(tmp_path / "parts", "resume"))
    assert 0 < first < second < 10
    expected, found = (load_file(RunDir(tmp_path / name).final_weights) for name in ("straight", "parts"))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():  # sums are rounded in another order, and nothing else differs
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


def _job(folder: Path, changes: dict[str, Any]) -> Job:
    """Ten steps, or what is left of them."""
    small = {"data__train_images": 60, "global_batch": 12, "micro_batch": 1, "eval_every": 2}
    model = {"kind": "python", "name": "tests.models.own:six_pieces"}
    return job_of(folder, resume=True, model=model, **small, **changes)


def _train(folder: Path, steps: int, changes: dict[str, Any]) -> str:
    """It is told to stop after so many steps, each of which takes longer than ranks need to hear of it."""
    trainer = Trainer(_job(folder, changes), tests.world(), ask_first=lambda: asked)
    take_step = trainer.train_step

    def asked() -> bool:
        return trainer.state.step - (trainer.resumed_from.step if trainer.resumed_from else 0) >= steps

    def slowly() -> None:
        time.sleep(0.2 if steps < 10 else 0.0)
        take_step()

    heard_soon = patch.multiple(step_agreement, _LOOK_S=0.01, _AHEAD_S=0.0)
    with heard_soon, patch.object(trainer, "train_step", slowly):
        return trainer.run().status


@with_ranks(2)
def test_ranks_share_the_work_of_finding_a_checkpoint_that_is_whole(tmp_path: Path):
    world, warned = tests.world(), io.StringIO()
    with CheckpointWriter(tmp_path, world, dist.distributed_c10d._get_default_store()) as writer:
        for step in (1, 2):
            writer.save(stamp(step, world=2), state(step), state(step, rank=1 + world.rank))
    part = tmp_path / "step-00000002/rank-00001.safetensors"
    if world.is_main:
        part.write_bytes(part.read_bytes()[:-1])
    barrier()
    with redirect_stderr(warned):
        found = _newest(tmp_path, world)
    assert (found.manifest.step if found else None) == (1 if world.is_main else None)
    assert ("rank-00001.safetensors has " in warned.getvalue()) == world.is_main


def test_the_checkpoint_itself_is_not_kept_in_memory(tmp_path: Path):
    assert run(1, _train, tmp_path, 2, {}, fresh=True) == ["preempted"]
    assert run(1, _kept_after_resuming, tmp_path) == [(set(), 0)]


def _kept_after_resuming(folder: Path) -> tuple[set[str], int]:
    trainer = Trainer(_job(folder, {}), tests.world())
    trainer.open_data()
    loaded = [weakref.ref(tensor) for tensor in trainer.resumed_from.checkpoint.shared["model"].values()]
    trainer.build()
    gc.collect()
    trainer.state.sync.close()
    return set(trainer.resumed_from.checkpoint.shared), sum(ref() is not None for ref in loaded)


def test_what_ranks_have_left_is_added_up_one_rank_after_another():
    """A GPU could not hold the residuals of hundreds of ranks at once."""
    living: list[weakref.ref[Tensor]] = []
    most = 0

    def parts() -> Iterator[dict[str, Any]]:
        nonlocal most
        for rank in range(8):
            residual = torch.full((5,), float(rank))
            living.append(weakref.ref(residual))
            most = max(most, sum(ref() is not None for ref in living))
            engine = {"step": 3, "kept": {"weight": {"residual": residual}}, "chunks": None}
            yield {
                "sync": {"engine": engine}, "sent_bytes": 5, "average": None,
                "buffers": {"mean": torch.full((2,), rank / 2), "count": torch.tensor(rank)},
            }  # fmt: skip
            del residual, engine

    own = joined(parts(), sharded=False)
    assert most <= 2
    assert own["sync"]["engine"]["kept"]["weight"]["residual"].tolist() == [3.5] * 5
    assert own["buffers"]["mean"].tolist() == [1.75] * 2
    assert own["buffers"]["count"] == 7


@pytest.mark.ci
@pytest.mark.parametrize("split", ["train", "val"])
def test_storage_that_goes_away_ends_a_run_with_its_state_saved(split: str, image_dir: Path, tmp_path: Path):
    """In the middle of a step of two micro-batches, or in an evaluation; what is saved goes on to the bit."""
    data, images = copytree(image_dir, tmp_path / "images"), tmp_path / "images" / split
    run(1, _read, tmp_path / "straight", data, images, 99, fresh=True)
    (told,) = run(1, _read, tmp_path / "run", data, images, 2, fresh=True)
    images.with_name("away").rename(images)
    assert run(1, _read, tmp_path / "run", data, images, 99, fresh=True) == [""]
    (resumed,) = events_of(tmp_path / "run", "resume")
    assert told.startswith(f"{images}/")
    assert told.endswith(f"; put that right; the same command goes on from step {resumed['step']}")
    assert resumed["step"] >= 2 if split == "train" else resumed["step"] == 5
    assert [event["step"] for event in events_of(tmp_path / "run", "train")] == [*range(1, 11)]
    expected, found = (load_file(RunDir(tmp_path / name).final_weights) for name in ("straight", "run"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def _read(folder: Path, data: Path, images: Path, step: int) -> str:
    """Train on ``images`` that go away after a step; why the run ends early."""

    def asked() -> bool:
        if trainer.state.step == step and images.exists():
            images.rename(images.with_name("away"))
        return False

    read = {"data": image_data(image_size=32, resize=32).model_dump(), "global_batch": 8, "epochs": 2}
    trainer = Trainer(job_of(folder, data, resume=True, **read), tests.world(), ask_first=lambda: asked)
    try:
        with patch("imagenet_fast.data.source._PAUSES_S", (0.01,)):
            trainer.run()
    except JobAborted as error:
        return str(error)
    return ""
