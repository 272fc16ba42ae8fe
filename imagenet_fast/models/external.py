"""Build networks that this program does not define: torchvision's, timm's, or those of a Python function."""

from __future__ import annotations

import copy
import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from imagenet_fast.errors import UserError
from imagenet_fast.recipe.network import ExternalModel, PythonModel, TimmModel, TorchvisionModel

_WITHOUT_AUXILIARIES = {"aux_logits": False, "init_weights": True}
_OPTIONS = {"googlenet": _WITHOUT_AUXILIARIES, "inception_v3": _WITHOUT_AUXILIARIES}
"""Options of torchvision's models that otherwise give several outputs in training."""


def build_external(model: ExternalModel, classes: int) -> nn.Module:
    """Build the network that ``model`` names, with fresh weights.

    Args:
        model: The recipe's model table.
        classes: Number of classes.

    Raises:
        UserError: There is no such network, its package is missing, or it does not take the recipe's options.
    """
    match model:
        case TorchvisionModel():
            network = _built(model, _torchvision(model.name), num_classes=classes)
        case TimmModel():
            network = _built(model, _timm(model.name), num_classes=classes)
        case PythonModel():
            network = _built(model, _function(model.name), classes)
        case _:
            assert_never(model)
    if not isinstance(network, nn.Module):
        raise UserError(
            f"model.name '{model.name}' returned a {type(network).__name__}; let it return a torch.nn.Module"
        )
    return network


def check_outputs(network: nn.Module, model: ExternalModel, classes: int, image_size: int, eval_size: int) -> None:
    """Run a copy of ``network`` on two images as in training and as in evaluation.

    Args:
        network: The network, on the CPU; it and torch's generator are left as they are.
        model: The recipe's model table.
        classes: Number of classes.
        image_size: Side of training images in pixels.
        eval_size: Side of validation images in pixels.

    Raises:
        UserError: It cannot take such images, or does not give one logit a class.
    """
    trial = copy.deepcopy(network)
    for training, size in ((True, image_size), (False, eval_size)):
        trial.train(training)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                logits = trial(torch.zeros(2, 3, size, size))
        except Exception as error:  # of code that is not ours
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(
                f"model.name '{model.name}' cannot take images of {size} pixels ({reason}); choose others by "
                "data.image_size and data.eval_size, or see to model.options"
            ) from None
        if not isinstance(logits, Tensor):
            raise UserError(
                f"model.name '{model.name}' returns a {type(logits).__name__} for images; it must return a tensor of "
                "logits, so choose options for that, or wrap it in a function of your own (model.kind 'python')"
            )
        if logits.shape != (2, classes):
            raise UserError(
                f"model.name '{model.name}' gives an output of shape {list(logits.shape)} for 2 images, and the data "
                f"has {classes} classes; it must give one logit a class"
            )


def _built(model: ExternalModel, builder: Callable[..., Any], *classes: int, **named_classes: int) -> Any:
    """Call ``builder`` with the number of classes and the recipe's options."""
    try:
        return builder(*classes, **named_classes, **model.options)
    except TypeError as error:
        given = f"model.options {model.options}" if model.options else "the number of classes"
        raise UserError(f"model.name '{model.name}' does not take {given} ({error}); correct it") from None


def _torchvision(name: str) -> Callable[..., Any]:
    from torchvision import models  # loads torch's compiler: a second or two

    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"torchvision has no classifier '{name}'; {_nearest(name, known)}")
    return lambda **options: models.get_model(name, weights=None, **(_OPTIONS.get(name, {}) | options))


def _timm(name: str) -> Callable[..., Any]:
    try:
        import timm
    except ImportError:
        raise UserError(
            "model.kind 'timm' needs the package timm, which is not installed; pip install 'imagenet-fast[timm]'"
        ) from None
    if not timm.is_model(name):
        raise UserError(f"timm has no model '{name}'; {_nearest(name, timm.list_models())}")
    return lambda **options: timm.create_model(name, pretrained=False, **options)


def _function(name: str) -> Callable[..., Any]:
    """Return the function ``package.module:function``; modules are found as from the current directory."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"model.name '{name}' names no function; write it as package.module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"model.name '{name}': {module_name} cannot be imported ({error}); install it, or run the command where it "
            "lies"
        ) from None
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"model.name '{name}': {module_name} has no function {attribute}; correct it")
    found: Callable[..., Any] = function
    return found


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: names like ``name``."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else "correct model.name"
