"""One rank, from its job to its exit code.

``python -m imagenet_fast.launch.rank JOB`` is what the launcher starts on every rank of its node. Started by a
torchrun or an srun of the user's own, a rank settles the job from its command line instead.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from imagenet_fast.data.dataset import open_dataset
from imagenet_fast.errors import UserError, refuse
from imagenet_fast.launch.planning import check_writable
from imagenet_fast.launch.signals import end_on_signals
from imagenet_fast.ranks.place import Place, own_place
from imagenet_fast.ranks.roll_call import report_failure, reported_failure
from imagenet_fast.ranks.world import join
from imagenet_fast.recipe.job import Job, read_job
from imagenet_fast.record.opening import open_record
from imagenet_fast.record.outcome import Outcome
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.loop import train


def train_as_rank(job: Job, place: Place, patience_s: float, handover: Path | None = None) -> Outcome:
    """Join the others, waiting ``patience_s`` for them at most, and train; how that ended.

    Rank 0 leaves the outcome in the run directory, the first rank of each node in ``handover`` too. Raises UserError
    where the ranks cannot meet, or were given different jobs.
    """
    if place.leads:
        check_writable(job.folder)
    end_on_signals()
    outcome = Outcome.beginning(job)
    with join(place, job.agreed(), timedelta(seconds=patience_s)) as world:
        clock = Clock()
        dataset = open_dataset(
            job.recipe.data, job.data, job.batching, world.rank, world.local_size, world.device, job.recipe.seed
        )
        record = open_record(job, world, clock.run_s)
        try:
            train(job, dataset, world, clock, record, outcome)
        except KeyboardInterrupt:
            outcome.message = reported_failure()  # another rank's, after which torchrun has stopped this one
            outcome.status = "failed" if outcome.message else "interrupted"
        except Exception as error:
            outcome.message = report_failure(error)
            raise
        finally:
            outcome.run_s = clock.run_s()
            if world.leads:
                outcome.write(job.folder)
            if handover is not None and place.leads_node:
                outcome.write(handover)
            record("end", outcome.steps, **vars(outcome))
            record.close()
    return outcome


def main() -> None:
    """A rank that our launcher started. The launcher reads how it ended beside the job file, so the exit code, which
    torchrun would flatten, only says whether it ended well."""
    path, patience_s = Path(sys.argv[1]), float(sys.argv[2])
    place = own_place()
    assert place is not None, "torchrun tells a rank its place"
    try:
        outcome = train_as_rank(read_job(path), place, patience_s, handover=path.parent)
    except UserError as error:
        refuse(str(error))
    raise SystemExit(0 if outcome.status in ("reached", "finished") else 1)


if __name__ == "__main__":
    main()
