"""One rank, from its job to its outcome.

Our launcher starts it by ``__main__.py``, which reads the job. Under a torchrun or an srun of the user's own, `cli/`
has settled the job from the rank's command line.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from imagenet_fast.data.dataset import open_dataset
from imagenet_fast.launch.planning import check_writable
from imagenet_fast.launch.signals import end_on_signals
from imagenet_fast.ranks.place import Place, number_node
from imagenet_fast.ranks.roll_call import report_failure, reported_failure
from imagenet_fast.ranks.world import join
from imagenet_fast.recipe.job import Job
from imagenet_fast.record.opening import open_record
from imagenet_fast.record.outcome import Outcome
from imagenet_fast.training.clock import Clock
from imagenet_fast.training.loop import train
from imagenet_fast.training.starting import starting_weights


def train_as_rank(job: Job, place: Place, patience_s: float, handover: Path | None = None) -> Outcome:
    """Join the others, waiting ``patience_s`` for them at most, and train; how that ended.

    Rank 0 leaves the outcome in the run directory, the first rank of each node in ``handover`` too. Raises UserError
    where the ranks cannot meet, were given different jobs, or cannot start from the weights they were told to.
    """
    if place.leads:
        check_writable(job.folder)
    number_node(place)
    end_on_signals()
    outcome = Outcome.beginning(job)
    with join(place, job.agreed(), timedelta(seconds=patience_s)) as world:
        clock = Clock()
        dataset = open_dataset(
            job.recipe.data, job.data, job.batching, world.rank, world.local_size, world.device, job.recipe.seed
        )
        weights = None
        if job.init_from is not None:
            weights = starting_weights(job.init_from, job.recipe.model, dataset.classes, world, job.fresh_head)
        record = open_record(job, world, clock.run_s)
        try:
            train(job, dataset, world, clock, record, outcome, weights)
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
        if outcome.status in ("reached", "finished"):
            dist.barrier()  # a torchrun whose first rank to end had missed the target would interrupt those that write
    return outcome
