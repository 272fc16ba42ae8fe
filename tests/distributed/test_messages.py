"""What ranks tell one another on the board of their store."""

from __future__ import annotations

from pathlib import Path

import tests
from imagenet_fast.distributed.messages import barrier, common_folder
from tests.ranks import with_ranks


@with_ranks(2)
def test_of_marks_in_a_common_folder_none_stays(tmp_path: Path):
    """Not even that of a rank 0 that was killed while the others looked for it."""
    world = tests.world()
    if world.is_main:
        (tmp_path / ".seen-killed").touch()
    assert common_folder(tmp_path, world) == tmp_path
    barrier()
    assert not [*tmp_path.iterdir()]
