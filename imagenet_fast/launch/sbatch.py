"""A batch script for Slurm: one task a node starts its ranks, and what is pre-empted is queued again.

Slurm's `--signal=B:` tells the batch shell alone; srun passes on what it is told to its tasks
(https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/srun.html).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from imagenet_fast.errors import UserError
from imagenet_fast.launch.cluster_job import ClusterJob, parse_time_limit
from imagenet_fast.metrics.run_result import STOPPED

_WARNING_S = 120  # before the time limit; Slurm may warn up to a minute earlier


def sbatch_text(
    job: ClusterJob,
    command: Sequence[str],
    *,
    label: str,
    gpus: bool,
    cores: int | None = None,
    time_limit: str | None = None,
    partition: str | None = None,
    account: str | None = None,
) -> str:
    """A script for sbatch that runs ``command`` once a node, with ``cores`` cores of it; None for whole nodes.

    No task is bound to cores, since it starts ranks and loaders; and none is ended because another has, since all ranks
    save together and end at slightly different times. Only USR1 is trapped: a job that is cancelled ends by SIGTERM
    with its shell, which must not queue it again.

    Raises UserError where a name has other characters than Slurm's, or the time limit leaves none for training.
    """
    if time_limit is not None and parse_time_limit(time_limit) <= 2 * _WARNING_S:
        raise UserError(f"--time {time_limit} leaves no time to train; give more than {2 * _WARNING_S // 60} minutes")
    asked = {
        "job-name": label,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.ranks_each) if gpus else None,
        "cpus-per-task": str(cores) if cores else None,
        "exclusive": None if cores else "",
        "mem": None if cores else "0",  # all of a node's
        "time": time_limit,
        "partition": _plain("--partition", partition),
        "account": _plain("--account", account),
        "open-mode": "append",
        "requeue": "",
        "signal": f"B:USR1@{_WARNING_S}",
    }
    given = {key: value for key, value in asked.items() if value is not None}
    directives = [f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}" for key, value in given.items()]
    step = ["srun", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    step += [f"--cpus-per-task={cores}"] if cores else []  # srun no longer takes it from the script's head
    return _SCRIPT.format(
        directives="\n".join(directives),
        note=job.note,
        step=shlex.join(step),
        command=shlex.join(command),
        stopped=STOPPED,
        warning=_WARNING_S,
    )


_SCRIPT = """\
#!/bin/bash
{directives}

# {note}
#
# {warning} s before the time limit, and before a pre-emption that gives notice, this shell is told by USR1. It tells
# the ranks, which save, and end with exit code {stopped}; the job is then queued again, and goes on where it was.

{step} \\
    {command} &
step=$!
told=
trap 'trap "" USR1; told=yes; kill -s USR1 "$step"' USR1 # once: told twice, ranks would not wait until they have saved
wait "$step"
code=$?
if [ -n "$told" ]; then # which has ended the waiting, not the step
    wait "$step"
    code=$?
fi

if [ "$code" -eq {stopped} ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "job $SLURM_JOB_ID is not queued again; submit the same script, which goes on where it was" >&2
fi
exit "$code"
"""


def _plain(option: str, value: str | None) -> str | None:
    """``value``, which may stand in a directive unquoted. Raises UserError."""
    if value is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*", value):
        raise UserError(f"{option} {value!r} is no name of Slurm's; use letters, digits and _ . , @ + -")
    return value
