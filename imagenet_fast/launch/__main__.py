"""``python -m imagenet_fast.launch JOB SECONDS``: what our launcher has torchrun start on every rank of its node.

The launcher reads how it ended beside the job file, so the exit code, which torchrun would flatten, only says whether
it ended well.
"""

from __future__ import annotations

import sys
from pathlib import Path

from imagenet_fast.errors import UserError, refuse
from imagenet_fast.launch.leaving import leave


def main() -> None:
    """Train the job in the file JOB, waiting SECONDS at most for the other ranks."""
    path, patience_s = Path(sys.argv[1]), float(sys.argv[2])
    try:
        from imagenet_fast.launch.rank import train_as_rank  # seconds of imports, in which Ctrl-C may come
        from imagenet_fast.ranks.place import own_place
        from imagenet_fast.recipe.job import read_job

        place = own_place()
        assert place is not None, "torchrun tells a rank its place"
        outcome = train_as_rank(read_job(path), place, patience_s, handover=path.parent)
    except UserError as error:
        refuse(str(error))
    except KeyboardInterrupt:
        raise SystemExit(1) from None
    raise SystemExit(0 if outcome.status in ("reached", "finished") else 1)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        leave(end)
