"""A profile that takes no time to replay."""

from __future__ import annotations

from imagenet_fast.cost_model.layer_profile import Layer, Profile

SMALL = Profile(
    "small",
    "made up for a test",
    (
        Layer("conv", "Conv2d", ((16, 3, 3, 3), (16,)), 2.0, 4.0),
        Layer("hidden", "Linear", ((400, 1000), (400,)), 0.7, 1.3),
        Layer("last", "Linear", ((100, 400), (100,)), 0.3, 0.7),
    ),
)
