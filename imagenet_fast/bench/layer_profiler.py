"""Record a model's layer profile from real training steps on this node."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import linear_regression

import torch
from torch import Tensor, nn

from imagenet_fast.cost_model.layer_profile import Layer, Profile, Timing
from imagenet_fast.errors import UserError
from imagenet_fast.models import build_model
from imagenet_fast.progress import measurement_bar
from imagenet_fast.recipe.data_config import SyntheticData
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.sync.layer_timer import LayerTimer
from imagenet_fast.sync.param_slot import ParamSlot, slots_of
from imagenet_fast.sync.topology import Topology
from imagenet_fast.training.precision import autocast, set_float32_math


def record_profile(recipe: Recipe, device: torch.device, steps: int) -> Profile:
    """Record median layer times over ``steps`` training steps on random images, after three warm-up steps.

    A layer's forward lasts from its start to the start of the next layer with parameters. Its backward lasts from when
    the layer above has its gradients until it has its own. These are the times that matter to an engine.

    Args:
        recipe: The recipe, with synthetic data.
        device: Where to train.
        steps: Number of recorded steps.
    """
    model, images, labels = model_and_batch(recipe, device)
    cast = autocast(recipe.precision, device)

    def step() -> None:
        model.zero_grad()
        with cast:
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()

    slots = {slot.param: slot for slot in slots_of(dict(model.named_parameters()), model) if slot.param.requires_grad}
    order: list[ParamSlot] = []  # in which backward reaches them
    hooks = [p.register_post_accumulate_grad_hook(lambda param: order.append(slots[param])) for p in slots]
    step()
    for hook in hooks:
        hook.remove()
    timer = LayerTimer(model, order, Topology(device), steps)
    for param in slots:
        param.register_post_accumulate_grad_hook(lambda _: timer.gradient_ready())
    with measurement_bar() as show:
        for done in range(steps + 2):  # two warm up
            show("recording steps", done, steps + 2)
            step()
            timer.finish()
    what = f"{recipe.precision.kind}, batch {recipe.global_batch}, {recipe.data.image_size} px"
    processor = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    where = f"{what}, {processor} ({platform.machine()}), torch {torch.__version__}"
    source = f"recorded by `imagenet-fast bench profile`: {where}"
    layers = _layers(model, order, timer.timing())
    memory_gb = torch.cuda.get_device_properties(device).total_memory / 1e9 if device.type == "cuda" else None
    return Profile(recipe.model.kind, source, layers, recipe.data.image_size, recipe.global_batch, memory_gb=memory_gb)


def of_batches(recorded: Mapping[int, Profile]) -> Profile:
    """Return that of the largest batch, with the share of its step that does not grow; UserError if that is all."""
    largest = recorded[max(recorded)]
    if len(recorded) == 1:
        return largest
    line = linear_regression([*recorded], [profile.compute_s for profile in recorded.values()])
    if line.slope <= 0:
        raise UserError(f"--batch {max(recorded)} takes no longer than fewer images; take more, or more --steps")
    return replace(largest, fixed=max(0.0, line.intercept / largest.compute_s))


def model_and_batch(recipe: Recipe, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model of a recipe with synthetic data, and random images and labels; the same each time."""
    assert isinstance(recipe.data, SyntheticData)
    torch.manual_seed(0)
    set_float32_math(recipe.precision)
    model = build_model(recipe.model, recipe.data.classes).to(device).to(memory_format=torch.channels_last)
    images = torch.randn(recipe.global_batch, 3, recipe.data.image_size, recipe.data.image_size, device=device)
    labels = torch.randint(recipe.data.classes, (recipe.global_batch,), device=device)
    return model, images.contiguous(memory_format=torch.channels_last), labels


def _layers(model: nn.Module, slots: list[ParamSlot], timing: Timing) -> tuple[Layer, ...]:
    """Return the layers with their times, in the order of the model's modules.

    Time before the first layer counts as that layer's forward.
    """
    begun = {slot.layer: needed for slot, needed in zip(slots, timing.needed, strict=True)}
    ready = {slot.layer: ready for slot, ready in zip(slots, timing.ready, strict=True)}  # its last parameter's
    called, graded = sorted(begun, key=begun.__getitem__), sorted(ready, key=ready.__getitem__)
    begins = [0.0, *(begun[name] for name in called[1:]), timing.forward_s]
    forward_s = {name: end - begin for name, (begin, end) in zip(called, pairwise(begins), strict=True)}
    ends = [0.0, *(ready[name] for name in graded)]
    backward_s = {name: end - begin for name, (begin, end) in zip(graded, pairwise(ends), strict=True)}
    return tuple(
        Layer(
            name, type(module).__name__, tuple(tuple(p.shape) for p in module.parameters(recurse=False)),
            round(1e3 * forward_s[name], 4), round(1e3 * backward_s[name], 4),
        )
        for name, module in model.named_modules() if name in begun
    )  # fmt: skip
