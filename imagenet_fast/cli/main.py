"""The command line: parse options, run a command, set the exit code.

torch and pydantic are imported only by the commands that need them.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from imagenet_fast import __version__
from imagenet_fast.cli import options as opt
from imagenet_fast.cli.app import App
from imagenet_fast.cli.bench import bench_app
from imagenet_fast.cli.compare import compare, report, timeline
from imagenet_fast.cli.data import data_app
from imagenet_fast.cli.export import export
from imagenet_fast.cli.launch import launch_app
from imagenet_fast.cli.plan import plan, plan_fastest, plan_rows, plan_validate
from imagenet_fast.cli.train import evaluate, train
from imagenet_fast.errors import JobAborted, UserError, exit_with_error

app = App(
    no_args_is_help=True, invoke_without_command=True, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
recipes_app = App(help="List the shipped recipes, their keys, or one recipe.", invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")
app.add_typer(launch_app, name="launch")

_PATH_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors that another path mends; it does not if a disk is full."""


def entry() -> None:
    """Run the command line as the installed console script."""
    from imagenet_fast.stdio import exit_now, keep_printing, refuse_if_lost

    trains = sys.argv[1:2] in (["train"], ["compare"])  # whose results are run directories, and compare's table, too
    keep_printing(waits=not trains)
    _inherit_nothing()
    try:
        main()
    except SystemExit as end:
        if not end.code and sys.argv[1:2] != ["train"]:
            refuse_if_lost()
        exit_now(end)


def _inherit_nothing() -> None:
    """Let no directory or variable around decide what runs: neither here nor in the Pythons that this one starts."""
    if os.environ.pop("PYTHONOPTIMIZE", ""):  # help is made of docstrings, and so is DALI
        os.execv(sys.executable, sys.orig_argv)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun's options, as an operator of Kubernetes sets them
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):  # nothing can be read in less than 20 columns
        if not re.fullmatch("[2-9][0-9]|[1-9][0-9]{2,3}", os.environ.get(name, "")):
            os.environ.pop(name, None)
    os.environ["MPLBACKEND"] = "agg"  # not the kernel's, in a cell of a notebook
    # Else a rank would look into the working directory first. The same Python finds the standard library by itself.
    first = takewhile(lambda folder: folder != sysconfig.get_path("stdlib"), sys.path)
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(folder or "." for folder in first)}


def main() -> None:
    """Run the command line.

    A UserError is printed as one sentence on stderr, with exit code 2.

    Raises:
        SystemExit: Always, with the exit code.
    """
    # Set before torch is imported: for hosts that have no name, or do not answer yet, its C++ code prints pages of
    # stack frames. A launcher reports such errors itself; a rank keeps real errors of its backend.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR" if "RANK" in os.environ else "FATAL")
    try:
        _check_start()
        app()
    except UserError as error:
        exit_with_error(str(error))
    except JobAborted as fault:
        exit_with_error(str(fault), code=1)
    except (OSError, RuntimeError) as error:
        if "RANK" in os.environ:  # on a rank the traceback is needed
            raise
        if isinstance(error, RuntimeError) or error.filename is None:
            from imagenet_fast.distributed.cores import exceeded_limit

            if limit := exceeded_limit(str(error)):
                exit_with_error(limit)
            raise
        advice, code = ("; check the path", 2) if isinstance(error, _PATH_ERRORS) else ("", 1)
        exit_with_error(f"{error.filename}: {error.strerror}{advice}", code)


def _check_start() -> None:
    """Raise UserError without threads, a working directory, or a shell that has expanded ``~`` and variables."""
    from imagenet_fast.distributed.cores import usable_cores
    from imagenet_fast.launch.nodes import refused_threads

    if limit := refused_threads(usable_cores()):  # OpenBLAS, which needs them, would interrupt this process
        raise UserError(limit)
    try:
        Path.cwd()
    except OSError as error:  # libraries would end the process
        raise UserError(f"the working directory cannot be used ({error.strerror}); change to one that exists") from None
    for word in sys.argv[1:]:
        if re.search(r"(?:^|=)(?:~|\$[{A-Za-z_])", word):
            raise UserError(
                f"{word}: no shell has expanded what it begins with; write the path out, or ./ before a name that "
                "begins so"
            )


@app.callback()
def imagenet_fast(version: Annotated[bool, typer.Option(help="Print the version and exit.")] = False) -> None:
    """Train ImageNet fast, with a swappable gradient-sync engine."""
    if version:
        print(f"imagenet-fast {__version__}")
        raise typer.Exit


app.command()(train)
app.command("eval")(evaluate)
app.command()(export)


@app.command()
def doctor(
    data: opt.Directory[Path | None] = None,
    out: opt.Directory[Path] = Path("runs"),
    nproc: opt.Count[int | None] = None,
    nodes: opt.Count[int | None] = None,
    rdzv_endpoint: opt.Endpoint = None,
    join_timeout: opt.JoinTimeout = 300,
    json_file: opt.Json = None,
) -> None:
    """Check for anything that would prevent training here, and say how to fix it.

    Prints one line per check: ok, warn or fail. The exit code is 1 if any check
    fails. With --nodes, run the command on each node: it checks all of them and
    the network between them, and the first node prints the result.

    Args:
        out: Directory in which runs will be written.
    """
    from imagenet_fast.doctor.report import findings_table, read_results, refused
    from imagenet_fast.launch.launcher import run_ranks
    from imagenet_fast.launch.nodes import resolve_nodes
    from imagenet_fast.recipe.job import DoctorJob
    from imagenet_fast.run.launcher_dir import LauncherDir

    cluster = resolve_nodes(nproc, nodes, rdzv_endpoint, join_timeout)
    with LauncherDir.temporary() as launcher_dir:
        code, cause = run_ranks(DoctorJob(data, out), launcher_dir, cluster)
        found = read_results(launcher_dir.results)
    if found is None and not code:  # another node has them
        return
    if found is None:  # that ranks cannot train together is a result, too
        from imagenet_fast.doctor.host_checks import examine

        found = [*examine(data, out, cluster.ranks_each), refused("ranks", UserError(cause))]
    opt.show(findings_table(found), found, json_file)
    if any(finding.state == "fail" for finding in found):
        raise typer.Exit(1)


app.command()(plan)
app.command("plan fastest")(plan_fastest)
app.command("plan rows")(plan_rows)
app.command("plan validate")(plan_validate)
for command in (compare, report, timeline):
    app.command()(command)


@recipes_app.callback()
def list_recipes(context: typer.Context) -> None:
    """List the shipped recipes."""
    if context.invoked_subcommand is not None:
        return
    from imagenet_fast.metrics.tables import compact_table
    from imagenet_fast.recipe.load import load_recipe, shipped
    from imagenet_fast.units import number

    rows = []
    for name, recipe in ((name, load_recipe(path)) for name, path in shipped("recipe").items()):
        # tp4 is four shards, pp4 four stages, dp data parallelism alone
        layout = recipe.parallel.layout(recipe.parallel.ranks) if recipe.parallel.ranks > 1 else "dp"
        numbers = (f"{layout} {recipe.reference_ranks}", str(recipe.global_batch), str(recipe.epochs))
        target = number(recipe.target_top1, "g", " %")
        rows.append((name, recipe.model.label, recipe.optim.kind, recipe.sync.kind, *numbers, target))
    opt.show(compact_table(("recipe", "model", "optim", "engine"), ("ranks", "batch", "epochs", "target"), rows))


@recipes_app.command("keys")
def show_keys(prefix: Annotated[str, typer.Argument(metavar="[PREFIX]")] = "") -> None:
    """List the keys of a recipe: type, default and meaning.

    Args:
        prefix: Show only keys that begin like this, such as optim.
    """
    from rich.padding import Padding
    from rich.text import Text

    from imagenet_fast.recipe.key_reference import recipe_keys

    for key in recipe_keys(prefix):
        kinds = f"  ({', '.join(key.kinds)})" if key.kinds else ""
        default = key.default if key.default in ("required", "absent", "derived") else f"default {key.default}"
        opt.show(Text.assemble((key.name, "bold"), f"  {key.type}; {default}", (kinds, "dim")))
        opt.show(Padding(Text(key.meaning.replace("`", "")), (0, 0, 0, 4), expand=False))


@recipes_app.command("show")
def show_recipe(name: Annotated[str, typer.Argument(metavar="NAME|PATH")]) -> None:
    """Print one recipe.

    Args:
        name: Name of a shipped recipe, or a TOML file.
    """
    from imagenet_fast.recipe.load import find_file, read_text

    print(read_text(find_file("recipe", name)), end="")
