"""In what training and evaluation compute; in fp16 a non-finite gradient anywhere skips the step everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests
from imagenet_fast.distributed import init
from imagenet_fast.distributed.init import DistContext, all_compute_bf16, computes_bf16
from imagenet_fast.models.weights import write_weights
from imagenet_fast.recipe.job import Evaluation
from imagenet_fast.recipe.schema import Float16, Unscaled
from imagenet_fast.training.evaluation import evaluate_weights
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.precision import LossScaler, effective_precision
from imagenet_fast.training.trainer import Trainer
from imagenet_fast.training.training_step import TrainingStep, build_step
from tests.ranks import with_ranks
from tests.training.jobs import job_of

CPU = torch.device("cpu")


def test_a_dynamic_scale_halves_at_an_overflow_and_goes_on_from_its_state():
    scale, later = (LossScaler(Float16(kind="fp16"), "fp16", CPU) for _ in range(2))
    assert scale.largest == 65504
    assert scale.end_step(torch.ones(())) == 2.0**16
    later.load_state_dict(scale.state_dict())
    assert later.metrics(float(later.scale), float(later.skipped)) == {"loss_scale": 2.0**15, "skipped_steps": 1}
    assert [later.end_step(torch.zeros(())) for _ in range(2001)][1999:] == [2.0**15, 2.0**16]


def test_a_static_scale_stays_and_bf16_has_none_though_an_fp16_wire_is_watched():
    weight = nn.Parameter(torch.ones(3))
    fixed = LossScaler(Float16(kind="fp16", loss_scale=1000.0), "bf16", CPU)
    (fixed(weight.sum())).backward()
    scale = fixed.end_step(torch.ones(()))
    torch.testing.assert_close(weight.grad / scale, torch.ones(3))
    assert fixed.scale == 1000
    assert fixed.metrics(float(fixed.scale), float(fixed.skipped)) == {"loss_scale": 1000, "skipped_steps": 1}
    assert fixed.largest == torch.finfo(torch.bfloat16).max
    none = LossScaler(Unscaled(kind="bf16"), "bf16", CPU)
    assert none(weight.sum()) == 3
    assert none.end_step(None) is None
    assert none.largest is None
    assert none.metrics(float(none.scale), float(none.skipped)) == {}
    watched = LossScaler(Unscaled(kind="bf16"), "fp16", CPU)
    assert watched.largest == 65504
    for overflows in (0.0, 1.0, 1.0):
        assert watched.end_step(torch.tensor(overflows)) is None
    assert watched.metrics(float(watched.scale), float(watched.skipped)) == {"skipped_steps": 2}


@with_ranks(1, fresh=True)
def test_fp32_is_fp32_on_gpus_too_unless_tf32_is_asked_for():
    """Whether products and convolutions may be made in TF32 is a setting of a process."""
    for kind, expected in (
        ("fp32", ("highest", False)), ("tf32", ("high", True)), ("bf16", ("high", True)), ("fp32", ("highest", False)),
    ):  # fmt: skip
        built(tests.world(bf16=True), precision={"kind": kind}).state.sync.close()
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == expected


def built(world: DistContext, **changes: Any) -> TrainingStep:
    """A step of a small network with batch norms."""
    job = job_of(reference_ranks=1, **changes)
    return build_step(job.recipe, job.batching, build_initial_model(job.recipe, 10, world), world, 4)


def test_without_bf16_instructions_only_bf16_becomes_fp32():
    full, fast, half, bf16 = Unscaled(kind="fp32"), Unscaled(kind="tf32"), Float16(kind="fp16"), Unscaled(kind="bf16")
    for precision in (full, fast, half, bf16):
        assert effective_precision(precision, bf16=True) == (precision, "")
    for precision in (full, fast, half):
        assert effective_precision(precision, bf16=False) == (precision, "")
    found, note = effective_precision(bf16, bf16=False)
    assert found == full
    assert note.startswith("layers compute in fp32, not in bf16")


@with_ranks(3)
def test_ranks_agree_on_bf16():
    for supported in ([True, True, True], [True, False, True]):
        with patch.object(init, "computes_bf16", lambda device, by=supported: by[dist.get_rank()]):
            assert all_compute_bf16(CPU) == all(supported)


@pytest.mark.parametrize("bf16", [True, False, None], ids=["bf16", "no bf16", "this CPU"])
@with_ranks(2)
def test_an_evaluation_computes_in_the_precision_of_training(bf16: bool | None, tmp_path: Path):
    """So are logits in a step, in an evaluation amid training, and in one of the saved weights."""
    expected = torch.bfloat16 if (computes_bf16(CPU) if bf16 is None else bf16) else torch.float32
    world, job = tests.world(bf16=bf16), job_of(tmp_path, precision={"kind": "bf16"})
    trainer = Trainer(job, world)
    trainer.open_data()
    trainer.build()
    weights = tmp_path / f"{world.rank}.safetensors"
    write_weights(trainer.model.state_dict(), weights, {})
    evaluation = Evaluation("test", job.recipe, job.batching, weights, None)
    seen = set[torch.dtype]()

    def note(module: nn.Module, inputs: object, output: Any) -> None:
        if isinstance(module, nn.Linear):
            seen.add(output.dtype)

    for compute in (trainer.train_step, trainer.evaluate, lambda: evaluate_weights(evaluation, world)):
        seen.clear()
        with nn.modules.module.register_module_forward_hook(note):
            compute()
        assert seen == {expected}
    trainer.state.sync.close()


@pytest.mark.parametrize("kind", ["lazy", "hybrid"])
@with_ranks(2)
def test_gradients_are_sent_in_bf16_whatever_layers_compute_in(kind: str):
    sync, sent = {"kind": kind, "wire": "bf16"}, []
    for bf16 in (True, False):
        step = built(tests.world(bf16=bf16), sync=sync, precision={"kind": "bf16"}, global_batch=4, micro_batch=2)
        step(iter([(torch.randn(2, 3, 32, 32), torch.arange(2))]), lr=0.1)
        step.state.settle()
        step.state.sync.close()
        sent.append(step.state.sent_bytes)
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize(("kind", "accumulation"), [("lazy", 1), ("hybrid", 2), ("ddp", 2)])
@with_ranks(2)
def test_a_step_in_which_one_rank_overflows_moves_neither_weights_nor_statistics(kind: str, accumulation: int):
    """A running mean of inf would never come back."""
    world, precision = tests.world(), {"kind": "fp16", "loss_scale": 128}
    changes = {"global_batch": 8 * accumulation, "micro_batch": 4, "ema_decay": 0.5, "precision": precision}
    step = built(world, sync={"kind": kind, "wire": "fp32"}, **changes)
    state, labels = step.state, torch.arange(4)

    def kept(model: nn.Module) -> dict[str, torch.Tensor]:
        state.settle()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def take(height: float = 0.0) -> None:
        """With images of such a height on one rank, in the last micro-batch."""
        images = [torch.randn(4, 3, 32, 32).half() for _ in range(accumulation)]
        if height and world.rank == 1:
            images[-1].fill_(height)
        step(iter([(batch, labels) for batch in images]), lr=0.1)

    take()
    before = kept(state.model)
    take(torch.inf)  # 6e4 overflows only where a product is rounded to fp16
    skipped = kept(state.model)
    take()
    after, averaged = kept(state.model), kept(state.eval_model)
    state.sync.close()
    assert state.scale.skipped == 1
    assert all(torch.equal(value, before[name]) for name, value in skipped.items())
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert {"head.weight", "group1.norm1.running_mean"} <= moved, "a good step moves them"
    assert all(value.isfinite().all() for value in (*after.values(), *averaged.values()))
