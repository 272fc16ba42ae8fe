"""The documentation: links lead somewhere, commands are understood, written pages and versions are current."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml

import imagenet_fast
from imagenet_fast.cli.main import app
from imagenet_fast.compare.contest import contestants
from imagenet_fast.compare.layouts import parse_layouts
from imagenet_fast.recipe.batching import explain, scale_recipe, split_batch
from imagenet_fast.recipe.load import find_file, load_recipe, parse_engines
from imagenet_fast.run.result import RunResult, Status
from scripts import reference, results, tables
from tests.pages import ALL_PAGES, PAGES, ROOT, Command, mentioned, name_of, prose, shown_commands

OWN_RECIPE = "demo"
"""The recipe that stands in for a reader's own, such as my.toml."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROGRAM: Any = typer.main.get_command(app)

each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_links_and_names_of_files_lead_somewhere(page: Path):
    for name in re.findall(r"`((?:[\w.]+/)+\w+\.(?:py|sh|toml))`", prose(page)):
        assert any((folder / name).is_file() for folder in (ROOT, ROOT / "imagenet_fast")), name
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert ROOT in file.parents, target
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and mkdocs give a page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def test_the_reference_is_current():
    assert reference.main(["--check"]) == 0


@pytest.mark.parametrize("page", tables.PAGES[:-1], ids=name_of)
def test_tables_are_current(page: Path):
    assert page.read_text() == tables.rewritten(page)


@pytest.mark.ci
def test_all_tables_are_current():
    """Those of plan.md, too, which take a while."""
    assert tables.main(["--check"]) == 0


def test_every_exit_code_and_status_is_in_the_reference():
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    recipe = load_recipe("demo")
    result = RunResult.of("demo", recipe, split_batch(recipe, 2))
    codes = {2, 130}  # wrong usage; Ctrl-C in commands that train nothing
    for status in get_args(Status):
        assert f"`{status}`" in page
        codes |= {replace(result, status=status, target_top1=target).exit_code for target in (result.target_top1, None)}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes


def test_every_page_is_in_the_navigation_once():
    class Loader(yaml.SafeLoader):
        """mkdocs.yml has tags of Python's."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    pages = re.findall(r"'([\w/-]+\.md)'", str(site["nav"]))
    assert sorted(pages) == sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md"))
    assert site["strict"] is True


def test_the_readme_is_short():
    text = re.sub("<!--.*?-->", "", (ROOT / "README.md").read_text())
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1000


@each_page
def test_every_command_is_understood(page: Path):
    for command in (*shown_commands(page), *mentioned(page)):
        check(command)


@pytest.mark.parametrize("name", [*tables.names(), "convergence"])
def test_every_command_of_a_result_is_understood(name: str):
    result = results.read(name)
    for text in (*result.get("commands", []), *(row["command"] for row in result["rows"] if "command" in row)):
        check(Command(name, text))


def check(command: Command) -> None:
    """Assert that its programs exist, and that its options, recipe, keys, engines and ranks go together."""
    for word in command.text.split():
        assert not re.match(r"(scripts|examples|\.ci)/", word) or (ROOT / word).is_file(), command
    for module in re.findall(r"\bpython3? -m (\S+)", command.text):
        assert find_spec(module), command
    if words := ["2" if word == "N" else word for word in command.words]:
        program, path = PROGRAM, []
        while hasattr(program, "commands") and words and words[0].islower() and words[0][0] != "-":
            name, program, words = program.resolve_command(typer.Context(program), words)
            path.append(name)
        if "..." in words or words == ["--version"]:  # part of a command
            flags = {"--set"} | {flag for param in program.params for flag in param.opts}
            assert {word for word in words if word.startswith("-")} <= flags, command
        else:
            check_values(path, program.make_context(" ".join(path), words).params, command)


def check_values(path: list[str], asked: dict[str, Any], command: Command) -> None:
    match path:
        case ["train"] if asked["recipe"]:
            check_training(asked, command)
        case ["compare"]:
            ranks = asked["nproc"] or load_recipe(recipe_file(asked["recipe"])).reference_ranks
            layouts = parse_layouts(asked["layout"], ranks) if asked["layout"] else []
            engines = (asked["sync"] or "hybrid").split(",")
            for run in contestants(asked["recipe"], ranks, engines, [], asked["keys"], layouts):
                split_batch(run.recipe, ranks)
        case ["bench", "sync"] if asked["sync"]:
            parse_engines(asked["sync"], asked["wire"], asked["keys"])
        case ["eval" | "export"] if asked["recipe"]:
            recipe_file(asked["recipe"])
        case ["recipes", "show"]:
            recipe_file(asked["name"])


def recipe_file(name: str) -> Path:
    return find_file("recipe", OWN_RECIPE if name.endswith(".toml") else name)


def check_training(asked: dict[str, Any], command: Command) -> None:
    """Plan a training for the ranks that it names, or else for those of its recipe."""
    seed = [f"seed={asked['seed']}"] if asked["seed"] is not None else []
    written = load_recipe(recipe_file(asked["recipe"]), asked["sync"], [*asked["keys"], *seed])
    counts = [int(count) for count in (asked["nodes"] or "1").split(":")]
    each = asked["nproc"] or written.reference_ranks // counts[0]
    for nodes in range(counts[0], counts[-1] + 1):
        recipe = scale_recipe(written, nodes * each) if asked["scale_batch"] else written
        batching = split_batch(recipe, nodes * each)
    if command.prints.startswith("recipe written for"):
        assert command.prints.splitlines()[0] == explain(written, recipe, batching), command


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    versions = re.findall(r"^## \[(.+?)\](?: - (\S+))?", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert PROJECT["version"] == citation["version"] == imagenet_fast.__version__
    assert versions[0] == ("Unreleased", "")
    assert (citation["version"], str(citation["date-released"])) in versions
    assert citation["license"] == PROJECT["license"]
