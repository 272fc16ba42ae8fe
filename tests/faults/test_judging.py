"""The fuzzer's judge finds what it is there to find, in what a command printed and left."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.fuzzing import Before, Launch, Round
from tests.faults.jobs import Running, digest
from tests.faults.programs import FILES, draw_program

pytestmark = pytest.mark.ci

NOTHING = Before(0, Path("checkpoints"), False, set(), set())
WENT_ON = "epoch 1/2  step 4/10  loss 1\n"


def test_a_seed_draws_one_program_and_all_kinds_of_disturbances_come():
    programs = [draw_program(f"1/{number}") for number in range(300)]
    assert programs == [draw_program(f"1/{number}") for number in range(300)]
    commands = [command for program in programs for command in program.commands]
    kinds = {type(command.disturbance).__name__ for command in commands}
    assert kinds == {"Send", "Hurt", "NoneType"}
    assert {damage.file for command in commands for damage in command.afterwards} == {*FILES}


@pytest.mark.parametrize(
    ("code", "printed", "before", "fault"),
    [
        (0, WENT_ON, NOTHING, ""),
        (0, WENT_ON, replace(NOTHING, step=3), "the checkpoint of step 3 is gone"),
        (0, WENT_ON, replace(NOTHING, step=6), "goes on at step 4 without a sentence; step 6 was saved"),
        (1, "Traceback (most recent call last):\nKeyError\nfailed: x", NOTHING, "prints 'Traceback"),
        (1, "failed: x\nerror: y\n", NOTHING, "says 2 sentences"),
        (2, "", NOTHING, "without a sentence"),
        (2, "error: x; do y\n", NOTHING, "fails though nothing was damaged: error: x; do y"),
        (4, "Stopped after step 4, and saved; the same command goes on.", NOTHING, "though no signal was sent"),
        (-11, "", NOTHING, "ends with exit code -11"),
        (7, "", NOTHING, "ends with exit code 7"),
        (0, "", replace(NOTHING, finished=True, files={Path("job.json")}), "job.json of a finished run is gone"),
        (0, "", replace(NOTHING, finished=True, events={("train", 3)}), "1 events of a finished run are gone"),
    ],
)
def test_what_is_wrong_is_found(code: int, printed: str, before: Before, fault: str, tmp_path: Path):
    out, log = tmp_path / "run", tmp_path / "log"
    weights_file = out / "checkpoints" / "final.safetensors"
    weights_file.parent.mkdir(parents=True)
    weights_file.write_bytes(b"weights")
    log.write_text(printed)
    ends = f"import os, signal; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    command = subprocess.Popen([sys.executable, "-c", ends], text=True)
    round_ = Round(out, (), digest(out))
    round_._end(Launch("1", Running(command, out), log, before))
    assert bool(round_.faults) == bool(fault)
    assert fault in " ".join(round_.faults)
