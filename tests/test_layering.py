"""Which package may import which. CONTRIBUTING.md draws the same layers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "imagenet_fast"

LAYERS = (
    {"__main__"},
    {"cli"},
    {"bench", "compare"},
    {"launch"},
    {"doctor"},
    {"training", "plan"},
    {"parallel", "metrics"},
    {"run"},
    {"sync", "data", "models", "checkpoint", "netlab"},
    {"distributed", "cost_model"},
    {"recipe"},
    {"atomic_io", "progress", "stdio", "units"},
    {"errors", "__init__"},
)
"""From the top: a module imports from its own package and from layers below it."""

WITHOUT_TORCH = (
    "recipe.load", "distributed.cores", "compare.report", "compare.reference", "launch.slurm", "launch.nodes",
    "launch.cluster_job", "launch.job_setup", "plan.rows", "plan.fastest", "plan.report", "cli.plan",
    "compare.contest", "compare.timeline", "data.verify", "data.download",
)  # fmt: skip
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}


def modules() -> dict[str, Path]:
    """Every module by its dotted name within the package; a package by its directory's."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, at its top, inside a function or for type checking alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(level=0, module=str(module), names=names) if module.startswith("imagenet_fast"):
                inside = module.removeprefix("imagenet_fast").removeprefix(".")
                for name in names:
                    full = f"{inside}.{name.name}".removeprefix(".")
                    yield full if full in known else inside or "__init__"
            case ast.Import(names=names):
                for name in names:
                    if name.name.startswith("imagenet_fast"):
                        yield name.name.removeprefix("imagenet_fast").removeprefix(".") or "__init__"
            case ast.ImportFrom(level=level) if level:
                raise AssertionError(f"{path} imports by a relative name, which this test does not follow")


@cache
def arrows() -> dict[str, set[str]]:
    known = modules()
    return {name: set(imports(path, known)) for name, path in known.items()}


def package(module: str) -> str:
    return module.partition(".")[0]


def test_every_package_has_its_layer():
    assert {package(module) for module in modules()} == LAYER.keys()


def test_imports_go_down_only():
    up = [
        f"{module} imports {imported}"
        for module, targets in arrows().items()
        for imported in targets
        if package(imported) != package(module) and LAYER[package(imported)] <= LAYER[package(module)]
    ]
    assert not up


def test_no_import_cycles():
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


@pytest.mark.usefixtures("subprocesses")
def test_commands_that_start_ranks_or_none_begin_without_torch():
    """So that a wrong recipe is refused at once, and `report` works on a laptop."""
    imports = [f"import imagenet_fast.{name}" for name in WITHOUT_TORCH]
    done = subprocess.run(
        [sys.executable, "-c", "; ".join(["import sys; sys.modules['torch'] = None", *imports])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_ranks_start_without_torchs_compiler():
    """Importing it, or torchvision, takes as long as torch itself."""
    start = "import sys, torch, imagenet_fast.launch.rank as rank, imagenet_fast.sync as sync"
    pool = "sync.GradientPool(torch.nn.Linear(2, 2), sync.LazySync()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"{start}; {pool}"], capture_output=True, text=True, check=True)
    assert not {"torch._dynamo", "torchvision", "matplotlib", "sympy"} & set(done.stdout.split())


def test_contributing_draws_the_same_layers():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    drawn = [set(re.findall(r"[a-z_]+(?=/|\.py)", line)) for line in _image(text)]
    assert [packages for packages in drawn if packages] == [
        {name for name in packages if not name.startswith("__")} for packages in LAYERS[1:]
    ]


def _image(text: str) -> list[str]:
    """The indented block under "The packages", of each line what stands before the explanation."""
    block = text[text.index("## The packages") :].split("\n\n")[2]
    return [line.strip().split("   ")[0] for line in block.splitlines()]


def test_tests_mirror_the_packages():
    here = PACKAGE.parent / "tests"
    folders = {path.name for path in here.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
    assert folders <= LAYER.keys() | {"e2e", "faults", "gpu", "gpu_semantics"}
    assert {name for name in LAYER if (PACKAGE / name).is_dir()} <= folders


LINES = {
    "imagenet_fast/bench": 2086,
    "imagenet_fast/checkpoint": 863,
    "imagenet_fast/cli": 1574,
    "imagenet_fast/compare": 701,
    "imagenet_fast/cost_model": 1191,
    "imagenet_fast/data": 4482,
    "imagenet_fast/distributed": 2469,
    "imagenet_fast/doctor": 318,
    "imagenet_fast/launch": 1247,
    "imagenet_fast/metrics": 875,
    "imagenet_fast/models": 1845,
    "imagenet_fast/netlab": 547,
    "imagenet_fast/parallel": 925,
    "imagenet_fast/plan": 1449,
    "imagenet_fast/recipe": 2018,
    "imagenet_fast/run": 566,
    "imagenet_fast/sync": 4771,
    "imagenet_fast/training": 3026,
    "imagenet_fast": 31497,
    "tests": 28599,
    "tests/sync": 6039,
}
"""The lines of each package and of the tests. A commit that takes some away lowers its number; only an issue raises
one."""

SLACK = 20


def lines_of(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def test_every_package_has_a_budget():
    packages = {f"imagenet_fast/{name}" for name in LAYER if (PACKAGE / name).is_dir()}
    assert LINES.keys() == packages | {"imagenet_fast", "tests", "tests/sync"}


@pytest.mark.parametrize("folder", LINES)
def test_the_budget_only_falls(folder: str):
    lines = lines_of(PACKAGE.parent / folder)
    assert lines <= LINES[folder], f"{folder} has {lines} lines, and may have {LINES[folder]}; take something away"
    assert lines > LINES[folder] - SLACK, f"{folder} has {lines} lines: lower its budget, {LINES[folder]}"
