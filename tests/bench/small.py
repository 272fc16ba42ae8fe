"""A profile that takes no time to replay."""

from __future__ import annotations

from imagenet_fast.cost.profile import Layer, Profile

SMALL = Profile(
    "small",
    "made up for a test",
    (
        Layer("conv", "Conv2d", ((16, 3, 3, 3), (16,)), 6.0, 12.0),
        Layer("hidden", "Linear", ((400, 1000), (400,)), 2.0, 4.0),
        Layer("last", "Linear", ((100, 400), (100,)), 1.0, 2.0),
    ),
)
