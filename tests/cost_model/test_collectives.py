"""What a message's length is a multiple of."""

from __future__ import annotations

from itertools import product
from typing import get_args

from imagenet_fast.cost_model.collectives import RankLayout, message_alignment, slot_alignment, wire_format
from imagenet_fast.recipe.sync_table import Wire

LAYOUTS = [(ranks,) for ranks in (1, 2, 3, 7, 8, 96, 128, 509)] + [(8,) * 16, (8,) * 64, (4, 3), (1,) * 6]


def test_parts_begin_on_16_bytes_on_gpus():
    """Each rank's part of a gradient's place, of a row's and of a column's ranks; beyond 128 ranks it pads too much."""
    for nodes, wire in product(LAYOUTS, get_args(Wire)):
        form, cpus, gpus = wire_format(wire), RankLayout(nodes, on_gpu=False), RankLayout(nodes, on_gpu=True)
        assert slot_alignment(cpus, form) == message_alignment(cpus, form)
        alignment = slot_alignment(gpus, form)
        assert alignment % message_alignment(gpus, form) == 0
        if gpus.size <= 128:
            assert alignment // gpus.size * form.itemsize % 16 == 0
        else:
            assert alignment == message_alignment(gpus, form)
