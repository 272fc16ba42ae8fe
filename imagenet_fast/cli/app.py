"""Groups and commands as all of the command line has them: help without types of flags, and options of before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from imagenet_fast.errors import warn

RENAMED: dict[str, dict[str, str]] = {
    "compare": {"--hosts": "--nproc"},
    "plan": {"--rows": "rows", "--validate": "validate"},
}
"""By command: options that have another name now. The old one is read with a warning until the next version."""


class Command(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args``, in which options may have their old names."""
        renamed = RENAMED.get(self.name or "", {})
        for place, word in enumerate(args):
            option, equals, value = word.partition("=")
            if (new := renamed.get(option)) is not None:
                warn(f"{option} is now {new}; the old name is read until the next version")
                args = [*args[:place], new + equals + value, *args[place + 1 :]]
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_types(super().get_params(ctx))


class App(typer.Typer):
    """A group of commands to which functions are added."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings of a ``typer.Typer``."""
        super().__init__(cls=Group, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Return the decorator that adds a function as a command."""
        return super().command(name, cls=Command, **settings)


def _without_types(params: list[Any]) -> list[Any]:
    """Let help show nothing where typer would write ``<bool>`` beside a flag, which takes no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
