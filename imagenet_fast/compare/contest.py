"""Train one recipe with several engines and layouts, one run after another, to compare time and steps to the target."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path

from imagenet_fast.compare.layouts import NamedLayout, laid_out, refuse_axes
from imagenet_fast.distributed.cores import cores_per_rank
from imagenet_fast.distributed.ranks import RankInfo, kill_with_parent
from imagenet_fast.errors import UserError, warn
from imagenet_fast.launch.job_setup import plan_job
from imagenet_fast.launch.signals import ENDS, GRACE_S
from imagenet_fast.metrics.past_run import PastRun, read_run
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.netlab.namespaces import INTERFACE, Host, enter, parse_rate, shaped_network
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import engine_names, find_recipe, load_recipe
from imagenet_fast.recipe.validation import lint

_PORT = 29400  # rendezvous port; in a private network no other process listens
_DONE = (0, 3)  # exit codes of a run that completed training


@dataclass(frozen=True)
class Contestant:
    """One run: an engine and its overrides, which include its seed and layout."""

    label: str
    engine: str
    overrides: tuple[str, ...]

    def arguments(self, recipe: str, data: Path | None, folder: Path) -> list[str]:
        """Return the arguments of the `train` command."""
        return [
            "train", "--no-warnings", "--recipe", recipe, "--sync", self.engine, "--out", str(folder / self.label),
            *(["--data", str(data)] if data else []),
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
    """Return one run for every combination of engine, layout and seed.

    A label leaves out the engine if there is only one and layouts are given.

    Args:
        recipe: Name or path of the recipe.
        ranks: Number of ranks of every run.
        engines: Names of the engines, all different.
        seeds: Seeds, all different; if empty, the recipe's own.
        overrides: Overrides of the recipe; ``ENGINE.KEY=VALUE`` applies to that engine only.
        layouts: Layouts of the ranks; if empty, the recipe's own.

    Raises:
        UserError: An override is for an engine not in ``engines``, or a layout is impossible.
    """
    for override in overrides:
        if (table := override.partition(".")[0]) in set(engine_names()) - set(engines):
            raise UserError(f"--set {override} is for {table}, which is not in --sync {','.join(engines)}; correct one")
    if layouts:
        refuse_axes(overrides, layouts)
    asked: Sequence[NamedLayout | None] = layouts or [None]
    seeded: Sequence[int | None] = seeds or [None]
    runs = []
    for engine, layout, seed in product(engines, asked, seeded):
        settled = _own(engine, overrides) + ([f"seed={seed}"] if seed is not None else [])
        names = [engine] if layout is None or len(engines) > 1 else []
        if layout is not None:
            settled = laid_out(find_recipe(recipe), engine, settled, layout, ranks)
            names.append(layout.name)
        if seed is not None:
            names.append(f"seed{seed}")
        runs.append(Contestant("-".join(names), engine, tuple(settled)))
    return runs


def _own(engine: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that apply to ``engine``: those of all, and its own with ``sync.`` for ``ENGINE.``."""
    others = set(engine_names()) - {engine}
    kept = [override for override in overrides if override.partition(".")[0] not in others]
    return [re.sub(rf"^{engine}\.", "sync.", override) for override in kept]


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its records, and the exit code of its `train` command."""

    past: PastRun
    exit_code: int

    @property
    def failed(self) -> bool:
        """True if training did not complete."""
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
    """Train every run to its end, each in its own directory in ``folder``.

    A run that fails does not stop the others.

    Args:
        name: Name or path of the recipe.
        runs: The runs, in order.
        data: Directory of the images; None if the recipe needs none.
        ranks: Number of ranks of every run.
        rate: Link rate in tc's notation; each rank is then a node of a shaped network. None means no such network.
        folder: Directory of the runs.

    Returns:
        The runs that have ended. After a signal, these are the runs so far; the interrupted one is the last.

    Raises:
        UserError: A recipe or the network is wrong; nothing has been trained.
        SystemExit: With code 2 if a run ended with code 2 before any run completed. Its ranks have printed the error.
    """
    jobs: dict[Contestant, Job] = {}
    doubtful: dict[str, None] = {}  # an ordered set
    for run in runs:
        doubts: list[str] = []
        recipe = load_recipe(find_recipe(name), run.engine, run.overrides, doubts.append)
        jobs[run] = plan_job(name, recipe, ranks, data=data, folder=folder / run.label)
        RunDir(folder / run.label).check_writable()
        doubtful |= dict.fromkeys([*doubts, *lint(recipe)])
    for doubt in doubtful:
        warn(doubt)
    codes: dict[Contestant, int] = {}
    with shaped_network(ranks, parse_rate(rate)) if rate is not None else nullcontext(None) as network:
        asked = asked_to_stop()
        begun = time.monotonic()
        for number, run in enumerate(runs, 1):
            print(f"\n{run.label} ({number} of {len(runs)})", flush=True)
            if number > 1 and sys.stderr.isatty():
                left_s = (time.monotonic() - begun) / (number - 1) * (len(runs) - number + 1)
                print(f"about {timedelta(seconds=round(left_s))} left for all runs", file=sys.stderr, flush=True)
            arguments = [sys.executable, "-m", "imagenet_fast", *run.arguments(name, data, folder)]
            codes[run] = _train(arguments, ranks, network, asked, jobs[run].recipe.checkpoint.grace_s)
            if asked():
                break
            if codes[run] == 2 and not any(code in _DONE for code in codes.values()):
                raise SystemExit(2)
    return [Ended(_past(jobs[run], run.label), code) for run, code in codes.items()]


def _past(job: Job, label: str) -> PastRun:
    """Read the records of a run that has ended; they are empty if it ended very early."""
    try:
        past = read_run(job.folder)
    except UserError:
        past = PastRun(job.folder, [], "failed")
    return replace(past, name=label, status="failed" if past.status == "not ended" else past.status)


def _train(
    arguments: list[str], ranks: int, network: list[Host] | None, asked: Callable[[], bool], saving_s: float
) -> int:
    """Run the command on this node, or with one rank on each node of ``network``, and return the exit code."""
    if network is None:
        starts = [partial(_start, [*arguments, "--nproc", str(ranks)], kill_with_parent)]
    else:
        starts = [
            partial(_start, arguments, partial(_move_to, host), _variables(rank, network))
            for rank, host in enumerate(network)
        ]
    return _wait(starts, asked, saving_s)


def _variables(rank: int, network: list[Host]) -> dict[str, str]:
    """Return the environment of a rank that is alone on its node: torchrun's variables beside this process's own."""
    meeting = {"MASTER_ADDR": network[0].address, "MASTER_PORT": str(_PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
    threads = {"OMP_NUM_THREADS": str(cores_per_rank(len(network)))}
    return threads | dict(os.environ) | RankInfo(rank, len(network), 0, 1).variables(node=rank) | meeting


def _move_to(host: Host) -> None:
    """Move this new process to ``host``, and have it end with its parent."""
    kill_with_parent()
    enter(host)


def _start(
    arguments: list[str], first: Callable[[], None], environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in its own process group.

    A terminal's Ctrl-C does not reach that group, so the process receives only the signal that this process sends.
    """
    return subprocess.Popen(arguments, env=environment, preexec_fn=first, process_group=0)


def asked_to_stop() -> Callable[[], bool]:
    """Answer the signals that end a command by remembering them; return a function that reports whether one has come.

    A handler that raised might do so while this process forks, where Python drops it. A signal that is already ignored
    stays ignored, such as SIGHUP under nohup.
    """
    came: list[int] = []
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: came.append(number))
    return lambda: bool(came)


def _wait(starts: Sequence[Callable[[], subprocess.Popen[bytes]]], asked: Callable[[], bool], saving_s: float) -> int:
    """Start processes, wait for their end, and return the exit code of the first that failed, else the highest.

    If a process fails or ``asked`` returns True, end all processes; in the latter case they may take ``saving_s``
    seconds to save.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for start in starts:
            processes.append(start())
        codes = [process.poll() for process in processes]
        while None in codes and not _failures(codes) and not asked():
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:  # a launcher waits for its ranks, which have GRACE_S
                process.wait(3 * GRACE_S + (saving_s if asked() else 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    failures = _failures(codes) or _failures(process.returncode for process in processes)
    return failures[0] if failures else max(process.returncode for process in processes)


def _failures(codes: Iterable[int | None]) -> list[int]:
    """Return the exit codes of runs that did not complete; None is a process that still runs."""
    return [code for code in codes if code is not None and code not in _DONE]
