"""Entry point of each rank under our launcher: ``python -m imagenet_fast.launch FILE SECONDS LAUNCHER [HOST...]``.

The launcher has torchrun start it. It reads how a run ended, and the errors that it prints, from what ranks leave in
its directory, where the job file is.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback from the imports; the launcher reports

from imagenet_fast.distributed.cores import exceeded_limit
from imagenet_fast.distributed.ranks import RankInfo, kill_with_parent, rank_info_from_env
from imagenet_fast.errors import JobAborted, UserError, exit_with_error, report_errors_by
from imagenet_fast.netlab.namespaces import INTERFACE, Host, enter
from imagenet_fast.run.launcher_dir import LauncherDir
from imagenet_fast.stdio import exit_now, keep_printing, refuse_if_lost

_PORT = 29400  # where simulated nodes meet; in their network no other process listens


def main() -> None:
    """Do the job in FILE; wait at most SECONDS for the other ranks, and end with the process LAUNCHER.

    Each HOST is ADDRESS=NAMESPACE of a simulated node, on which the rank of that number is alone.
    """
    path, join_timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    kill_with_parent()
    if os.getppid() != int(sys.argv[3]):
        raise SystemExit(1)  # it has ended already
    launcher_dir = LauncherDir(path.parent, int(os.environ["LOCAL_RANK"]))
    if launcher_dir.final.exists():
        raise SystemExit(2)  # torchrun has restarted the ranks
    launcher_dir.forget()
    report_errors_by(partial(launcher_dir.leave, "failed"))
    if hosts := [Host(*text.split("=")) for text in sys.argv[4:]]:
        _move_to(hosts)
    try:
        code = _do(path, join_timeout_s, launcher_dir)
    except UserError as error:
        distributed = sys.modules.get("torch.distributed")
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # it had begun, and storage may come back
            exit_with_error(str(error), code=1)
        if distributed is not None and distributed.is_initialized():  # they had met
            launcher_dir.final.touch()
        exit_with_error(str(error))
    except JobAborted as fault:
        exit_with_error(str(fault), code=1)
    except Exception as error:
        if limit := exceeded_limit(str(error)):
            exit_with_error(f"rank {os.environ['RANK']}: {limit}")
        launcher_dir.leave("failed", f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", 1)
        raise
    raise SystemExit(code)


def _move_to(hosts: list[Host]) -> None:
    """Move this rank to its host, and have it meet the others on the first one."""
    number = int(os.environ["RANK"])
    enter(hosts[number])  # before torch starts threads, which would stay behind
    os.environ |= RankInfo(number, len(hosts), 0, 1).variables(node=number)
    os.environ |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(_PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # torchrun's own is on this node's network


def _do(path: Path, join_timeout_s: float, launcher_dir: LauncherDir) -> int:
    """Do the job in the file, which is named after its task; return the exit code."""
    from imagenet_fast.launch.job_setup import on_ranks
    from imagenet_fast.launch.rank import evaluate_as_rank, examine_as_rank, train_as_rank  # takes seconds
    from imagenet_fast.recipe.job import DoctorJob, Evaluation, Job, read_job

    rank = rank_info_from_env()
    assert rank is not None, "torchrun tells a rank its place"
    match path.stem:
        case Evaluation.task:
            evaluate_as_rank(read_job(path, Evaluation), rank, join_timeout_s, launcher_dir)
            refuse_if_lost()
            return 0
        case DoctorJob.task:
            examine_as_rank(read_job(path, DoctorJob), rank, join_timeout_s, launcher_dir)
            return 0
    job = read_job(path, Job)
    if job.elastic:
        job = on_ranks(job, rank.size)
    return train_as_rank(job, rank, join_timeout_s, launcher_dir, job.folder)


if __name__ == "__main__":
    keep_printing(waits=Path(sys.argv[1]).stem != "train")
    try:
        main()
    except SystemExit as end:
        exit_now(end)
    except KeyboardInterrupt:  # other ranks report it too, or the launcher was stopped
        exit_now(SystemExit(1))
