"""Weights on disk."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import nn


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the state dict, under its own (torchvision's) names, as safetensors; in one move, so never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}, partial)
    partial.replace(path)
