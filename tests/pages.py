"""What the pages show: commands, the output below them, Python.

A page shows a command in a block of its own, indented or fenced as ``bash``. A block fenced as ``text`` that follows is
what the last command prints, shortened by lines of ``...``; one fenced as ``output`` is printed at other times.
Python is fenced as ``python``.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
WRITTEN_BY_SCRIPTS = {"commands.md", "recipe.md", "bench-rows.md"}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(
        page
        for page in sorted(ROOT.glob("docs/**/*.md"))
        if page.relative_to(ROOT).parts[1] != "notes" and page.name not in WRITTEN_BY_SCRIPTS
    ),
]
PROGRAMS = re.compile(
    r"(imagenet-fast|scripts/\S+|\.ci/run|srun|sbatch|torchrun|python3?|pip|git|cd|source|tensorboard|docker|kubectl)"
    r"( |$)"
)


def import_script(name: str) -> ModuleType:
    """Import ``scripts/NAME.py``, which writes a page."""
    folder = str(ROOT / "scripts")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


@dataclass(frozen=True)
class Block:
    """A block of code: the language after its fence, or ``indented``."""

    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A line for the shell, without its comment, and what the page shows that it prints."""

    place: str
    text: str
    prints: str = ""

    @property
    def words(self) -> list[str]:
        """The arguments of `imagenet-fast`, without what the shell reads; empty for another program. N is a number."""
        words = ["2" if word == "N" else word for word in shlex.split(re.sub(r" > \S+$", "", self.text))]
        return words[words.index("imagenet-fast") + 1 :] if "imagenet-fast" in words else []


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of code on a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        begun = number
        if fence := re.fullmatch(r"( *)```(\w*).*", lines[number]):
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            yield Block(begun + 1, fence[2], textwrap.dedent("\n".join(lines[number + 1 : end])))
            number = end
        elif lines[number].startswith("    ") and not (begun and lines[begun - 1].strip()):
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or not lines[number + 1].strip()):
                number += 1
            yield Block(begun + 1, "indented", textwrap.dedent("\n".join(lines[begun : number + 1])))
        number += 1


def shown_commands(page: Path) -> list[Command]:
    """The commands on a page, in order, each with its output where the page shows it."""
    found: list[Command] = []
    for block in blocks(page):
        if block.language == "text" and found:
            last = found.pop()
            found.append(Command(last.place, last.text, block.text))
        elif block.language in ("bash", "indented"):
            for line in re.sub(r"\\\n *", "", block.text).splitlines():
                text = re.sub(r"(^| +)#.*", "", line)
                if PROGRAMS.match(text) or (text and block.language == "bash"):
                    found.append(Command(f"{name_of(page)}:{block.line}", text))
    return found


def mentioned(page: Path) -> list[str]:
    """The commands that a page's sentences name, as `imagenet-fast recipes`."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"`imagenet-fast ([^`]+)`", text)


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]
