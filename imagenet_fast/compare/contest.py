"""Train one recipe with several engines and layouts, one run after another, to compare time and steps to the target."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from pathlib import Path

from imagenet_fast.compare.layouts import NamedLayout, laid_out, refuse_axes
from imagenet_fast.errors import JobAborted, UserError, warn
from imagenet_fast.launch.job_setup import plan_job
from imagenet_fast.launch.nodes import LaunchConfig
from imagenet_fast.launch.signals import stopping_early
from imagenet_fast.metrics.past_run import PastRun, read_run
from imagenet_fast.netlab.namespaces import parse_rate, shaped_network
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import find_file, load_recipe
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.recipe.sync_config import engines as all_engines
from imagenet_fast.run.result import STOPPED
from imagenet_fast.run.run_dir import RunDir

_DONE = (0, 3)  # exit codes of a run that completed training


@dataclass(frozen=True)
class Contestant:
    """One run: its recipe, which has its engine, layout and seed, and the user's overrides in it."""

    label: str
    recipe: Recipe
    overrides: tuple[str, ...]


def contestants(
    name: str,
    ranks: int,
    engines: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str],
    layouts: Sequence[NamedLayout] = (),
) -> list[Contestant]:
    """Return one run for every combination of engine, layout and seed; warn of what is doubtful, once.

    A label leaves out the engine if there is only one and layouts are given.

    Args:
        name: Name or path of the recipe.
        ranks: Number of ranks of every run.
        engines: Names of the engines, all different.
        seeds: Seeds, all different; if empty, the recipe's own.
        overrides: Overrides of the recipe; ``ENGINE.KEY=VALUE`` applies to that engine only.
        layouts: Layouts of the ranks; if empty, the recipe's own.

    Raises:
        UserError: An override is for an engine not in ``engines``, or a recipe or layout is impossible.
    """
    for override in overrides:
        if (table := override.partition(".")[0]) in set(all_engines()) - set(engines):
            raise UserError(f"--set {override} is for {table}, which is not in --sync {','.join(engines)}; correct one")
    if layouts:
        refuse_axes(overrides, layouts)
    path = find_file("recipe", name)
    asked: Sequence[NamedLayout | None] = layouts or [None]
    seeded: Sequence[int | None] = seeds or [None]
    runs: list[Contestant] = []
    doubts: list[str] = []
    for engine, layout, seed in product(engines, asked, seeded):
        others = set(all_engines()) - {engine}
        kept = [override for override in overrides if override.partition(".")[0] not in others]
        settled = [re.sub(rf"^{engine}\.", "sync.", override) for override in kept]
        settled += [f"seed={seed}"] if seed is not None else []
        names = [engine] if layout is None or len(engines) > 1 else []
        if layout is None:
            recipe = load_recipe(path, engine, settled, doubts.append)
        else:
            recipe = laid_out(path, engine, settled, layout, ranks, doubts.append)
            names.append(layout.name)
        if seed is not None:
            names.append(f"seed{seed}")
        doubts += recipe.doubts()
        runs.append(Contestant("-".join(names), recipe, tuple(settled)))
    for doubt in dict.fromkeys(doubts):
        warn(doubt)
    return runs


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
        UserError: The data or the network is wrong; nothing has been trained.
        SystemExit: With code 2 if a run ended with code 2 before any run completed. Its error is printed.
    """
    stem = find_file("recipe", name).stem
    jobs = [
        plan_job(stem, run.recipe, ranks, data=data, folder=folder / run.label, overrides=run.overrides) for run in runs
    ]
    for job in jobs:
        RunDir(job.folder).check_writable()
    ended: list[Ended] = []
    with shaped_network(ranks, parse_rate(rate)) if rate is not None else nullcontext(()) as hosts:
        begun = time.monotonic()
        for number, (run, job) in enumerate(zip(runs, jobs, strict=True), 1):
            print(f"\n{run.label} ({number} of {len(runs)})", flush=True)
            if number > 1 and sys.stderr.isatty():
                left_s = (time.monotonic() - begun) / (number - 1) * (len(runs) - number + 1)
                print(f"about {timedelta(seconds=round(left_s))} left for all runs", file=sys.stderr, flush=True)
            code = _train(job, LaunchConfig(ranks, hosts=tuple(hosts)))
            if code == 2 and all(one.failed for one in ended):
                raise SystemExit(2)
            ended.append(Ended(_past(job, run.label), code))
            if code == STOPPED or ended[-1].past.status == "interrupted":
                break
    return ended


def _past(job: Job, label: str) -> PastRun:
    """Read the records of a run that has ended; they are empty if it ended very early."""
    try:
        past = read_run(job.folder)
    except UserError:
        past = PastRun(job.folder, [], "failed")
    return replace(past, name=label, status="failed" if past.status == "not ended" else past.status)


def _train(job: Job, nodes: LaunchConfig) -> int:
    """Train ``job`` as `train` does: print what ends it, and return the exit code."""
    from imagenet_fast.launch.launcher import launch  # with torch; a wrong recipe is refused before

    try:
        with stopping_early():
            return launch(job, nodes)
    except SystemExit:
        return STOPPED
    except (UserError, JobAborted) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
