"""Define torchvision's ResNet with a stem, its first four layers, that can be compiled as one block.

The stem is not a module: its layers would lose torchvision's names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchvision.models import resnet


class ResNet(resnet.ResNet):  # type: ignore[misc]  # torchvision has no types
    """torchvision's ResNet, from images [N, 3, H, W] to logits [N, classes]."""

    _compiled_stem: Callable[[Tensor], Tensor] | None = None

    def compile_stem(self, **options: Any) -> None:
        """Compile the stem with ``torch.compile``, as ``nn.Module.compile`` does a module.

        Args:
            **options: Options of ``torch.compile``.
        """
        self._compiled_stem = torch.compile(self._stem, **options)

    def _stem(self, images: Tensor) -> Tensor:
        out: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return out

    def _forward_impl(self, images: Tensor) -> Tensor:
        stem = self._compiled_stem or self._stem
        features = self.layer4(self.layer3(self.layer2(self.layer1(stem(images)))))
        logits: Tensor = self.fc(self.avgpool(features).flatten(1))
        return logits

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the compiled stem.

        Copies are not compiled, as with torch's modules: the stem would use this model's weights.
        """
        state: dict[str, Any] = super().__getstate__()
        state.pop("_compiled_stem", None)
        return state
