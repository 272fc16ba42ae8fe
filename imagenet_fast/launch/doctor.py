"""Check the nodes that are to train: each checks itself, and ranks test the network between them."""

from __future__ import annotations

import json
import socket
import tempfile
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from imagenet_fast.distributed.init import init_distributed
from imagenet_fast.distributed.ranks import RankInfo, set_group_rank
from imagenet_fast.doctor.cluster_checks import gather_results
from imagenet_fast.doctor.host_checks import examine
from imagenet_fast.doctor.loader_check import try_loaders
from imagenet_fast.doctor.report import CheckResult
from imagenet_fast.launch.launcher import run_ranks
from imagenet_fast.launch.rendezvous import LaunchConfig
from imagenet_fast.launch.signals import end_on_signals, interrupt_on_signals
from imagenet_fast.recipe.job import DoctorJob

_FINDINGS = "findings.json"


def launch_doctor(job: DoctorJob, nodes: LaunchConfig) -> list[CheckResult] | None:
    """Return the results of this node's ranks and those of the other ``nodes``; None on all nodes but the first.

    The first node reports. If ranks cannot train together, that is a result, too.

    Raises:
        KeyboardInterrupt: If a signal stopped this process.
    """
    interrupt_on_signals()
    with tempfile.TemporaryDirectory(prefix="imagenet-fast-") as handover:
        code, fate = run_ranks(job, Path(handover), nodes)
        found = Path(handover) / _FINDINGS
        if found.is_file():
            return [CheckResult(**finding) for finding in json.loads(found.read_text(encoding="utf-8"))]
    if not code:
        return None
    own = examine(job.data, job.out, nodes.ranks_each, job.timeout)
    said = "the ranks did not come together" if code == 2 else fate
    return [*own, CheckResult("ranks", "fail", said, "see what they said above")]


def examine_as_rank(job: DoctorJob, place: RankInfo, join_timeout_s: float, handover: Path) -> None:
    """Join the other ranks and run the checks; rank 0 writes the results of all ranks to ``handover``.

    Args:
        job: What to check.
        place: This process's rank.
        join_timeout_s: Seconds to wait for the other ranks.
        handover: The launcher's directory.

    Raises:
        UserError: If the ranks cannot meet.
    """
    set_group_rank(place)
    end_on_signals()
    own: list[CheckResult] = []
    if place.is_local_main:
        own = examine(job.data, job.out, place.local_size, job.timeout)
        own += try_loaders(job.data, place.local_size)
    with init_distributed(place, {}, timedelta(seconds=join_timeout_s), job.timeout, left=handover) as world:
        found = gather_results(own, world, socket.gethostname())
        if world.is_main:
            (handover / _FINDINGS).write_text(
                json.dumps([asdict(finding) for finding in found]) + "\n", encoding="utf-8"
            )
