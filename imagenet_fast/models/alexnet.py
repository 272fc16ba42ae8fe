"""AlexNet in one tower (Krizhevsky, arXiv 1404.5997), with torchvision's names, first weights and results."""

from __future__ import annotations

from torch import Tensor, nn

from imagenet_fast.models.half import Half


class AlexNet(nn.Module):
    """Images [N, 3, H, W], 224 x 224 in the paper, to logits [N, classes]."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        self.features = Half(
            nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d(6)  # the identity at 224 pixels
        self.classifier = Half(
            nn.Dropout(dropout), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True),
            nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return out
