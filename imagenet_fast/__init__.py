"""imagenet-fast: train ImageNet fast, with a swappable gradient-sync engine."""

__version__ = "0.1.0"
