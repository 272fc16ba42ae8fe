"""Memory for batches on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of whatever values, by NumPy, which asks for huge pages: to touch a large one for the first time takes a
    third of what small pages take, which for an image would be half of a crop's time."""
    return torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
