"""One of AlexNet's two halves: its convolutions, or its fully connected layers."""

from __future__ import annotations

from torch import Tensor, nn


class CompilableSequential(nn.Sequential):
    """Layers one after the other. What it calls is written here: torch 2.11 compiles no forward of torch.nn's own."""

    def forward(self, values: Tensor) -> Tensor:
        for layer in self:
            values = layer(values)
        return values
