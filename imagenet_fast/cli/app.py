"""Make commands of documented functions, and groups of commands."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from imagenet_fast.cli import options
from imagenet_fast.errors import UserError


class _PlainFlags:
    """Flags take no value, such as ``<bool>`` in help, and have no opposite, such as ``--no-trace``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of a command or a group
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar, param.secondary_opts = "", []
        return params


class Command(_PlainFlags, TyperCommand):
    """A command.

    What its parameters mean is said in docstrings: of its function, which ends with ``Args``, else of its module or of
    ``options.py``, which end with ``Options of several commands``.
    """

    def __init__(
        self, name: str | None, *, help: str | None, params: list[Any], callback: Callable[..., Any], **settings: Any
    ) -> None:
        """Take what typer makes of a function, and move the docstring's ``Args`` to the parameters."""
        text, own = _explained(help, "Args")
        modules = (options.__doc__, sys.modules[callback.__module__].__doc__)
        shared = [_explained(docstring, "Options of several commands")[1] for docstring in modules]
        meanings = shared[0] | shared[1] | own
        for param in params:
            param.help = meanings.get(param.name, param.help)
        super().__init__(name, help=text, params=params, callback=callback, **settings)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args``, in which ``--set`` may stand before KEY=VALUE."""
        if any(param.name == "keys" for param in self.params):  # a --set without one becomes an empty word
            followed = zip(args, [*args, "-"][1:], strict=True)
            words = [word for word, after in followed if word != "--set" or after.startswith("-")]
            args = ["" if word == "--set" else word.removeprefix("--set=") for word in words]
        return super().parse_args(ctx, args)


class Group(_PlainFlags, TyperGroup):
    """A group of commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that ``args`` begin with; it may have two words, as ``plan rows``."""
        for word in args[1:]:
            if word.startswith("--") and (name := f"{args[0]} {word[2:]}") in self.commands:
                raise UserError(f"`{args[0]} {word}` is now `{name}`; write that")
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)


class App(typer.Typer):
    """A group of commands to which functions are added."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings of a ``typer.Typer``."""
        super().__init__(cls=Group, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Return the decorator that adds a function as a command."""
        return super().command(name, cls=Command, **settings)


def _explained(docstring: str | None, title: str) -> tuple[str, dict[str, str]]:
    """Return a docstring without its last section, which has this title, and the meanings in that section by name."""
    text, _, section = (docstring or "").partition(f"\n\n{title}:\n")
    found = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", section, re.MULTILINE)
    return text, {name: " ".join(meaning.split()) for name, meaning in found}
