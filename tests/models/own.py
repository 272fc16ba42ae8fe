"""Networks as a user writes them, for recipes of ``model.kind`` "python"."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn


class Own(nn.Module):
    """Norms, dropout, a weight that no layer owns, and one that a function reads."""

    def __init__(self, classes: int, width: int, dropout: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, 1, 1))
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = (self.stem(images) * self.scale).mean((2, 3))
        return nn.functional.linear(self.dropout(features), self.head.weight, self.head.bias)


def build(classes: int, width: int = 8, dropout: float = 0.0) -> nn.Module:
    return Own(classes, width, dropout)


def of_seven_classes(classes: int) -> nn.Module:
    return Own(7, 8, 0.0)


def no_module(classes: int) -> list[int]:
    return [classes]


class Counting(nn.Module):
    """Computes with values while it is made, which tensors without memory do not have."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.width = int(torch.linspace(4, 8, 3)[-1].item())
        self.head = nn.Linear(self.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1)[:, : self.width])


def tied(classes: int) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, classes))
    model[3].weight = model[2].weight
    return model


class LeNet(nn.Module):
    """As tutorials write it: feature maps are flattened by ``view``."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 5, 2), nn.ReLU(), nn.Conv2d(4, 8, 5, 2))
        self.head = nn.Linear(8 * 5 * 5, classes)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.features(images)
        logits: Tensor = self.head(maps.view(maps.size(0), -1))
        return logits


class Residual(nn.Sequential):
    """Layers with a shortcut around them: not layers in turn, though its class is a Sequential's."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def wrapped(classes: int, by: str) -> nn.Module:
    """A network as the only child of another, as ``torch.compile`` and modules of one's own have it."""
    model = nn.Sequential()
    model.add_module(by, build(classes))
    return model


MORE: dict[str, Callable[[], nn.Module | nn.Parameter | nn.Buffer]] = {
    "lazy": lambda: nn.LazyLinear(3),
    "complex": lambda: nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
    "double": lambda: nn.Parameter(torch.ones((), dtype=torch.float64)),
    "unused": lambda: nn.Parameter(torch.ones(2)),
    "part": lambda: nn.Parameter(torch.zeros(4, 4)[:, :2]),
    "index": lambda: nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False),
    "small integers": lambda: nn.Buffer(torch.ones(4, dtype=torch.int16)),
    "five dimensions": lambda: nn.Parameter(torch.ones(2, 2, 3, 3, 3)),
    "mask": lambda: nn.Buffer(torch.full((3, 3), -math.inf).triu(1)),
    "kept": lambda: torch.nn.utils.weight_norm(nn.Linear(2, 2)),
}


class Flat(nn.Module):
    """One linear layer, and what spoils it."""

    def __init__(self, classes: int, flaw: str) -> None:
        super().__init__()
        self.flaw = flaw
        self.head = nn.Linear(3 * 32 * 32, classes)
        if flaw in MORE:
            self.more = MORE[flaw]()
        match flaw:
            case "frozen":
                self.requires_grad_(False)
            case "drawn":
                with torch.no_grad():
                    self.head.bias.fill_(random.random() + float(np.random.random()))
            case "norm of one":
                self.norm = nn.BatchNorm1d(classes)
            case "mistyped":
                len(3)  # type: ignore[arg-type]
            case "raises":
                raise RuntimeError("no luck\ntoday")

    def get_extra_state(self) -> object:
        return {"calls": 1} if self.flaw == "extra" else torch.zeros(1)

    def set_extra_state(self, state: object) -> None: ...

    def forward(self, images: Tensor) -> Tensor:
        if self.flaw == "untraceable" and images.sum().item() > 0:
            images = images * 2
        if self.flaw == "late":
            self.register_buffer("grid", torch.zeros(4))
        logits: Tensor = self.head(images.flatten(1))
        match self.flaw:
            case "squeezed":
                return logits.squeeze()
            case "norm of one":
                return self.norm(logits)
            case "detached":
                return logits.detach()
            case "pair":
                return logits, logits
        return logits


def flawed(classes: int, flaw: str) -> nn.Module:
    return nn.DataParallel(build(classes)) if flaw == "parallel" else Flat(classes, flaw)


def from_elsewhere(classes: int) -> nn.Module:
    """As Hugging Face's ``from_pretrained`` returns it."""
    return Own(classes, 8, 0.5).eval()


class Freezing(Own):
    """It keeps its norm frozen, also by a ``train`` of its own, as detection networks do."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, 8, 0.5)
        self.train()

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        self.stem[1].eval()
        return self


def frozen(classes: int) -> nn.Module:
    network = Own(classes, 8, 0.5)
    network.stem[1].eval()
    return network


WIDTHS = [8]
"""Of the layers of ``edited``, which a test edits as a user would its file."""
FROZEN = False


def edited(classes: int) -> nn.Module:
    layers = [nn.Linear(3 * 32 * 32, WIDTHS[0]), *(nn.Linear(a, b) for a, b in pairwise(WIDTHS))]
    layers[0].requires_grad_(not FROZEN)
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(WIDTHS[-1], classes))


def six_pieces(classes: int) -> nn.Module:
    """For stages of a pipeline, with batch norms."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8),
        nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, classes),
    )  # fmt: skip
