"""Job that a cluster's script or manifest starts on every node, checked as far as this node can."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from imagenet_fast.errors import UserError, warn
from imagenet_fast.recipe.batching import explain, scale_recipe, split_batch
from imagenet_fast.recipe.data_config import SyntheticData
from imagenet_fast.recipe.load import find_file, load_recipe, shipped
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.run.run_dir import new_folder

_RESTARTS = "3"  # of the ranks, if one is lost; neither Slurm nor ssh starts a launcher again
_UNITS_S = (86_400, 3600, 60, 1)
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\$`])*\"""", re.DOTALL)  # what a shell takes as it is
_SHELL = re.compile(r"[$`;&|<>()*?\[\n]+|(?:^|\s)[~#]|^\s*\w+=")  # what it acts upon


@dataclass(frozen=True)
class ClusterJob:
    """A recipe, in the file ``path``, on ``nodes`` nodes with ``ranks_each`` ranks each."""

    path: Path
    recipe: Recipe
    nodes: int
    ranks_each: int
    options: tuple[str, ...]
    """Options of `train` that change the recipe."""
    note: str
    """One line of plain words and numbers on how the recipe's batch is split."""

    @property
    def shipped(self) -> bool:
        """True if every installation has the recipe, and finds it by its name."""
        return self.path in shipped("recipe").values()

    def folder(self, out: Path | None) -> Path:
        """Return the run directory: ``out``, or a new one."""
        return (out or new_folder(self.path.stem, self.recipe.sync.kind)).absolute()

    def train(self, recipe: str, data: str | None, folder: str, *more: str) -> list[str]:
        """Return the words of the command `train`, without the program: start in ``folder``, or resume the run there.

        All are as the nodes see them; without ``data`` there is no such option.
        """
        where = [] if data is None else ["--data", data]
        ranks = ["--nproc", str(self.ranks_each)]
        return ["train", "--recipe", recipe, *where, *self.options, *ranks, *more, "--out", folder, "--resume", "auto"]

    def command(self, program: str | None, data: Path | None, folder: Path, *more: str) -> list[str]:
        """Return the command of nodes that share this node's files, with ``more`` options of `train`.

        ``program`` is what starts imagenet-fast there, in words that are quoted as in a shell; None for this Python.

        Raises:
            UserError: ``program`` cannot be read or needs a shell, or ``data`` is missing or would be ignored.
        """
        check_data(self.recipe, data, "--data")
        if program is not None and (found := _SHELL.search(_QUOTED.sub("'", program))):
            raise UserError(
                f"--program {program!r} has {found[0].strip()!r}, which is for a shell, and nodes start words without "
                'one; put it into a script that ends with `exec imagenet-fast "$@"`, and give that script'
            )
        try:
            words = [sys.executable, "-m", "imagenet_fast"] if program is None else shlex.split(program)
        except ValueError as error:
            raise UserError(f"--program {program} cannot be read ({error}); quote it as in a shell") from None
        if not words:
            raise UserError("--program is empty; leave it out for this Python, or give for example imagenet-fast")
        recipe = self.path.stem if self.shipped else str(self.path.absolute())
        images = None if data is None else str(data.absolute())
        return [*words, *self.train(recipe, images, str(folder), *more, "--max-restarts", _RESTARTS)]


def plan_cluster_job(
    named: str, sync: str | None, overrides: Sequence[str], nodes: int, ranks_each: int | None, scale: bool
) -> ClusterJob:
    """Build the job of a cluster, and warn of each doubtful value of the recipe.

    Without ``ranks_each`` the nodes share the ranks for which the recipe was written. With ``scale`` its batch is
    scaled to the number of ranks.

    Raises:
        UserError: If there is no such recipe, or the ranks do not fit it.
    """
    path = find_file("recipe", named)
    written = load_recipe(path, sync, overrides)
    if ranks_each is None:
        ranks_each, rest = divmod(written.reference_ranks, nodes)
        if rest:
            raise UserError(
                f"{path.stem} was written for {written.reference_ranks} ranks, which {nodes} nodes cannot share "
                "evenly; say with --nproc how many ranks a node has"
            )
    ranks = nodes * ranks_each
    recipe = scale_recipe(written, ranks) if scale else written
    note = explain(written, recipe, split_batch(recipe, ranks))
    options = [word for override in overrides for word in ("--set", override)]
    options += [] if sync is None else ["--sync", sync]
    options += ["--scale-batch"] if scale else []
    for doubt in recipe.doubts():
        warn(doubt)
    return ClusterJob(path, recipe, nodes, ranks_each, tuple(options), note)


def check_data(recipe: Recipe, given: object | None, option: str) -> None:
    """Raise UserError if ``option``, which gives the directory of the images, is missing or would be ignored."""
    if isinstance(recipe.data, SyntheticData):
        if given is not None:
            raise UserError(
                f"{option} {given} would not be read: data.loader is 'synthetic', which makes its own images; leave "
                f"{option} out, or choose a recipe with another loader"
            )
    elif given is None and recipe.data.dataset != "digits":
        raise UserError(f"the nodes do not know where {recipe.data.dataset} lies; say it with {option}")


def parse_time_limit(text: str | None) -> int | None:
    """Return the seconds of Slurm's ``MINUTES``, ``MIN:SEC``, ``H:MIN:SEC`` or ``DAYS-H[:MIN[:SEC]]``; None: no limit.

    Slurm has none for 0, ``UNLIMITED`` and ``INFINITE``. Raises UserError.
    """
    if text is None or text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    if not re.fullmatch(r"(?:\d{1,4}-)?\d{1,6}(?::\d{1,2}){0,2}", text, re.ASCII):
        raise UserError(f"--time {text} is no time limit; write for example 90 (minutes), 24:00:00 or 2-12:00:00")
    parts = [int(part) for part in re.split("[-:]", text)]
    units = _UNITS_S if "-" in text else _UNITS_S[1:] if len(parts) == 3 else _UNITS_S[2:]
    return sum(part * unit for part, unit in zip(parts, units, strict=False)) or None


def job_label(name: str) -> str:
    """Return a job name of at most 40 small letters, digits and single dashes, which begins with a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"imagenet-fast-{plain}"
    return named[:40].strip("-")


def emit(text: str, file: Path | None) -> None:
    """Print the text of a job, or write it to ``file``. Raises UserError if it is not UTF-8."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise UserError("a path or an option is not UTF-8, as the text of a job is; choose another") from None
    if file is None:
        print(text, end="")
    else:
        file.write_bytes(encoded)
