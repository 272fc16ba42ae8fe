"""Values on their way to the wire and back."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def split(tensor: Tensor, count: int) -> list[Tensor]:
    """``count`` neighbouring parts of a 1-D tensor, as even as can be; some are empty where it is shorter."""
    cuts = [part * tensor.numel() // count for part in range(count + 1)]
    return [tensor[begin:end] for begin, end in pairwise(cuts)]


def room(tensor: Tensor, wire: torch.dtype) -> Tensor:
    """Space for as many values as ``tensor`` holds, as they arrive."""
    return torch.empty_like(tensor, dtype=wire)


def round_to(tensor: Tensor, wire: torch.dtype) -> Tensor:
    """The values of ``tensor`` as they travel; ``tensor`` keeps what the others will receive."""
    if wire == tensor.dtype:
        return tensor
    message = tensor.to(wire)
    tensor.copy_(message)
    return message


def landing(tensor: Tensor, wire: torch.dtype) -> Tensor:
    """Where values for ``tensor`` may arrive: in place unless they need a cast; :func:`land` ends it."""
    return tensor if wire == tensor.dtype else room(tensor, wire)


def land(tensor: Tensor, message: Tensor) -> None:
    """Take over what arrived at :func:`landing`."""
    if message is not tensor:
        tensor.copy_(message)


def divide_before(tensor: Tensor, wire: torch.dtype, ranks: int) -> None:
    """Make the sum that follows a mean, where values are rounded on their way: a sum of fp16 values could overflow."""
    if wire.itemsize < tensor.element_size():
        tensor.div_(ranks)


def divide_after(tensor: Tensor, wire: torch.dtype, ranks: int) -> None:
    """Make a sum the mean, where :func:`divide_before` did not: an exact sum is rounded once."""
    if wire.itemsize >= tensor.element_size():
        tensor.div_(ranks)
