"""A network in a file of its own, to be used without this program.

A ``.pt2`` is a program of ``torch.export``: the network's operations and weights, which torch runs without its code.
torch reads it with pickle's help, so we write such files and take none from anybody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from imagenet_fast.errors import UserError

ABOUT = "imagenet_fast.json"
"""The file in the archive with what is said about the weights."""


def export_program(network: nn.Module, image_size: int, path: Path, about: Mapping[str, Any]) -> None:
    """Write ``network``, for evaluation and any number of images [n, 3, S, S] in fp32, as ``path``, a .pt2.

    What was written is read again, and must give the network's logits for random images before it gets its name.
    Raises UserError where it does not.
    """
    network.eval()
    partial = path.with_name(f".{path.name}")
    example = torch.randn(2, 3, image_size, image_size)  # not 1, which torch would take for a constant
    program = torch.export.export(network, (example,), dynamic_shapes=({0: Dim("batch")},))
    archive = BytesIO()  # and not the file: torch ends the process where that has a strange name or finds no space
    torch.export.save(program, archive, extra_files={ABOUT: json.dumps(about, sort_keys=True)})
    try:
        partial.write_bytes(archive.getbuffer())
        with partial.open("rb") as opened:
            written = torch.export.load(opened).module()
        for images in (torch.randn(n, 3, image_size, image_size) for n in (1, 3)):
            with torch.inference_mode():
                ours, theirs = network(images), written(images)
            if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(ours.abs().max())):
                raise UserError(f"{path} would not give the model's results, so it is not kept; --format safetensors")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
