"""Define two AlexNets: torchvision's, and the one with batch norm of the large-batch papers.

``alexnet`` has torchvision's names and initialisation (Krizhevsky, arXiv 1404.5997). ``alexnet_bn`` equals NVIDIA's
Caffe model of that name, by LARS' co-authors, layer for layer: grouped convolutions, pooling before the norm, norms
without scale and shift, and the initialisation it was trained from (``train_val2.prototxt``). All biases start above 0
there, so LARS has a norm to scale their steps by.
"""

from __future__ import annotations

from torch import Tensor, nn

from imagenet_fast.models.fused_norm import FusedBatchNorm2d


class AlexNet(nn.Module):
    """Convolutions and fully connected layers, from images [N, 3, H, W] to logits [N, classes]."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        """Build the network of its two halves, between which maps are averaged to 6 x 6 pixels."""
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, classes] for images [N, 3, H, W]."""
        out: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return out


def alexnet(classes: int, dropout: float) -> AlexNet:
    """Return AlexNet without norms, with fresh weights: for one seed those of torchvision's.

    Args:
        classes: Number of classes.
        dropout: Probability of dropout in the classifier.
    """
    features = CompilableSequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
    )  # fmt: skip
    classifier = CompilableSequential(
        nn.Dropout(dropout), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True),
        nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(inplace=True),
        nn.Linear(4096, classes),
    )  # fmt: skip
    return AlexNet(features, classifier)


def alexnet_bn(classes: int, dropout: float, pool5_norm: bool) -> AlexNet:
    """Return AlexNet with batch norm, with fresh weights; its images have 227 x 227 pixels in the papers.

    Args:
        classes: Number of classes.
        dropout: Probability of dropout in the classifier.
        pool5_norm: Whether to add the norm after the last pooling that Jia et al. (arXiv 1807.11205) train with.
    """
    features = CompilableSequential(
        nn.Conv2d(3, 96, 11, stride=4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2), _norm(96),
        nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2), _norm(256),
        nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(inplace=True), _norm(384),
        nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU(inplace=True), _norm(384),
        nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        *([_norm(256)] if pool5_norm else []),
    )  # fmt: skip
    classifier = CompilableSequential(
        nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout),
        nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout),
        nn.Linear(4096, classes),
    )  # fmt: skip
    for module in (*features, *classifier):
        if isinstance(module, nn.Conv2d | nn.Linear):
            hidden = isinstance(module, nn.Linear) and module is not classifier[-1]
            assert module.bias is not None
            nn.init.normal_(module.weight, std=0.005 if hidden else 0.01)
            nn.init.constant_(module.bias, 0.1 if hidden else 0.01)
    return AlexNet(features, classifier)


def _norm(channels: int) -> FusedBatchNorm2d:
    return FusedBatchNorm2d(channels, eps=1e-4, momentum=0.1, affine=False)


class CompilableSequential(nn.Sequential):
    """Sequential layers that ``torch.compile`` can compile.

    torch 2.11 compiles no forward that is defined in torch.nn, so this class defines its own.
    """

    def forward(self, values: Tensor) -> Tensor:
        """Apply the layers one after the other."""
        for layer in self:
            values = layer(values)
        return values

    def give_relus_to_norms(self) -> None:
        """Have each norm apply the ReLU in front of it, also across a max pooling: those two commute."""
        for at, norm in enumerate(self):
            relu = at - 2 if type(self[at - 1]) is nn.MaxPool2d else at - 1
            if isinstance(norm, FusedBatchNorm2d) and type(self[relu]) is nn.ReLU:
                self[relu], norm.relu = nn.Identity(), "before"
