"""Play a program of disturbances against real jobs, and judge what each command said and left.

``python -m tests.faults.fuzzing`` plays random ones: signals, kills and damaged files of small runs on
two ranks, which must end with the bytes of an undisturbed run, or with a one-sentence error. Everything in a round but
its timing is drawn from SEED/NUMBER. A round takes about half a minute on two cores.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from tests.e2e.command import events_of, setting
from tests.faults import programs
from tests.faults.jobs import Running, digest, start_logged, train
from tests.faults.programs import Hurt, Program, hurt

LIMIT_S = 120.0
"""A command that takes longer hangs; alone on two cores it takes ten seconds."""
_OUTLIVING_S = 30.0
"""So long ranks may go on after their launcher."""
_CRASHES = ("Traceback (most recent", "terminate called", "Fatal Python error", "Segmentation fault", "core dumped")
_FINISHED = (0, 3)


def play(out: Path, program: Program) -> Round:
    """Play the program in ``out``: what happened, and what was wrong with it.

    The run and what it printed stay where something was wrong.
    """
    job = _job(program.setting)
    round_ = Round(out / re.sub("[/ ]", "-", program.seed), job, _alone(out, program.setting, job))
    try:
        round_.play(program)
    finally:
        round_.end_all()
    if not round_.faults:
        round_.remove()
    return round_


def _job(name: str) -> tuple[str, ...]:
    """The arguments for a setting."""
    kind = name.replace(",", "").split()[0]
    ranks = programs.THREE_RANKS if "three ranks" in name else ()
    return (*programs.JOB, *ranks, "--sync", kind, *setting(*programs.SETTINGS[name].split()))


@cache
def _alone(out: Path, name: str, job: tuple[str, ...]) -> str:
    """The digest of the run that nobody disturbs."""
    folder = out / f"alone-{re.sub('[, ]+', '-', name)}"
    found = train(folder, job=job)
    shutil.rmtree(folder)
    return found


@dataclass(frozen=True)
class Before:
    """What a command found: of files, only those that nobody has hurt."""

    step: int
    """Of the newest whole checkpoint; 0 where there is none."""
    checkpoint: Path
    """Its directory, of which there may be several for one step: one with a damaged manifest stays."""
    finished: bool
    files: set[Path]
    """But those of checkpoints, which come and go."""
    events: set[tuple[str, int]]
    """The names and steps of what was recorded of training and evaluations."""


@dataclass
class Launch:
    """A command at work."""

    name: str
    running: Running
    log: Path
    before: Before
    signalled: bool = False
    killed: bool = False
    hurt: bool = False
    """Whether its run was damaged before or meanwhile."""

    @property
    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def steps(self) -> list[int]:
        """Those it has printed; its record in the directory may be damaged."""
        return [int(step) for step in re.findall(r"^epoch .* step (\d+)/", self.printed, re.MULTILINE)] or [0]


@dataclass
class Round:
    """A run directory to which a program happens."""

    out: Path
    job: tuple[str, ...]
    alone: str
    """The digest of the final weights of a run that nobody disturbs."""
    happened: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    finished: bool = False
    _hurts: dict[Path, Hurt] = field(default_factory=dict)
    _commands: list[Running] = field(default_factory=list)
    _processes: set[psutil.Process] = field(default_factory=set)
    """Of all commands, as far as they have been seen."""

    def play(self, program: Program) -> None:
        """Do all of it, then let the run come to its end."""
        for number, command in enumerate(program.commands, 1):
            self._play(str(number), command)
            for damage in command.afterwards:
                self._hurt(damage)
        if self._end(self._begin("last")) in _FINISHED and program.again:
            self._end(self._begin("again"))

    def end_all(self) -> None:
        """Leave no process behind."""
        for command in self._commands:
            if command.command.poll() is None:
                command.kill_at_once()
        for process in self._processes:
            with suppress(psutil.Error):
                process.kill()

    def remove(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        for log in self.out.parent.glob(f"{self.out.name}.*.log"):
            log.unlink()

    def _play(self, name: str, command: programs.Command) -> None:
        launch = self._begin(name)
        deadline = time.monotonic() + LIMIT_S
        while launch.steps[-1] < command.step and time.monotonic() < deadline and launch.running.command.poll() is None:
            self._watch(launch, 0.02)
        self._watch(launch, command.delay_s)
        match command.disturbance:
            case programs.Send(number, who, again_after_s):
                self._send(launch, who, number)
                if again_after_s is not None:
                    self._watch(launch, again_after_s)
                    self._send(launch, who, number)
            case Hurt() as damage:
                self._hurt(damage)
                launch.hurt = True
        self._end(launch)

    def _begin(self, name: str) -> Launch:
        log = self.out.parent / f"{self.out.name}.{name}.log"
        log.unlink(missing_ok=True)
        before = self._before()
        running = start_logged(self.out, log, *self.job, "--out", str(self.out), "--resume", "auto")
        self._commands.append(running)
        return Launch(name, running, log, before, hurt=bool(self._hurts))

    def _watch(self, launch: Launch, seconds: float) -> None:
        """Wait, and learn which processes there are."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(psutil.Error):
                self._processes.update(psutil.Process(launch.running.command.pid).children(recursive=True))
            if (left := deadline - time.monotonic()) <= 0 or launch.running.command.poll() is not None:
                return
            time.sleep(min(0.05, left))

    def _send(self, launch: Launch, who: programs.Who, number: signal.Signals) -> None:
        """To the launcher where there are no ranks yet."""
        ranks = sorted(launch.running.ranks, key=lambda rank: rank.pid)
        chosen = ranks if who == "all" else ranks[int(who[-1]) :][:1] if who != "launcher" else []
        if launch.running.command.poll() is None and (who in ("launcher", "all") or not chosen):
            chosen = [*chosen, psutil.Process(launch.running.command.pid)]
        for process in chosen:
            with suppress(psutil.Error):
                process.send_signal(number)
                launch.signalled |= number != signal.SIGKILL
                launch.killed |= number == signal.SIGKILL

    def _hurt(self, damage: Hurt) -> None:
        path = hurt(self.out, damage)
        if path is not None:
            self._hurts[path.relative_to(self.out)] = damage
        self.happened.append(str(damage) + ("" if path is not None else " (not there)"))

    def _end(self, launch: Launch) -> int | None:
        """Wait for its end, and judge it; the exit code, None where it had to be ended."""
        self._watch(launch, LIMIT_S)
        code = launch.running.command.poll()
        ranks = [process for process in self._processes if _is_rank(process)]
        _, alive = psutil.wait_procs(ranks, timeout=_OUTLIVING_S)
        if code is None:
            self._blame(launch.name, f"hangs: it is there after {LIMIT_S:g} s")
        elif alive:
            self._blame(launch.name, f"{len(alive)} ranks are there {_OUTLIVING_S:g} s after their launcher")
        if code is None or alive:
            self.end_all()
        sentences = re.findall(r"^(?:error|failed): .*", launch.printed, re.MULTILINE)
        self.happened.append(f"{launch.name}: exit code {code} at step {launch.steps[-1]}; {' | '.join(sentences)}")
        self._judge_words(launch, code, sentences)
        self._judge_work(launch, code)
        self.finished |= code in _FINISHED
        return code

    def _judge_words(self, launch: Launch, code: int | None, sentences: list[str]) -> None:
        """Its exit code, and what it printed."""
        printed = launch.printed
        for crash in _CRASHES:
            if crash in printed:
                self._blame(launch.name, f"prints '{crash}': {printed.rstrip().splitlines()[-1][:200]}")
        if len(sentences) > 1:
            self._blame(launch.name, f"says {len(sentences)} sentences: {' | '.join(sentences)}")
        left_alone = not (launch.signalled or launch.killed)
        if code in (1, 2) and not launch.signalled:
            if not sentences:
                self._blame(launch.name, f"ends with exit code {code} without a sentence")
            if left_alone and not launch.hurt:
                self._blame(launch.name, f"fails though nothing was damaged: {' | '.join(sentences)}")
        if code == 4 and not launch.signalled:
            self._blame(launch.name, "ends with exit code 4 though no signal was sent")
        if code == 4 and "; the same " not in printed:
            self._blame(launch.name, "ends with exit code 4 without a sentence")
        if code not in (None, 0, 1, 2, 3, 4) and (code > 0 or left_alone):
            self._blame(launch.name, f"ends with exit code {code}")

    def _judge_work(self, launch: Launch, code: int | None) -> None:
        """What it made of what there was."""
        before, after = launch.before, self._before()
        first = launch.steps[0]
        warned = "warning: " in launch.printed
        if 0 < first <= before.step and not warned:
            self._blame(launch.name, f"goes on at step {first} without a sentence; step {before.step} was saved")
        if after.step < before.step and not self._is_hurt(before.checkpoint):
            self._blame(launch.name, f"the checkpoint of step {before.step} is gone")
        if code in _FINISHED and not self._is_hurt(Path("checkpoints/final.safetensors")):
            if not (self.out / "checkpoints" / "final.safetensors").is_file():
                self._blame(launch.name, "leaves no final weights")
            elif digest(self.out) != self.alone:
                self._blame(launch.name, f"its final weights are {digest(self.out)} and should be {self.alone}")
        # Where it says that it goes on from an older checkpoint, as the newest is damaged, the end comes once more.
        redone = warned and self._is_hurt(Path("checkpoints"))
        if before.finished:
            for path in before.files - after.files - ({Path("outcome.json")} if redone else set()):
                if not self._is_hurt(path):
                    self._blame(launch.name, f"{path} of a finished run is gone")
            if not redone and not self._is_hurt(Path("events.jsonl")) and (lost := before.events - after.events):
                self._blame(launch.name, f"{len(lost)} events of a finished run are gone, such as {min(lost)}")

    def _before(self) -> Before:
        checkpoints = [(0, Path("checkpoints"))]
        for folder in self.out.glob("checkpoints/step-*"):
            path = folder.relative_to(self.out)
            if (folder / "manifest.json").is_file() and not self._is_hurt(path):
                checkpoints.append((int(folder.name.split("-")[1]), path))
        files = {path.relative_to(self.out) for path in self.out.rglob("*") if not path.match("checkpoints/*/*")}
        files = {path for path in files if not self._is_hurt(path) and (self.out / path).is_file()}
        events: set[tuple[str, int]] = set()
        if Path("events.jsonl") in files:
            with suppress(ValueError):  # a line is being written
                events = {(e["event"], e["step"]) for name in ("train", "eval") for e in events_of(self.out, name)}
        return Before(*max(checkpoints), self.finished, files, events)

    def _is_hurt(self, path: Path) -> bool:
        """Whether it, what it lies in, or what lies in it was damaged."""
        return any(path.is_relative_to(other) or other.is_relative_to(path) for other in self._hurts)

    def _blame(self, name: str, fault: str) -> None:
        self.faults.append(f"{name}: {fault}")


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "imagenet_fast.launch" in process.cmdline()
    return False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzzing")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="keeps the runs of rounds that are wrong")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # raises, so that no job is left behind
    chosen.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for number in range(chosen.first, chosen.first + chosen.count):
        program = programs.draw_program(f"{chosen.seed}/{number}")
        begun = time.monotonic()
        played = play(chosen.out.absolute(), program)
        wrong += bool(played.faults)
        print(f"{program.seed} {time.monotonic() - begun:.1f} s {'WRONG' if played.faults else 'ok'}", flush=True)
        if played.faults:
            print(f"  {program.setting}", *program.commands, *played.happened, *played.faults, sep="\n    ", flush=True)
    print(f"{chosen.count - wrong} of {chosen.count} rounds ended as they should")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
