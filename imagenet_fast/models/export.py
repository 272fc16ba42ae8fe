"""Export a network to a file that is used without this program.

A ``.pt2`` file is a program of ``torch.export``: the network's operations and weights, which torch runs without the
network's code. torch reads it with the help of pickle, so this program writes such files but never reads those of
others.
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

from imagenet_fast.atomic_io import atomic_path
from imagenet_fast.errors import UserError, first_line

ABOUT = "imagenet_fast.json"
"""File in the archive that describes the weights."""


def export_program(network: nn.Module, image_size: int, path: Path, about: Mapping[str, Any]) -> None:
    """Write ``network`` as a .pt2 program for evaluation of any number of fp32 images [n, 3, S, S].

    The written file is read again and must give the network's logits for random images before it gets its name.

    Args:
        network: The network, which is left in evaluation mode.
        image_size: S, in pixels.
        path: The .pt2 file to write.
        about: Description of the weights, stored as JSON.

    Raises:
        UserError: torch.export cannot trace the network, or the written file does not give its logits.
    """
    network.eval()
    example = torch.randn(2, 3, image_size, image_size)  # not 1, which torch would treat as a constant
    network = getattr(network, "_orig_mod", network)  # in the wrapper of torch.compile, whose arguments have no names
    try:
        program = torch.export.export(network, (example,), dynamic_shapes=({0: Dim("batch")},))
    except Exception as error:  # of code that is not ours
        raise UserError(
            f"torch.export cannot trace the network ({first_line(error)}), so {path} is not written; "
            "--format safetensors"
        ) from None
    archive = BytesIO()  # not the file: torch aborts the process if its name is unusual or the disk is full
    torch.export.save(program, archive, extra_files={ABOUT: json.dumps(about, sort_keys=True)})
    with atomic_path(path) as partial:
        partial.write_bytes(archive.getbuffer())
        with partial.open("rb") as opened:
            written = torch.export.load(opened).module()
        for images in (torch.randn(n, 3, image_size, image_size) for n in (1, 3)):
            with torch.inference_mode():
                ours, theirs = network(images), written(images)
            if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(ours.abs().max())):
                raise UserError(f"{path} would not give the model's results, so it is not kept; --format safetensors")
