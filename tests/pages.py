"""What the pages show: commands, the output below them, Python.

A command stands in a block of its own, indented or fenced as ``bash``. A block fenced as ``text`` that follows is what
the last command prints, shortened by lines of ``...``; one fenced as ``output`` is printed at other times. Python is
fenced as ``python``.

`tests/e2e/test_pages.py` runs every `imagenet-fast`, unless a comment above its block says ``<!-- run: HOW -->``. HOW
is ``here``, ``weekly`` (ranks have to start) or ``not here``, and options to add, which make it small; there is one for
all commands in the block, or one for each with ``;`` between them.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRITTEN_BY_SCRIPTS = {"commands.md", "recipe.md", "bench-rows.md"}
ALL_PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PAGES = [
    page
    for page in ALL_PAGES
    if page.parent.name != "notes" and page.name not in WRITTEN_BY_SCRIPTS and page.name != "CHANGELOG.md"
]
PROGRAMS = re.compile(r"(imagenet-fast|scripts/\S+|\.ci/\w+|torchrun|python3?|git|tensorboard)( |$)")
"""What a line of an indented block begins with if it is a command."""


@dataclass(frozen=True)
class Block:
    """A block of code: its first line, the language after its fence or ``indented``, and the mark above it."""

    line: int
    language: str
    text: str
    mark: str


@dataclass(frozen=True)
class Command:
    """A line for the shell without its comment, how it is run, and what the page shows that it prints."""

    place: str
    text: str
    how: str = "not here"
    options: tuple[str, ...] = ()
    prints: str = ""

    @property
    def words(self) -> list[str]:
        """The arguments of `imagenet-fast`, without what the shell reads; empty for another program."""
        words = shlex.split(re.sub(r" > \S+$", "", self.text))
        return words[words.index("imagenet-fast") + 1 :] if "imagenet-fast" in words else []


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of code on a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    mark, number = "", 0
    while number < len(lines):
        begun, above = number, mark
        mark = ""
        if fence := re.fullmatch(r"( *)```(\w*).*", lines[number]):
            number = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            yield Block(begun + 1, fence[2], textwrap.dedent("\n".join(lines[begun + 1 : number])), above)
        elif found := re.fullmatch(r" *<!-- run: (.*) -->", lines[number]):
            mark = found[1]
        elif lines[number].startswith("    ") and (above or not lines[begun - 1].strip()):
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or not lines[number + 1].strip()):
                number += 1
            yield Block(begun + 1, "indented", textwrap.dedent("\n".join(lines[begun : number + 1])), above)
        elif lines[number].strip():
            assert not above, f"{name_of(page)}:{number}: no block follows"
        else:
            mark = above
        number += 1


def shown_commands(page: Path) -> list[Command]:
    """The commands on a page, in order, each with its output where the page shows it."""
    found: list[Command] = []
    for block in blocks(page):
        if block.language == "text" and found:
            found[-1] = replace(found[-1], prints=block.text)
        elif block.language in ("bash", "indented"):
            lines = (re.sub(r"(^| +)#.*", "", line) for line in re.sub(r"\\\n *", "", block.text).splitlines())
            texts = [line for line in lines if PROGRAMS.match(line) or (line and block.language == "bash")]
            found += marked([Command(f"{name_of(page)}:{block.line}", text) for text in texts], block.mark)
    return found


def marked(commands: list[Command], mark: str) -> Iterator[Command]:
    """The commands of a block with what its mark says of those that are ours."""
    ours = [command for command in commands if command.words]
    marks = re.split(r"; *", mark or "here")
    assert len(marks) in (1, len(ours)), f"{ours[:1]}: one mark for all commands, or one for each"
    each = iter(marks * len(ours) if len(marks) == 1 else marks)
    for command in commands:
        if command.words:
            how = re.fullmatch(r"(here|weekly|not here)( .*)?", next(each))
            assert how, f"{command.place}: {mark}"
            command = replace(command, how=how[1], options=tuple(shlex.split(how[2] or "")))
        yield command


def mentioned(page: Path) -> list[Command]:
    """The commands that a page's sentences name in part, as `imagenet-fast recipes`."""
    return [Command(name_of(page), f"{text} ...") for text in re.findall(r"`(imagenet-fast [^`]+)`", prose(page))]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
