"""Networks as a user writes them, for recipes of ``model.kind`` "python"."""

from __future__ import annotations

import math
import random
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


def pair(classes: int) -> nn.Module:
    class Pair(Own):
        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            logits = super().forward(images)
            return logits, logits

    return Pair(classes, 8, 0.0)


class Counting(nn.Module):
    """Computes with values while it is made, which tensors without memory do not have."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.width = int(torch.linspace(4, 8, 3)[-1].item())
        self.head = nn.Linear(self.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1)[:, : self.width])


def tied(classes: int) -> nn.Module:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, classes)
    )
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


def lenet(classes: int) -> nn.Module:
    return LeNet(classes)


class Residual(nn.Sequential):
    """Layers with a shortcut around them: not layers in turn, though its class is a Sequential's."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def wrapped(classes: int, by: str) -> nn.Module:
    """A network as the only child of another, as ``torch.compile`` and modules of one's own have it."""
    model = nn.Sequential()
    model.add_module(by, build(classes))
    return model


class Flat(nn.Module):
    """One linear layer, and what spoils it."""

    def __init__(self, classes: int, flaw: str) -> None:
        super().__init__()
        self.flaw = flaw
        self.head = nn.Linear(3 * 32 * 32, classes)
        match flaw:
            case "lazy":
                self.more = nn.LazyLinear(classes)
            case "complex":
                self.more = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
            case "double":
                self.more = nn.Parameter(torch.ones((), dtype=torch.float64))
            case "unused":
                self.more = nn.Parameter(torch.ones(2))
            case "part":
                self.more = nn.Parameter(torch.zeros(4, 4)[:, :2])
            case "frozen":
                self.requires_grad_(False)
            case "sparse":
                self.more = nn.Embedding(4, 4, sparse=True)
            case "index":
                self.more = nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False)
            case "small integers":
                self.register_buffer("more", torch.ones(4, dtype=torch.int16))
            case "five dimensions":
                self.more = nn.Parameter(torch.ones(2, 2, 3, 3, 3))
            case "mask":
                self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
            case "lazy norm":
                self.more = nn.LazyBatchNorm1d(affine=False)
            case "drawn":
                with torch.no_grad():
                    self.head.bias.fill_(random.random() + float(np.random.random()))
            case "norm of one":
                self.norm = nn.BatchNorm1d(classes)
            case "kept":
                self.more = torch.nn.utils.weight_norm(nn.Linear(2, 2))
            case "mistyped":
                len(3)  # type: ignore[arg-type]
            case "exits":
                raise SystemExit(2)
            case "raises":
                raise RuntimeError("no luck\ntoday")

    def get_extra_state(self) -> object:
        return {"calls": 1} if self.flaw == "extra" else torch.zeros(1)

    def set_extra_state(self, state: object) -> None:
        pass

    def forward(self, images: Tensor) -> Tensor:
        if self.flaw == "untraceable" and images.sum().item() > 0:
            images = images * 2
        if self.flaw == "late":
            self.register_buffer("grid", torch.zeros(4))
        logits: Tensor = self.head(images.flatten(1))
        if self.flaw == "squeezed":
            return logits.squeeze()
        if self.flaw == "norm of one":
            return self.norm(logits)
        return logits.detach() if self.flaw == "detached" else logits


def flawed(classes: int, flaw: str) -> nn.Module:
    return nn.DataParallel(build(classes)) if flaw == "parallel" else Flat(classes, flaw)


def from_elsewhere(classes: int) -> nn.Module:
    """As Hugging Face's ``from_pretrained`` returns it."""
    return Own(classes, 8, 0.5).eval()


def frozen(classes: int) -> nn.Module:
    network = Own(classes, 8, 0.5)
    network.stem[1].eval()
    return network


class _Freezing(nn.Sequential):
    """It keeps its norm frozen by a ``train`` of its own, as detection networks do."""

    def train(self, mode: bool = True) -> _Freezing:
        super().train(mode)
        self[1].eval()
        return self


def freezing(classes: int) -> nn.Module:
    network = Own(classes, 8, 0.5)
    network.stem = _Freezing(*network.stem)
    return network


WIDTHS = [8]
"""Of the layers of ``edited``, which a test edits as a user would its file."""
FROZEN = False


def edited(classes: int) -> nn.Module:
    layers = [nn.Linear(3 * 32 * 32, WIDTHS[0]), *(nn.Linear(a, b) for a, b in pairwise(WIDTHS))]
    layers[0].requires_grad_(not FROZEN)
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(WIDTHS[-1], classes))


def loaded(classes: int) -> nn.Module:
    """As with weights of its own file."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, classes))
    network.load_state_dict({"1.weight": torch.zeros(classes, 3 * 32 * 32), "1.bias": torch.zeros(classes)})
    return network
