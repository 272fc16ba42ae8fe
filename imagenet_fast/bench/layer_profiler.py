"""Record a model's layer profile from real training steps on this node."""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from functools import partial
from statistics import median

import torch
from torch import nn

from imagenet_fast.cost_model.layer_profile import Layer, Profile
from imagenet_fast.models import build_model
from imagenet_fast.recipe.data_config import SyntheticData
from imagenet_fast.recipe.schema import Recipe
from imagenet_fast.training.precision import autocast, set_float32_math


def record_profile(recipe: Recipe, device: torch.device, steps: int) -> Profile:
    """Record median layer times over ``steps`` training steps on random images, after two warm-up steps.

    A layer's forward lasts from its start to the start of the next layer with parameters. Its backward lasts from when
    the layer above has its gradients until it has its own. These are the times that matter to an engine.

    Args:
        recipe: The recipe, with synthetic data.
        device: Where to train.
        steps: Number of recorded steps.
    """
    assert isinstance(recipe.data, SyntheticData)
    torch.manual_seed(0)
    set_float32_math(recipe.precision)
    model = build_model(recipe.model, recipe.data.classes).to(device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)
    images = torch.randn(recipe.global_batch, 3, recipe.data.image_size, recipe.data.image_size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(recipe.data.classes, (recipe.global_batch,), device=device)
    timeline = _Timeline(model, device)
    cast = autocast(recipe.precision, device)
    for step in range(-2, steps):
        model.zero_grad()
        timeline.begin()
        with cast:
            loss = nn.functional.cross_entropy(model(images), labels)
        timeline.turn()
        loss.backward()
        if step >= 0:
            timeline.keep()
    what = f"{recipe.precision.kind}, batch {recipe.global_batch}, {recipe.data.image_size} px"
    processor = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    where = f"{processor} ({platform.machine()}), torch {torch.__version__}"
    source = f"recorded by `imagenet-fast bench profile`: {what}, {where}"
    return Profile(recipe.model.kind, source, timeline.layers())


class _Timeline:
    """A recorder of when layers start their forward and when they have their gradients."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        }
        self._begun: dict[str, float] = {}
        self._ready: dict[str, float] = {}
        self._turned = 0.0
        self._forward: dict[str, list[float]] = defaultdict(list)
        self._backward: dict[str, list[float]] = defaultdict(list)
        for name, module in self._modules.items():
            module.register_forward_pre_hook(partial(self._note, self._begun, name))
            for param in module.parameters(recurse=False):
                param.register_post_accumulate_grad_hook(partial(self._note, self._ready, name))

    def begin(self) -> None:
        """Start a step."""
        self._begun.clear()
        self._ready.clear()
        self._start = self._now()

    def turn(self) -> None:
        """Mark the start of backward."""
        self._turned = self._now()

    def keep(self) -> None:
        """Keep the times of the step that has ended.

        Time before the first layer counts as that layer's forward.
        """
        order = sorted(self._begun, key=self._begun.__getitem__)
        begins = [self._start, *(self._begun[name] for name in order[1:])]
        for name, begin, end in zip(order, begins, [*begins[1:], self._turned], strict=True):
            self._forward[name].append(end - begin)
        before = self._turned
        for name in sorted(self._ready, key=self._ready.__getitem__):
            self._backward[name].append(self._ready[name] - before)
            before = self._ready[name]

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers with their median times, in the order of the model's modules."""
        return tuple(
            Layer(
                name,
                type(module).__name__,
                tuple(tuple(p.shape) for p in module.parameters(recurse=False)),
                round(1e3 * median(self._forward[name]), 4),
                round(1e3 * median(self._backward[name]), 4),
            )
            for name, module in self._modules.items()
        )

    def _note(self, moments: dict[str, float], name: str, *of_hook: object) -> None:
        moments[name] = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
