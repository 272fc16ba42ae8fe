"""The loop's options that no recipe of the other tests turns on, and the random numbers of a step."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tests
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.errors import UserError
from imagenet_fast.metrics.run_result import read_outcome
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.training.train_step import seed_step
from imagenet_fast.training.trainer import Trainer
from tests.conftest import tables
from tests.e2e.command import environment, wait_for
from tests.models import own
from tests.ranks import run
from tests.training.jobs import train_job

MICRO_STEPS = 3


def test_a_trainer_that_is_over_is_freed(tmp_path: Path):
    """In a notebook that trains one after another."""
    assert run(1, _freed, tmp_path) == [True]


def _freed(folder: Path) -> bool:
    recipe = parse_recipe(
        "test", tables(ranks=1, epochs=1, data__train_images=16, schedule={"kind": "step", "milestones": []})
    )
    job = Job("test", recipe, split_batch(recipe, 1), None, folder / "run")
    trainer = Trainer(job, tests.world(0, 1))
    assert trainer.run().status == "finished"
    weight = weakref.ref(next(trainer.model.parameters()))
    del trainer
    gc.collect()
    return weight() is None


def test_the_moving_average_is_what_is_saved(tmp_path: Path):
    run(1, _train_with_and_without, tmp_path)
    first, second, averaged = (load_file(tmp_path / name / "checkpoints/final.safetensors") for name in "abc")
    for name, weight in averaged.items():
        if weight.is_floating_point():
            expected = 0.75 * first[name] + 0.25 * second[name]  # it starts from the weights after the first step
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)


def _train_with_and_without(folder: Path) -> None:
    world = tests.world(0, 1)
    for name, epochs, decay in (("a", 1, 0.0), ("b", 2, 0.0), ("c", 2, 0.75)):
        recipe = parse_recipe(
            "test",
            tables(
                ranks=1, epochs=epochs, ema_decay=decay, data__train_images=16,  # one step an epoch
                schedule={"kind": "step", "milestones": []},
            ),
        )  # fmt: skip
        job = Job("test", recipe, split_batch(recipe, 1), None, folder / name)
        outcome = train_job(job, world)
        assert (outcome.status, outcome.steps) == ("finished", epochs)


def test_final_weights_are_never_of_an_earlier_end(tmp_path: Path):
    """A finished run that goes on for more epochs has none until it ends again."""
    run(1, _train_longer, tmp_path)


def _train_longer(folder: Path) -> None:
    world, final = tests.world(0, 1), folder / "checkpoints" / "final.safetensors"

    def job(epochs: int, resume: bool) -> Job:
        schedule = {"kind": "step", "milestones": []}
        recipe = parse_recipe("test", tables(ranks=1, epochs=epochs, data__train_images=16, schedule=schedule))
        return Job("test", recipe, split_batch(recipe, 1), None, folder, resume=resume)

    Trainer(job(1, False), world).run()
    assert final.exists()
    longer = Trainer(job(2, True), world, ask_first=lambda: lambda: True)
    assert longer.run().status == "preempted"
    assert not final.exists()
    Trainer(job(2, True), world).run()
    assert final.exists()


def test_a_network_that_was_edited_is_not_gone_on_with(tmp_path: Path):
    run(1, _edit_and_resume, tmp_path)


def _edit_and_resume(folder: Path) -> None:
    world = tests.world(0, 1)

    def job(name: str, resume: bool, epochs: int) -> Job:
        recipe = parse_recipe(
            "test",
            tables(
                ranks=1, epochs=epochs, data__train_images=16, schedule={"kind": "step", "milestones": []},
                model={"kind": "python", "name": "tests.models.own:edited"},
            ),
        )  # fmt: skip
        return Job("test", recipe, split_batch(recipe, 1), None, folder / name, resume=resume)

    for name, before, after, change in (
        ("wider", ([8], False), ([4], False), r"has 1.weight of shape \[4, 3072\], and had \[8, 3072\]"),
        ("deeper", ([8], False), ([8, 8], False), "has got 3.bias"),
        ("thawed", ([8], True), ([8], False), "trains 1.weight, which was frozen,"),
    ):
        own.WIDTHS[:], own.FROZEN = before
        Trainer(job(name, False, 1), world).run()
        own.WIDTHS[:], own.FROZEN = after
        with pytest.raises(UserError, match=f"the network {change} since .* was written; restore it, or begin another"):
            Trainer(job(name, True, 2), world).run()


BY_NAME = """
import sys
from imagenet_fast.training.trainer import Trainer

changes = ["epochs=1", "schedule.warmup_epochs=0"]
outcome = Trainer("smoke", out=sys.argv[1], overrides=changes).run()
assert (outcome.status, outcome.steps, outcome.world_size) == ("finished", 8, 1)

trainer = Trainer("smoke", overrides=changes)
trainer.open_data()
trainer.build()
for _ in range(8):
    trainer.train_step()
accuracy = trainer.evaluate()
assert (accuracy.top1, accuracy.images) == (outcome.top1, 63)
assert "torch._dynamo" not in sys.modules, "which takes as long to import as torch"
"""


def test_trainer_by_name_in_a_plain_process(tmp_path: Path):
    """As in a notebook: no launcher, no torchrun."""
    subprocess.run(
        [sys.executable, "-c", BY_NAME, str(tmp_path / "run")],
        check=True,
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1"),
    )
    assert read_outcome(tmp_path / "run").status == "finished"
    assert (tmp_path / "run/checkpoints/final.safetensors").is_file()
    assert not (tmp_path / "runs").exists(), "single steps leave nothing on the disk"


def test_ctrl_c_in_a_plain_process_is_on_the_record(tmp_path: Path):
    program = f"Trainer('smoke', out={str(tmp_path / 'run')!r}, overrides=['epochs=9999']).run()"
    started = subprocess.Popen(
        [sys.executable, "-c", f"from imagenet_fast.training.trainer import Trainer; {program}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    wait_for(lambda: '"train"' in record.read_text() if (record := tmp_path / "run/events.jsonl").exists() else False)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    outcome = read_outcome(tmp_path / "run")
    assert "KeyboardInterrupt" in said
    assert outcome.status == "interrupted"
    assert "and not saved in the middle of it; the same train command with --resume run " in outcome.message


def test_trainer_by_name_continues_from_its_state():
    run(2, _continue_from_state)


def _continue_from_state() -> None:
    """To the bit, also with an engine that defers its updates."""
    for sync in ("lazy", "hybrid"):
        first, other = (Trainer("smoke", overrides=["sync.kind=" + sync, "ema_decay=0.9"]) for _ in range(2))
        for trainer in (first, other):
            trainer.open_data()
            trainer.build()
        for _ in range(3):
            first.train_step()
        other.load_state_dict(first.state_dict())
        for trainer in (first, other):
            for _ in range(2):
                trainer.train_step()
            trainer.state.settle()
        for one, two in zip(first.model.state_dict().values(), other.model.state_dict().values(), strict=True):
            assert torch.equal(one, two)
        for trainer in (first, other):
            trainer.state.sync.close()


def test_a_trainer_goes_back_to_a_state_of_its_own():
    run(2, _go_back)


def _go_back() -> None:
    """Weights, images and times, as a cell of a notebook that is run again."""
    trainer = Trainer("smoke", overrides=["sync.kind=lazy", "ema_decay=0.9"])
    trainer.open_data()
    trainer.build()
    trainer.evaluate()
    trainer.train_step()
    assert 0 < trainer.clock.train_s() < trainer.clock.run_s(), "an evaluation before the first step is no training"
    saved = trainer.state_dict()
    runs = []
    for _ in range(2):
        for _ in range(2):
            trainer.train_step()
        trainer.evaluate()
        assert trainer.outcome.epochs == 1, "in the middle of the first epoch"
        runs.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
        trained_s, ran_s = trainer.clock.train_s(), trainer.clock.run_s()
        trainer.load_state_dict(saved)
        assert trainer.state.step == 1
        clock = saved["shared"]["clock"]
        assert clock["train_s"] == trainer.clock.train_s() < trained_s, "it goes on with the next step"
        assert clock["run_s"] <= trainer.clock.run_s() < ran_s, "two steps and an evaluation take longer than loading"
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())
    trainer.state.sync.close()


def world(rank: int = 0) -> DistContext:
    return tests.world(rank, 4)


def masks(steps: range, seed: int = 1, rank: int = 0) -> list[Tensor]:
    """Return the dropout masks of each micro-step of those steps."""
    drop = nn.Dropout(0.5)
    kept = []
    for step in steps:
        seed_step(seed, step, world(rank))
        kept.append(torch.stack([drop(torch.ones(64, 64)) for _ in range(MICRO_STEPS)]))
    return kept


def test_resumed_run_draws_the_same_dropout_masks():
    whole = masks(range(6))
    torch.rand(17)  # whatever was drawn before
    for one, other in zip(whole[3:], masks(range(3, 6)), strict=True):
        assert torch.equal(one, other)


def test_steps_micro_steps_ranks_and_seeds_have_masks_of_their_own():
    drawn = [*masks(range(3)), *masks(range(3), rank=1), *masks(range(3), seed=2)]
    kept = (torch.cat(drawn) > 0).double().flatten(1)
    assert len(kept) == 9 * MICRO_STEPS
    torch.testing.assert_close(kept.mean(1), torch.full((len(kept),), 0.5, dtype=torch.float64), rtol=0, atol=0.04)
    correlations = torch.corrcoef(kept) - torch.eye(len(kept))
    assert correlations.abs().max() < 5 / 64
