"""Five layers in pool order, last one first: two large ones whose gradients come early, three small ones."""

from __future__ import annotations

from imagenet_fast.cost_model.layer_profile import Timing

TIMING = Timing((0.8, 0.7, 0.4, 0.2, 0.0), 1.0, (0.1, 0.3, 0.8, 1.4, 2.0), 2.0)
MESSAGES = (20e6, 80e6, 2e6, 1e6, 1e6)
"""Bytes."""
