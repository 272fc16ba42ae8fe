"""The same recipe trained once an engine and once a layout of the ranks, one run after the other: who is first at the
target, and after how many steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from imagenet_fast.bench.netns import Host, end_with_parent, enter, parse_rate, shaped_network
from imagenet_fast.bench.parallel_layouts import NamedLayout, laid_out, refuse_axes
from imagenet_fast.distributed.cpu_count import usable_cores
from imagenet_fast.distributed.rank_info import RankInfo
from imagenet_fast.errors import UserError, warn
from imagenet_fast.launch.job_setup import check_writable, plan_job
from imagenet_fast.launch.signals import GRACE_S, interrupt_on_signals
from imagenet_fast.metrics.report import PastRun, read_run
from imagenet_fast.metrics.run_result import RunResult, read_outcome
from imagenet_fast.recipe.doubts import lint
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import engine_names, find_recipe, load_recipe

_PORT = 29400  # of the rendezvous, in a network where nobody else listens
_DONE = (0, 3)  # exit codes of a run that was trained to its end


@dataclass(frozen=True)
class Contestant:
    """One run: an engine, a seed and the overrides that are its own, its layout among them."""

    label: str
    engine: str
    seed: int | None
    overrides: tuple[str, ...]

    def arguments(self, recipe: str, data: Path | None, folder: Path) -> list[str]:
        """The command line of `train`."""
        return [
            "train", "--no-warnings", "--recipe", recipe, "--sync", self.engine, "--out", str(folder / self.label),
            *(["--data", str(data)] if data else []),
            *(["--seed", str(self.seed)] if self.seed is not None else []),
            *(part for override in self.overrides for part in ("--set", override)),
        ]  # fmt: skip


def contestants(
    recipe: str,
    ranks: int,
    engines: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str],
    layouts: Sequence[NamedLayout] = (),
) -> list[Contestant]:
    """Every engine in every layout of ``ranks`` ranks with every seed; none given means the recipe's own. A single
    engine is not named beside its layouts. ``ENGINE.KEY=VALUE`` among the overrides is for that engine alone.

    Raises UserError where such an engine is not among them, two runs are the same, or a layout cannot be had.
    """
    for override in overrides:
        if (table := override.partition(".")[0]) in set(engine_names()) - set(engines):
            raise UserError(f"--set {override} is for {table}, which is not in --sync {','.join(engines)}; correct one")
    if layouts:
        refuse_axes(overrides, layouts)
    asked: Sequence[NamedLayout | None] = layouts or [None]
    seeded: Sequence[int | None] = seeds or [None]
    runs = []
    for engine, layout in product(engines, asked):
        own = tuple(_for(engine, override) for override in overrides if _concerns(engine, override))
        settled = own if layout is None else laid_out(find_recipe(recipe), engine, own, layout, ranks)
        named = [engine] if layout is None or len(engines) > 1 else []
        named += [layout.name] if layout is not None else []
        for seed in seeded:
            label = "-".join([*named, *([f"seed{seed}"] if seed is not None else [])])
            runs.append(Contestant(label, engine, seed, settled))
    labels = [run.label for run in runs]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"{twice[0]} would be run twice; name an engine or a seed once")
    return runs


def _concerns(engine: str, override: str) -> bool:
    """Whether it is for ``engine``, or for all."""
    table = override.partition(".")[0]
    return table == engine or table not in engine_names()


def _for(engine: str, override: str) -> str:
    return f"sync.{override.removeprefix(f'{engine}.')}" if override.startswith(f"{engine}.") else override


@dataclass(frozen=True)
class Ended:
    """A run that is over: what it has recorded, and the exit code of its `train`."""

    past: PastRun
    exit_code: int

    @property
    def failed(self) -> bool:
        return self.exit_code not in _DONE


def compare(
    name: str,
    runs: Sequence[Contestant],
    *,
    data: Path | None,
    ranks: int,
    rate: str | None,
    folder: Path,
) -> list[Ended]:
    """Train every run to its end, each in a directory of its own in ``folder``. One that fails does not stop the rest.

    With ``rate`` every rank is a host of a shaped network. After a signal the runs so far are returned, that under way
    the last. Raises UserError before anything is trained where a recipe or the network is at fault; exits with code 2
    where the ranks have found so in a run before any has succeeded, and have said it themselves.
    """
    jobs: dict[Contestant, Job] = {}
    doubtful: dict[str, None] = {}  # in order, and each once
    for run in runs:
        seed = [f"seed={run.seed}"] if run.seed is not None else []
        recipe = load_recipe(find_recipe(name), run.engine, [*run.overrides, *seed])
        jobs[run] = plan_job(name, recipe, ranks, data=data, folder=folder / run.label)
        check_writable(folder / run.label)
        doubtful |= dict.fromkeys(lint(recipe))
    for doubt in doubtful:
        warn(doubt)
    codes: dict[Contestant, int] = {}
    with (
        shaped_network(ranks, parse_rate(rate)) if rate is not None else nullcontext(None) as network,
        suppress(KeyboardInterrupt),
    ):
        interrupt_on_signals()
        for number, run in enumerate(runs, 1):
            codes[run] = 1  # should it be interrupted
            print(f"\n{run.label} ({number} of {len(runs)})", flush=True)
            arguments = [sys.executable, "-m", "imagenet_fast", *run.arguments(name, data, folder)]
            codes[run] = _on_this_machine(arguments, ranks) if network is None else _on_hosts(arguments, network)
            if codes[run] == 2 and not any(code in _DONE for code in codes.values()):
                raise SystemExit(2)
    return [Ended(_past(jobs[run], run.label), code) for run, code in codes.items()]


def _past(job: Job, label: str) -> PastRun:
    """What a run that is over has recorded, which is nothing where it ended early enough."""
    try:
        past = read_run(job.folder)
    except UserError:
        return PastRun(job.folder, read_outcome(job.folder), [], label)
    return replace(past, name=label, outcome=past.outcome or RunResult.beginning(job))  # of no steps, and failed


def _on_this_machine(arguments: list[str], ranks: int) -> int:
    return _wait([partial(_start, [*arguments, "--nproc", str(ranks)])])


def _on_hosts(arguments: list[str], network: list[Host]) -> int:
    """A rank a host, by torchrun's environment variables."""
    starts = []
    for rank, host in enumerate(network):
        place = RankInfo(rank, len(network), 0, 1).variables(node=rank)
        meeting = {"MASTER_ADDR": network[0].address, "MASTER_PORT": str(_PORT)}
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // len(network)))}
        environment = threads | dict(os.environ) | place | meeting
        starts.append(partial(_start, arguments, environment, partial(_move_to, host)))
    return _wait(starts)


def _move_to(host: Host) -> None:
    end_with_parent()
    enter(host)


def _start(
    arguments: list[str], environment: dict[str, str] | None = None, first: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    """In a process group of its own, out of a terminal's reach: Ctrl-C comes to it once, and from us."""
    return subprocess.Popen(arguments, env=environment, preexec_fn=first, process_group=0)


def _wait(starts: Sequence[Callable[[], subprocess.Popen[bytes]]]) -> int:
    """Start processes and wait for their end: the exit code of the first that fails, or the highest.

    When one fails, or we are interrupted, all are ended.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for start in starts:
            processes.append(start())
        codes = [process.poll() for process in processes]
        while None in codes and not _failures(codes):
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(3 * GRACE_S)  # a launcher waits for its ranks, which have GRACE_S
            except subprocess.TimeoutExpired:
                process.kill()
    failures = _failures(codes)
    return failures[0] if failures else max(code for code in codes if code is not None)


def _failures(codes: Iterable[int | None]) -> list[int]:
    return [code for code in codes if code is not None and code not in _DONE]
