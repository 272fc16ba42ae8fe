"""The two roads that CONTRIBUTING.md draws: from a command to training, and from a gradient to a weight."""

from __future__ import annotations

import ast
import sys
import threading
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from imagenet_fast.sync import HybridSync, attach
from imagenet_fast.training.optimizers import LARS, param_groups
from tests.ranks import run

PACKAGE = Path(__file__).parents[1] / "imagenet_fast"


def roads() -> list[list[tuple[str, str]]]:
    """Both roads, as files with what is called in them."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Two roads") : text.index("## Inside `sync/`")]
    blocks = [block for block in section.split("\n\n") if block.startswith("    ")]
    return [[(line.split()[0], line.split()[1].rstrip(":")) for line in block.splitlines()] for block in blocks]


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


def defined(file: str) -> set[str]:
    """Functions, classes, and methods as Class.method."""
    names = set()
    for node in tree(file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def leads_to(earlier: str, file: str, name: str) -> bool:
    """Whether ``earlier`` imports ``name`` from ``file`` and calls it, or starts ``file`` as a program."""
    module = "imagenet_fast." + file.removesuffix(".py").replace("/", ".")
    first, _, method = name.partition(".")
    imported = called = False
    for node in ast.walk(tree(earlier)):
        match node:
            case ast.ImportFrom(module=source, names=names):
                imported |= any(name.name == first for name in names) and module.startswith(source or "-")
            case ast.Call(func=ast.Name(id=called_name)):
                called |= called_name == (method or first)
            case ast.Call(func=ast.Attribute(attr=called_name)):
                called |= called_name in (method or first, "command", "model_validate_json")  # as typer and pydantic do
            case ast.Constant(value=str(text)):
                if text == module.removesuffix(".__main__") != module:
                    return True
    return imported and (called or name == "plan_job")  # which is called by functools.partial


def test_a_command_becomes_training():
    command, _ = roads()
    assert len(command) <= 20
    assert len({file for file, _ in command}) == len(command), "no file twice"
    for number, (file, name) in enumerate(command):
        assert name in defined(file), f"{file} has no {name}"
        assert not number or any(leads_to(earlier, file, name) for earlier, _ in command[:number]), f"{file}: {name}"


def test_a_gradient_becomes_a_weight():
    _, gradient = roads()
    assert len(gradient) <= 9
    assert len({file for file, _ in gradient}) == len(gradient), "no file twice"
    for seen in run(2, _followed_gradient, gradient):
        assert seen == gradient


def _followed_gradient(road: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The drawn calls in the order in which the single message of two steps first makes them."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    forward, sync = attach(model, HybridSync(wire="bf16"))
    optimizer = LARS(param_groups(model), lr=0.1)
    known = {(str(PACKAGE / file), name): (file, name) for file, name in road}
    seen: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        here = (frame.f_code.co_filename, frame.f_code.co_qualname)
        if following and event == "call" and here in known:
            seen.setdefault(known[here])

    following = False
    threading.setprofile(note)  # the stream's thread starts with its first message
    for step in range(12):
        sync.zero_grad()
        loss = forward(torch.ones(1, 3, 4, 4)).sum()
        if step == 10:  # plans are made by now
            following = True
            sys.setprofile(note)
        loss.backward()
        sync.step(optimizer)
    sync.settle()
    sys.setprofile(None)
    threading.setprofile(None)
    sync.close()
    return list(seen)
