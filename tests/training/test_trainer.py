"""What a run leaves behind, a trainer of one's own, and the random numbers of a step."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import subprocess
import sys
import weakref
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tests
from imagenet_fast.errors import UserError
from imagenet_fast.recipe.job import Job
from imagenet_fast.run.result import read_outcome
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.trainer import Trainer
from imagenet_fast.training.training_step import seed_step
from tests.data.prepare.replica import tree
from tests.e2e.command import environment, train_here, wait_for
from tests.models import own
from tests.ranks import run, with_ranks
from tests.training.jobs import job_of

SMALL = ("model={kind='cifarnet',widths=[4,5,6]}", "precision.kind=fp32")


def small_job(folder: Path, epochs: int, resume: bool = False, **changes: Any) -> Job:
    """One step an epoch, at one rate."""
    schedule = {"kind": "step", "milestones": []}
    return job_of(folder, None, resume, epochs=epochs, data__train_images=16, schedule=schedule, **changes)


@with_ranks(2)
def test_a_trainer_that_is_over_is_freed(tmp_path: Path):
    """In a notebook that trains one after another."""
    trainer = Trainer(small_job(tmp_path, 1), tests.world())
    assert trainer.run().status == "finished"
    trainer.state.sync.close()
    weight = weakref.ref(next(trainer.model.parameters()))
    del trainer
    gc.collect()
    assert weight() is None


def test_final_weights_are_never_of_an_earlier_end(tmp_path: Path):
    """A finished run that goes on for more epochs has none until it ends again."""
    final = tmp_path / "checkpoints" / "final.safetensors"
    for epochs, stop, status in ((1, False, "finished"), (2, True, "preempted"), (2, False, "finished")):
        assert run(1, _train_on, tmp_path, epochs, stop, fresh=True) == [status], "a stop is for all of a store"
        assert final.exists() != stop
    (tmp_path / "checkpoints/step-00000002/manifest.json").write_text("")
    assert run(1, _train_on, tmp_path, 3, False, fresh=True) == ["finished"]
    assert (tmp_path / "checkpoints/damaged-step-00000002").is_dir(), "it counts no more"


def _train_on(folder: Path, epochs: int, stop: bool) -> str:
    return train_here(small_job(folder, epochs, resume=True), (lambda: lambda: True) if stop else None).status


@with_ranks(1, fresh=True)
def test_a_disk_too_small_for_checkpoints_takes_the_weights_of_a_run_that_has_ended(tmp_path: Path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))
    with (
        patch("imagenet_fast.checkpoint.writer.write_durably", side_effect=full),
        redirect_stderr(io.StringIO()) as said,
    ):
        assert _train_on(tmp_path, 1, stop=False) == "finished"
    failed = f"warning: the checkpoint of step 1 failed: {tmp_path} cannot be written (No space left on device); free "
    assert said.getvalue().splitlines() == [
        f"{failed}space there; training goes on, and it is tried again",
        f"{failed}space there; the final weights are written, so the run has ended all the same",
    ]
    assert (tmp_path / "checkpoints" / "final.safetensors").is_file()


@with_ranks(1, fresh=True)
def test_a_stop_is_told_once_where_no_launcher_of_ours_is(tmp_path: Path):
    with redirect_stdout(io.StringIO()) as printed:
        _train_on(tmp_path, 2, stop=True)
    assert printed.getvalue().lower().count("stopped by a signal after step 1, and saved; ") == 1


EDITS = {
    r"has 1.weight of shape \[4, 3072\], and had \[8, 3072\]": ([4], True),
    r"has 2.weight of shape \[8, 8\], and had \[10, 8\]": ([8, 8], True),
    "trains 1.weight, which was frozen,": ([8], False),
}


@with_ranks(2, fresh=True)
def test_a_network_that_was_edited_is_not_gone_on_with(tmp_path: Path):
    """One of eight units, which are frozen."""
    model = {"kind": "python", "name": "tests.models.own:edited"}
    with patch.object(own, "FROZEN", True):
        assert train_here(small_job(tmp_path, 1, model=model)).status == "finished"
    before = tree(tmp_path)
    for change, (widths, frozen) in EDITS.items():
        said = f"the network {change} since .* was written; restore it, or begin another run"
        job = small_job(tmp_path, 2, resume=True, model=model)
        with patch.multiple(own, WIDTHS=widths, FROZEN=frozen), pytest.raises(UserError, match=said):
            train_here(job)
        assert tree(tmp_path) == before


BY_NAME = """
import sys
from imagenet_fast.training.trainer import Trainer

out, *changes = sys.argv[1:]
outcome = Trainer("smoke", out=out, overrides=changes).run()
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


@pytest.mark.ci
@pytest.mark.usefixtures("subprocesses")
def test_trainer_by_name_in_a_plain_process(tmp_path: Path):
    """As in a notebook: no launcher, no torchrun."""
    changes = ("epochs=1", "schedule.warmup_epochs=0", *SMALL)
    command = [sys.executable, "-c", BY_NAME, str(tmp_path / "run"), *changes]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment())
    assert read_outcome(tmp_path / "run").status == "finished"
    assert (tmp_path / "run/checkpoints/final.safetensors").is_file()
    assert not (tmp_path / "runs").exists(), "single steps leave nothing on the disk"


@pytest.mark.ci
@pytest.mark.usefixtures("subprocesses")
def test_ctrl_c_in_a_plain_process_is_on_the_record(tmp_path: Path):
    program = f"Trainer('smoke', out={str(tmp_path / 'run')!r}, overrides={[*SMALL, 'epochs=9999']}).run()"
    started = subprocess.Popen(
        [sys.executable, "-c", f"from imagenet_fast.training.trainer import Trainer; {program}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    wait_for(lambda: '"train"' in record.read_text() if (record := tmp_path / "run/events.jsonl").exists() else False)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    outcome = read_outcome(tmp_path / "run")
    assert "KeyboardInterrupt" in said
    assert outcome.status == "interrupted"
    assert "and not saved in the middle of it; the same train command with --resume run " in outcome.message


@pytest.mark.parametrize("kind", [pytest.param("lazy", marks=pytest.mark.ci), "hybrid"])
@with_ranks(2)
@patch.dict(os.environ)
def test_a_trainer_goes_back_to_a_state_of_its_own(kind: str):
    """Weights, images and times, as a cell of a notebook that is run again; also where updates are put off."""
    trainer = Trainer("smoke", overrides=[*SMALL, f"sync.kind={kind}", "ema_decay=0.9", "log_every=9"])
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
        trainer.train_step()
        trained_s, ran_s = trainer.clock.train_s(), trainer.clock.run_s()
        trainer.load_state_dict(saved)
        assert trainer.state.step == 1
        assert not trainer.training_step.meter._steps, "the next log line is of the steps to come"
        times = saved["shared"]["outcome"]
        assert times["train_s"] == trainer.clock.train_s() < trained_s, "it goes on with the next step"
        assert times["run_s"] <= trainer.clock.run_s() < ran_s, "two steps and an evaluation take longer than loading"
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())
    trainer.state.sync.close()


MICRO_STEPS = 3


def masks(steps: range, seed: int = 1, rank: int = 0) -> list[Tensor]:
    """Return the dropout masks of each micro-step of those steps."""
    drop = nn.Dropout(0.5)
    kept = []
    for step in steps:
        seed_step(seed, step, tests.world(rank, 4))
        kept.append(torch.stack([drop(torch.ones(64, 64)) for _ in range(MICRO_STEPS)]))
    return kept


def test_steps_micro_steps_ranks_and_seeds_have_masks_of_their_own_which_a_resumed_run_draws_too():
    whole = masks(range(6))
    torch.rand(17)  # whatever was drawn before
    assert torch.equal(torch.stack(whole[3:]), torch.stack(masks(range(3, 6))))
    drawn = [*masks(range(3)), *masks(range(3), rank=1), *masks(range(3), seed=2)]
    kept = (torch.cat(drawn) > 0).double().flatten(1)
    assert len(kept) == 9 * MICRO_STEPS
    torch.testing.assert_close(kept.mean(1), torch.full((len(kept),), 0.5, dtype=torch.float64), rtol=0, atol=0.04)
    correlations = torch.corrcoef(kept) - torch.eye(len(kept))
    assert correlations.abs().max() < 5 / 64


def test_a_paused_clock_counts_run_time_only():
    clock = Clock()
    clock.begin_training()
    begun = clock.run_s()
    with clock.pause():
        while clock.run_s() < 0.02:
            pass
    paused = clock.run_s() - begun
    assert clock.train_s() + paused == pytest.approx(clock.run_s(), abs=5e-3)
