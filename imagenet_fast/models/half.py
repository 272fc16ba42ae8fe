"""Define one of AlexNet's two halves: its convolutions, or its fully connected layers."""

from __future__ import annotations

from torch import Tensor, nn


class CompilableSequential(nn.Sequential):
    """Sequential layers that ``torch.compile`` can compile.

    torch 2.11 compiles no forward that is defined in torch.nn, so this class defines its own.
    """

    def forward(self, values: Tensor) -> Tensor:
        """Apply the layers one after the other."""
        for layer in self:
            values = layer(values)
        return values
