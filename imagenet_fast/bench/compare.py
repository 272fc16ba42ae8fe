"""The same recipe trained once an engine, one after the other: who is first at the target, and after how many steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from imagenet_fast.bench.network import Host, end_with_parent, enter, parse_rate, shaped_network
from imagenet_fast.errors import UserError, warn
from imagenet_fast.launch.nodes import local_ranks
from imagenet_fast.launch.planning import check_writable, plan_job
from imagenet_fast.launch.signals import GRACE_S
from imagenet_fast.ranks.cores import usable_cores
from imagenet_fast.recipe.doubts import doubts
from imagenet_fast.recipe.reading import engine_names, find_recipe, load_recipe
from imagenet_fast.record.past_runs import PastRun, read_run

_PORT = 29400  # of the rendezvous, in a network where nobody else listens


@dataclass(frozen=True)
class Contestant:
    """One run: an engine, a seed and the overrides that are its own."""

    engine: str
    seed: int | None
    overrides: tuple[str, ...]

    @property
    def label(self) -> str:
        return self.engine if self.seed is None else f"{self.engine}-seed{self.seed}"

    def arguments(self, recipe: str, data: Path | None, folder: Path) -> list[str]:
        """The command line of `train`."""
        return [
            "train", "--no-warnings", "--recipe", recipe, "--sync", self.engine, "--out", str(folder / self.label),
            *(["--data", str(data)] if data else []),
            *(["--seed", str(self.seed)] if self.seed is not None else []),
            *(part for override in self.overrides for part in ("--set", override)),
        ]  # fmt: skip


def contestants(engines: Sequence[str], seeds: Sequence[int | None], overrides: Sequence[str]) -> list[Contestant]:
    """Every engine with every seed. ``ENGINE.KEY=VALUE`` among the overrides is for that engine alone.

    Raises UserError where such an engine is not among them, or two runs are the same.
    """
    for override in overrides:
        if (table := override.partition(".")[0]) in set(engine_names()) - set(engines):
            raise UserError(f"--set {override} is for {table}, which is not in --sync {','.join(engines)}; correct one")
    runs = [
        Contestant(engine, seed, tuple(_for(engine, override) for override in overrides if _concerns(engine, override)))
        for engine in engines
        for seed in seeds or [None]
    ]
    if twice := [run.label for run in runs if runs.count(run) > 1]:
        raise UserError(f"{twice[0]} would be run twice; name an engine or a seed once")
    return runs


def whole_numbers(text: str | None) -> list[int]:
    """The seeds of a list such as 1,2,3. Raises UserError."""
    try:
        return [int(number) for number in text.split(",")] if text else []
    except ValueError:
        raise UserError(f"--seeds {text} is not a list of whole numbers; write for example 1,2,3") from None


def _concerns(engine: str, override: str) -> bool:
    """Whether it is for ``engine``, or for all."""
    table = override.partition(".")[0]
    return table == engine or table not in engine_names()


def _for(engine: str, override: str) -> str:
    return f"sync.{override.removeprefix(f'{engine}.')}" if override.startswith(f"{engine}.") else override


def compare(
    name: str,
    runs: Sequence[Contestant],
    *,
    data: Path | None,
    hosts: int | None,
    rate: str | None,
    folder: Path,
) -> list[PastRun]:
    """Train every run to its end, each in a directory of its own in ``folder``; what they recorded.

    With ``rate`` every rank is a host of a shaped network. Raises UserError before anything is trained where a recipe
    or the network is at fault, and afterwards where a run has failed.
    """
    ranks = local_ranks(hosts)
    doubtful: dict[str, None] = {}  # in order, and each once
    for run in runs:
        seed = [f"seed={run.seed}"] if run.seed is not None else []
        recipe = load_recipe(find_recipe(name), run.engine, [*run.overrides, *seed])
        plan_job(name, recipe, ranks, data=data, folder=folder / run.label)
        check_writable(folder / run.label)
        doubtful |= dict.fromkeys(doubts(recipe))
    for doubt in doubtful:
        warn(doubt)
    with shaped_network(ranks, parse_rate(rate)) if rate is not None else nullcontext(None) as network:
        for number, run in enumerate(runs, 1):
            print(f"\n{run.label} ({number} of {len(runs)})", flush=True)
            arguments = [sys.executable, "-m", "imagenet_fast", *run.arguments(name, data, folder)]
            code = _on_this_machine(arguments, ranks) if network is None else _on_hosts(arguments, network)
            if code not in (0, 3):
                where = folder / run.label
                raise UserError(
                    f"the run with {run.label} ended with exit code {code}; what there is of it lies in {where}"
                )
    return [replace(read_run(folder / run.label), name=run.label) for run in runs]


def _on_this_machine(arguments: list[str], ranks: int) -> int:
    return _wait([subprocess.Popen([*arguments, "--nproc", str(ranks)])])


def _on_hosts(arguments: list[str], network: list[Host]) -> int:
    """A rank a host, by torchrun's environment variables."""
    processes = []
    for rank, host in enumerate(network):
        place = {"RANK": str(rank), "WORLD_SIZE": str(len(network)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        meeting = {"MASTER_ADDR": network[0].address, "MASTER_PORT": str(_PORT)}
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // len(network)))}
        environment = threads | dict(os.environ) | place | meeting
        processes.append(subprocess.Popen(arguments, env=environment, preexec_fn=partial(_move_to, host)))
    return _wait(processes)


def _move_to(host: Host) -> None:
    end_with_parent()
    enter(host)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """The first exit code that is not 0, or 0. When one process fails, or we are interrupted, all are ended."""
    try:
        while all(process.poll() in (None, 0, 3) for process in processes) and any(
            process.returncode is None for process in processes
        ):
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(GRACE_S + 2)
            except subprocess.TimeoutExpired:
                process.kill()
    return next((process.returncode for process in processes if process.returncode), 0)
