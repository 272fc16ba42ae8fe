"""The documentation: links lead somewhere, commands exist, Python imports, and generated pages are up to date."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml

from imagenet_fast.bench.compare import contestants
from imagenet_fast.bench.parallel_layouts import parse_layouts
from imagenet_fast.cli.main import app
from imagenet_fast.metrics.run_result import RunResult, Status
from imagenet_fast.recipe.batching import check_norms, explain, scale_recipe, split_batch
from imagenet_fast.recipe.load import find_recipe, load_recipe, parse_engines
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.recipe.validation import check_axes
from tests.pages import PAGES, ROOT, Command, mentioned, name_of, python_blocks, shown_commands

ALL_PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
OWN_RECIPE = "demo"
"""The recipe that stands in for a reader's own, such as my.toml."""

each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_internal_links_lead_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page}: {target}"
        assert ROOT in file.parents, f"{page}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page}: {target}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and mkdocs give a page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def test_reference_pages_are_current():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "reference.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_exit_code_and_status_is_in_the_reference():
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    batching = split_batch(recipe := load_recipe(find_recipe("demo")), 2)
    result = RunResult.of("demo", recipe, batching)
    codes = {2, 130}  # wrong usage; Ctrl-C in commands that train nothing
    for status in get_args(Status):
        assert f"`{status}`" in page
        codes.add(replace(result, status=status).exit_code)
        codes.add(replace(result, status=status, target_top1=None).exit_code)
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/**/*.md"):
        assert str(page.relative_to(ROOT / "docs")) in navigation, page


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1000


def test_ci_builds_the_site_strictly():
    assert "\nscripts/docs.sh\n" in (ROOT / ".ci" / "run").read_text()
    assert "mkdocs" in (script := (ROOT / "scripts" / "docs.sh").read_text())
    assert "--strict" in script
    assert re.search(r"^strict: true$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


@each_page
def test_every_command_is_understood(page: Path):
    for command in shown_commands(page):
        if "..." in command.words:
            flags_of(command.words)
        elif command.words:
            check_values(command)


@each_page
def test_every_command_in_a_sentence_exists(page: Path):
    for text in mentioned(page):
        flags_of(text.split())


@each_page
def test_every_program_of_ours_exists(page: Path):
    for command in shown_commands(page):
        first, *rest = command.text.split()
        for word in (first, *rest):
            if re.match(r"(scripts|examples|\.ci)/", word):
                assert (ROOT / word).is_file(), command


@each_page
def test_python_compiles_and_its_imports_resolve(page: Path):
    for block in python_blocks(page):
        for node in ast.walk(ast.parse(block.text, f"{name_of(page)}:{block.line}")):
            match node:
                case ast.Import(names=names):
                    for name in names:
                        importlib.import_module(name.name)
                case ast.ImportFrom(module=str(module), names=names):
                    for name in names:
                        assert hasattr(importlib.import_module(module), name.name), (page, module, name.name)


def parsed(words: list[str]) -> Any:
    """Parse a command line as the program does, without running it; return its innermost context."""
    command: Any = typer.main.get_command(app)
    context, name = None, "imagenet-fast"
    while True:
        context = command.make_context(name, list(words), parent=context)
        words = [*getattr(context, "_protected_args", ()), *context.args]
        if not hasattr(command, "commands") or not words:
            return context
        name, command, words = command.resolve_command(context, words)


def flags_of(words: list[str]) -> None:
    """Assert that the command exists, and each flag that is named; values and what is missing are not looked at."""
    command: Any = typer.main.get_command(app)
    for word in words:
        if word.startswith("-"):
            assert any(word in param.opts for param in command.params), f"{' '.join(words)}: {word}"
        elif hasattr(command, "commands") and word != "..." and not word.isupper():
            assert word in command.commands, f"{' '.join(words)}: {word}"
            command = command.commands[word]


def check_values(command: Command) -> None:
    """Assert that recipe, keys, engines and ranks of a command go together; nothing is run."""
    if command.words == ["--version"]:
        return
    context = parsed(command.words)
    asked = context.params
    path = context.command_path.removeprefix("imagenet-fast ")
    match path.split():
        case ["train"] if asked["recipe"]:
            own = [f"seed={asked['seed']}"] if asked["seed"] is not None else []
            check_training(
                command, load_recipe(recipe_file(asked["recipe"]), asked["sync"], [*asked["overrides"], *own])
            )
        case ["compare"]:
            written = load_recipe(recipe_file(asked["recipe"]))
            ranks = asked["nproc"] or written.ranks
            layouts = parse_layouts(asked["layout"], ranks) if asked["layout"] else []
            engines = (asked["sync"] or "hybrid").split(",")
            for run in contestants(asked["recipe"], ranks, engines, [], asked["overrides"], layouts):
                check_axes(load_recipe(recipe_file(asked["recipe"]), run.engine, run.overrides), ranks)
        case ["bench", "sync"] if asked["sync"]:
            parse_engines(asked["sync"], asked["wire"], asked["overrides"])
        case ["eval" | "export"] if asked["recipe"]:
            recipe_file(asked["recipe"])
        case ["recipes", "show"]:
            recipe_file(asked["name"])


def recipe_file(name: str) -> Path:
    return find_recipe(OWN_RECIPE if name.endswith(".toml") else name)


def check_training(command: Command, written: Recipe) -> None:
    """Plan a training for the ranks it is for: those it names, or else those of its recipe."""
    asked = parsed(command.words).params
    counts = [int(count) for count in (asked["nodes"] or "1").split(":")]
    each = asked["nproc"] or written.ranks // counts[0]
    for nodes in range(counts[0], counts[-1] + 1):
        recipe = scale_recipe(written, nodes * each) if asked["scale_batch"] else written
        check_axes(recipe, nodes * each)
        batching = split_batch(recipe, nodes * each)
        check_norms(recipe, batching)
    if command.prints.startswith("recipe written for"):
        assert command.prints.splitlines()[0] == explain(written, recipe, batching), command


def test_the_navigation_has_no_page_twice():
    class Loader(yaml.SafeLoader):
        """mkdocs.yml has tags of Python's."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    pages = re.findall(r"'([\w/-]+\.md)'", str(navigation))
    assert len(pages) == len(set(pages))
