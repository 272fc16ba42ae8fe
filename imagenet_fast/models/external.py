"""Build networks that this program does not define: torchvision's, timm's, or those of a Python function."""

from __future__ import annotations

import copy
import importlib
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from imagenet_fast.errors import UserError, did_you_mean, first_line
from imagenet_fast.recipe.network import ExternalModel, PythonModel, TimmModel, TorchvisionModel

_CORRECT = "correct model.name"


def build_external(model: ExternalModel, classes: int) -> nn.Module:
    """Build the network that ``model`` names, with fresh weights.

    Raises:
        UserError: There is no such network, its package is missing, or it does not take the recipe's options.
    """
    match model:
        case TorchvisionModel():
            build = _torchvision(model.name)
        case TimmModel():
            build = _timm(model.name)
        case PythonModel():
            build = _function(model.name)
        case _:
            assert_never(model)
    try:
        network = build(classes, **model.options)
    except (Exception, SystemExit) as error:  # of code that is not ours
        options = f" with {model.options}" if model.options else ""
        raise UserError(
            f"model.name '{model.name}' cannot be built{options}: {_where(error)}; correct it, or model.options"
        ) from None
    if not isinstance(network, nn.Module):
        raise UserError(
            f"model.name '{model.name}' returned a {type(network).__name__}; let it return a torch.nn.Module"
        )
    modules = list(network.modules())
    frozen = any(type(module).train is not nn.Module.train for module in modules)  # some freeze their norms in train()
    if frozen or not any(module.training for module in modules):  # from_pretrained may return them in evaluation mode
        network.train()
    return network


def check_network(
    network: nn.Module, model: ExternalModel, classes: int, sizes: Iterable[int], eval_size: int, images: int = 2,
    channels_last: bool = False,
) -> None:  # fmt: skip
    """Run a copy of ``network`` on few images as in training and as in evaluation.

    What cannot be trained is refused by the engine, or by torch.

    Args:
        network: The network; it and torch's generators are left as they are.
        model: The recipe's model table, which names it.
        classes: Number of classes.
        sizes: Sides of training images in pixels.
        eval_size: Side of validation images in pixels.
        images: Images of a training batch. In an evaluation one image may be left for the last batch.
        channels_last: Whether weights and images are in channels_last memory.

    Raises:
        UserError: It cannot be copied, cannot take such images, or does not give one logit a class.
    """
    device, about = next(network.parameters()).device, f"model.name '{model.name}'"
    runs = [*((True, images, size) for size in sizes), (False, 2, eval_size), (False, 1, eval_size)]
    for training, count, size in runs:
        batch = torch.zeros(count, 3, size, size, device=device)
        what = f"{count} image{'s' * (count > 1)} of {size} pixels"
        try:
            trial = copy.deepcopy(network)
            trial.train(training)
            if channels_last:
                to_channels_last(trial)
                batch = batch.contiguous(memory_format=torch.channels_last)
            with torch.set_grad_enabled(training), torch.random.fork_rng([device] if device.type == "cuda" else []):
                logits = trial(batch)
        except Exception as error:  # of code that is not ours
            raise UserError(f"{about} cannot take {what} ({first_line(error)}); {_way_out(error, count)}") from None
        found = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else f"type {type(logits).__name__}"
        if found != f"shape {[count, classes]}":
            raise UserError(
                f"{about} gives an output of {found} for {what}, and the data has {classes} classes; it must give a "
                "tensor with one logit a class, so choose model.options for that, or wrap it in a function of your own "
                "(model.kind 'python')"
            )


def to_channels_last(network: nn.Module) -> None:
    """Store all weights and buffers of four dimensions in channels_last memory."""
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.dim() == 4:  # Module.to would refuse weights of five dimensions
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def _way_out(error: Exception, count: int) -> str:
    """Return what to do where a network cannot take a batch of ``count`` images."""
    if "view size is not compatible" in str(error):
        return "write reshape or flatten instead of view in the network, or set channels_last to false"
    if count == 1:
        return "choose a larger micro_batch, or see to the network: an evaluation's last batch may have one image"
    return "choose others by data.image_size, data.sizes and data.eval_size, or see to model.options or to the network"


def _where(error: BaseException) -> str:
    """Return an error's type, place and first line."""
    if isinstance(error, SyntaxError):
        file, line, text = error.filename, error.lineno, error.msg
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        file, line, text = last.filename, last.lineno, first_line(error) if str(error) else ""
    return f"{type(error).__name__} in {file}, line {line}" + (f" ({text})" if text else "")


def _torchvision(name: str) -> Callable[..., Any]:
    from torchvision import models  # loads torch's compiler: a second or two

    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"torchvision has no classifier '{name}'; {did_you_mean(name, known, _CORRECT)}")
    return lambda classes, **options: models.get_model(name, weights=None, num_classes=classes, **options)


def _timm(name: str) -> Callable[..., Any]:
    try:
        import timm
    except ImportError:
        raise UserError(
            "model.kind 'timm' needs the package timm, which is not installed; `pip install timm`"
        ) from None
    if not timm.is_model(name):
        raise UserError(f"timm has no model '{name}'; {did_you_mean(name, timm.list_models(), _CORRECT)}")
    return lambda classes, **options: timm.create_model(name, pretrained=False, num_classes=classes, **options)


def _function(name: str) -> Callable[..., Any]:
    """Return the function ``package.module:function``; modules are found as from the current directory."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"model.name '{name}' names no function; write it as package.module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    cannot = f"model.name '{name}': {module_name} cannot be imported"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{cannot} ({error}); install it, or run the command where it lies") from None
    except (Exception, SystemExit) as error:  # of code that is not ours
        raise UserError(f"{cannot}: {_where(error)}; correct it") from None
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"model.name '{name}': {module_name} has no function {attribute}; correct it")
    return function
