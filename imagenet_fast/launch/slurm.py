"""Slurm's batch script: one task per node starts its ranks, and a pre-empted job is queued again.

Slurm's `--signal=B:` signals only the batch shell; srun forwards the signals it receives to its tasks
(https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/srun.html).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from imagenet_fast.errors import UserError
from imagenet_fast.launch.cluster_job import ClusterJob, job_label, parse_time_limit
from imagenet_fast.run.result import STOPPED
from imagenet_fast.run.run_dir import RunDir

_WARNING_S = 120  # before the time limit; Slurm may send the signal up to a minute earlier
_MEETING = ' \\\n    --nodes {nodes} --rdzv-endpoint "$SLURMD_NODENAME:$((20000 + SLURM_JOB_ID % 10000))"'
"""Said here, where a container that drops Slurm's variables would have each node train alone."""

_SCRIPT = """\
#!/bin/bash
{directives}

# {note}
#
# {warning} s before the time limit, and before a pre-emption that gives notice, this shell is told by USR1. It tells
# the ranks, which save, and end with exit code {stopped}; the job is then queued again, and goes on where it was. If
# they could not save in time (exit code 1), it goes on from the last checkpoint, if this start has made one.

if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
    echo 'error: tasks of an array would all train in one directory; leave --array out, or print a script for each' >&2
    exit 2
fi
manifests() {{ stat -c '%n %y' {checkpoints}/step-*/manifest.json 2>/dev/null; }}
before=$(manifests)
{step} \\
    {command}{meeting} &
step=$!
told=
trap 'trap "" USR1; told=yes; kill -s USR1 "$step"' USR1 # once: told twice, ranks would not wait until they have saved
wait "$step"
code=$?
if [ -n "$told" ]; then # which has ended the waiting, not the step
    wait "$step"
    code=$?
fi

saved() {{ manifests | grep -qvxF -e "$before"; }}
if [ "$code" -eq {stopped} ] || {{ [ -n "$told" ] && [ "$code" -eq 1 ] && saved; }}; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "job $SLURM_JOB_ID is not queued again; submit the same script, which goes on where it was" >&2
fi
exit "$code"
"""


def sbatch_text(
    job: ClusterJob, command: Sequence[str], folder: Path, *, gpus: bool, cores: int | None, time_limit: str | None,
    partition: str | None, account: str | None,
) -> str:  # fmt: skip
    """Return a script for sbatch that runs ``command`` once per node.

    Tasks are not bound to cores, since each starts ranks and loaders. A task that ends does not end the others: all
    ranks save together, but end at slightly different times. Only USR1 is trapped. A cancelled job is ended by SIGTERM,
    together with its shell, which must not queue it again. The options are those of `launch slurm`.

    Raises:
        UserError: If a name has characters that Slurm does not allow, or the time limit leaves no time to train.
    """
    warning_s = max(_WARNING_S, math.ceil(job.recipe.checkpoint.grace_s) + 70)
    limit_s = parse_time_limit(time_limit)
    if limit_s is not None and limit_s <= 2 * warning_s:
        minutes = math.ceil(2 * warning_s / 60)
        grace = f" (checkpoint.grace_s is {job.recipe.checkpoint.grace_s:g})" if warning_s > _WARNING_S else ""
        raise UserError(f"--time {time_limit} leaves no time to train{grace}; give more than {minutes} minutes")
    for option, name in (("--partition", partition), ("--account", account)):
        if name is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*", name):
            rule = "begin it with a letter, a digit or _, and use only these and . , @ + -"
            raise UserError(f"{option} {name!r} is no name of Slurm's; {rule}")
    asked = {
        "job-name": job_label(job.path.stem),
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.ranks_each) if gpus else None,
        "cpus-per-task": str(cores) if cores else None,
        "exclusive": None if cores else "",
        "mem": None if cores else "0",  # all of the node's memory
        "time": time_limit,
        "partition": partition,
        "account": account,
        "open-mode": "append",
        "requeue": "",
        "signal": f"B:USR1@{warning_s}",
    }
    directives = [f"#SBATCH --{key}={value}".rstrip("=") for key, value in asked.items() if value is not None]
    step = ["srun", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    step += [f"--cpus-per-task={cores}"] if cores else []  # srun no longer reads it from the script's header
    return _SCRIPT.format(
        directives="\n".join(directives),
        note=job.note,
        step=shlex.join(step),
        command=shlex.join(command),
        meeting=_MEETING.format(nodes=job.nodes) if job.nodes > 1 else "",
        checkpoints=shlex.quote(str(RunDir(folder).checkpoints)),
        stopped=STOPPED,
        warning=warning_s,
    )
