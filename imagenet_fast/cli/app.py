"""Make commands and groups of commands: help without types of flags, and old names of options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from imagenet_fast.errors import UserError, warn

_LAB = {"--hosts": "--nodes", "--ranks-per-host": "--nproc"}
RENAMED: dict[str, dict[str, str]] = {
    "compare": {"--hosts": "--nproc"}, "sync": _LAB, "collectives": _LAB, "ladder": _LAB, "batches": _LAB,
    "count": {"--ranks-per-node": "--nproc"},
    "plan": {"--rows": "rows", "--validate": "validate"},
}  # fmt: skip
"""Renamed options by command: old and new name. Until the next version the old one works, with a warning."""
MODES: dict[str, dict[str, str]] = {
    "sync": {"--count": "count", "--ladder": "published ladder", "--batches": "published batches --batches"}
}
"""Options that have become commands, by command: option and new command. They work likewise."""
DROPPED: dict[str, dict[str, str]] = {
    "step": {
        "--checkpoint-every": "bench step times no checkpoints any more; train with and without "
        "checkpoint.every_steps, and `imagenet-fast report` shows s/step of both"
    }
}
"""Options that are gone, by command, and what is said to them."""


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
            if (told := DROPPED.get(self.name or "", {}).get(option)) is not None:
                raise UserError(told)
            if (new := renamed.get(option)) is not None:
                warn(f"{option} is now {new}; the old name is read until the next version")
                args = [*args[:place], new + equals + value, *args[place + 1 :]]
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """A group of commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that ``args`` begin with; an option that was a mode of it may stand for another."""
        for place, word in enumerate(args):
            option = word.partition("=")[0]
            if (new := MODES.get(args[0], {}).get(option)) is not None:
                command, again, _ = new.partition(" --")
                old = f"{ctx.info_name} {args[0]} {option}"
                warn(f"{old} is now {ctx.info_name} {command}; the old form is read until the next version")
                args = [*command.split(), *args[1:place], *([word] if again else []), *args[place + 1 :]]
                break
        return super().resolve_command(ctx, args)

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
