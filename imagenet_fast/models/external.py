"""Build networks that this program does not define: torchvision's, timm's, or those of a Python function."""

from __future__ import annotations

import copy
import importlib
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from imagenet_fast.errors import UserError, did_you_mean, first_line
from imagenet_fast.recipe.network import ExternalModel

_CORRECT = "correct model.name"


def build_external(model: ExternalModel, classes: int) -> nn.Module:
    """Build the network that ``model`` names, with fresh weights.

    Raises:
        UserError: There is no such network, its package is missing, or it does not take the recipe's options.
    """
    match model.kind:
        case "torchvision":
            build = _torchvision(model.name)
        case "timm":
            build = _timm(model.name)
        case "python":
            build = _function(model.name)
        case _:
            assert_never(model.kind)
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
    freezes = any(type(module).train is not nn.Module.train for module in network.modules())  # its norms, in train()
    if freezes or not any(module.training for module in network.modules()):  # from_pretrained may return it in eval()
        network.train()
    return network


def check_network(
    network: nn.Module, model: ExternalModel, classes: int, sizes: Iterable[int], eval_size: int, *,
    all_used: bool = False, images: int = 2, channels_last: bool = False,
) -> None:  # fmt: skip
    """Look at the parameters of ``network``, and run a copy of it on few images as in training and as in evaluation.

    Args:
        network: The network; it and torch's generators are left as they are.
        model: The recipe's model table, which names it.
        classes: Number of classes.
        sizes: Sides of training images in pixels.
        eval_size: Side of validation images in pixels.
        all_used: Whether every parameter must have a gradient, as torch's DDP wants it.
        images: Images of a training batch. In an evaluation one image may be left for the last batch.
        channels_last: Whether weights and images are in channels_last memory.

    Raises:
        UserError: It cannot be trained, cannot take such images, or does not give one logit a class.
    """

    def refused(reason: str) -> UserError:
        return UserError(f"model.name '{model.name}' {reason}")

    if reason := _untrainable(network):
        raise refused(reason)
    try:
        trial = copy.deepcopy(network)
    except Exception as error:  # of code that is not ours
        raise refused(
            f"cannot be copied ({first_line(error)}); let it keep no computed tensors, as torch.nn.utils.weight_norm "
            "does (torch.nn.utils.parametrizations has one that does not)"
        ) from None
    if channels_last:
        to_channels_last(trial)
    device = next(network.parameters()).device
    buffers = dict(network.named_buffers()).keys()
    runs = [*((True, images, size) for size in sizes), (False, 2, eval_size), (False, 1, eval_size)]
    for training, count, size in runs:
        trial.train(training)
        batch = torch.zeros(count, 3, size, size, device=device)
        try:
            with torch.set_grad_enabled(training), torch.random.fork_rng([device] if device.type == "cuda" else []):
                logits = trial(batch.contiguous(memory_format=torch.channels_last) if channels_last else batch)
        except Exception as error:  # of code that is not ours
            what = "images" if count > 1 else "a single image"
            way_out = _way_out(error, training, count)
            raise refused(f"cannot take {what} of {size} pixels ({first_line(error)}); {way_out}") from None
        if new := dict(trial.named_buffers()).keys() - buffers:
            raise refused(
                f"makes the buffer {min(new)} when it is called, and a resumed run needs it before; register it when "
                "the network is built"
            )
        if not isinstance(logits, Tensor):
            raise refused(
                f"returns a {type(logits).__name__} for images; it must return a tensor of logits, so choose options "
                "for that, or wrap it in a function of your own (model.kind 'python')"
            )
        if logits.shape != (count, classes):
            raise refused(
                f"gives an output of shape {list(logits.shape)} for {count} image{'s' * (count > 1)}, and the data has "
                f"{classes} classes; it must give one logit a class"
            )
        if training and not logits.requires_grad:
            raise refused("gives logits without a gradient; take no detach or torch.no_grad in forward")
        if training and all_used and (unused := _unused(trial, logits)):
            raise refused(
                f"does not use {unused}, and torch's DDP waits for the gradients of all parameters; take another "
                "engine than sync.kind 'ddp', or a network without it"
            )


def to_channels_last(network: nn.Module) -> None:
    """Store all weights and buffers of four dimensions in channels_last memory."""
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.dim() == 4:  # Module.to would refuse five; contiguous() keeps strides of one pixel, and DDP warns
            tensor.data = torch.empty_like(tensor.data, memory_format=torch.channels_last).copy_(tensor.data)


def _way_out(error: Exception, training: bool, count: int) -> str:
    """Return what to do where a network cannot take a batch of images."""
    if "view size is not compatible" in str(error):
        return "write reshape or flatten instead of view in the network, or set channels_last to false"
    if count == 1:
        return (
            "choose a larger micro_batch" if training else "an evaluation's last batch may have one; see to the network"
        )
    return "choose others by data.image_size, data.sizes and data.eval_size, or see to model.options or to the network"


def _unused(network: nn.Module, logits: Tensor) -> str:
    """Return the name of a parameter that gets no gradient from ``logits``; empty if there is none, or no backward."""
    network.zero_grad()
    with suppress(Exception):  # of code that is not ours; training meets it, too
        logits.sum().backward()
        return next((n for n, p in network.named_parameters() if p.requires_grad and p.grad is None), "")
    return ""


def _untrainable(network: nn.Module) -> str:
    """Return the end of an error message if the parameters cannot be trained, else an empty string."""
    if isinstance(network, torch.jit.ScriptModule):
        return "is a script of torch.jit, which takes no hooks; let it return the torch.nn.Module itself"
    if isinstance(network, nn.DataParallel | DistributedDataParallel):
        return f"is wrapped in {type(network).__name__}; let it return the network itself, which every rank trains"
    for name, tensor in chain(network.named_parameters(), network.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            return f"has no shape for {name}; call it on an image before it is returned, or use no lazy layer"
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    if not trained:
        return "has no parameter that is trained; let at least one require gradients"
    (usual, _), *_ = Counter(parameter.dtype for parameter in trained.values()).most_common()
    for name, parameter in trained.items():
        if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
            return f"has {name} as a part of a larger tensor, or with gaps; make it an nn.Parameter of a clone"
        if parameter.dtype != usual:
            return f"has {name} of {parameter.dtype} beside others of {usual}; convert it, as by .to({usual})"
    for name, value in network.state_dict().items():
        if not isinstance(value, Tensor):
            return f"keeps {name} as a {type(value).__name__}, and only tensors are saved; make it a buffer"
    return ""


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
