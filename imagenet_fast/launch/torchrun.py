"""Start this node's ranks with torchrun, inside this process, and report clearly how they ended."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from pathlib import Path
from typing import Literal, assert_never

from imagenet_fast.distributed.cpu_count import cores_per_rank
from imagenet_fast.distributed.network_interfaces import Endpoint, route_to
from imagenet_fast.errors import JobAborted, refusal_in
from imagenet_fast.launch.rendezvous import LaunchConfig, RendezvousInfo, meet
from imagenet_fast.recipe.job import AnyJob, DoctorJob, Evaluation, Job, write_job

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # torchrun forwards them to the ranks
_LAST_CALL_S = 10  # how long the minimum number of nodes waits for more
_SETTLING_S = 40  # on top of the grace time: other nodes' ranks end, and a lost node is noticed
_ENDING_S = 10  # on top of the grace time: after it, ranks are killed


def run_ranks(job: AnyJob, handover: Path, nodes: LaunchConfig, grace_s: float = 20.0) -> tuple[int, str]:
    """Run ``job`` on this node's ranks, once the other nodes have arrived, until all ranks have ended.

    If ranks report a user error, the first one's message is printed and returned with the exit code.

    Args:
        job: What the ranks do.
        handover: Directory for the job file. Ranks leave their messages and positions there.
        nodes: Nodes and ranks, and where they meet.
        grace_s: Seconds that ranks have to end after a signal.

    Returns:
        The exit code of the rank that failed first and how it ended, or 0 and an empty string.

    Raises:
        UserError: If the nodes cannot meet.
        JobAborted: If nodes that may leave and join do not meet again.
        KeyboardInterrupt: If a signal stopped this process.
    """
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(grace_s) + _ENDING_S)
    path = handover / f"{task_of(job)}.json"
    write_job(job, path)
    code, fate = _run_ranks(path, nodes, grace_s)
    if code:
        fate, code = refusal_in(handover) or (fate, code)
    if code == 2:
        print(f"error: {fate}", file=sys.stderr)
    return code, fate


def task_of(job: AnyJob) -> Literal["train", "eval", "doctor"]:
    """Return the name of the task that ``job`` is, after which its file is named."""
    match job:
        case Job():
            return "train"
        case Evaluation():
            return "eval"
        case DoctorJob():
            return "doctor"
        case _:
            assert_never(job)


def _run_ranks(job: Path, nodes: LaunchConfig, grace_s: float) -> tuple[int, str]:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import get_args_parser, run

    from imagenet_fast.distributed.heartbeat import describe_exit

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # torchrun's own report of a failure, which ours replaces
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_per_rank(nodes.ranks_each)))
    endpoint = nodes.endpoint
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"]
    count = str(nodes.count)
    if endpoint is not None:
        met = meet(endpoint, nodes.count, nodes.patience_s, nodes.least)
        where = [f"--node-rank={met.number}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={met.name}"]
        if nodes.least is not None:
            count = f"{nodes.least}:{nodes.count}"
            where = _meeting_again(endpoint, met, nodes.patience_s + grace_s)
    torchrun = get_args_parser().parse_args(
        [f"--nnodes={count}", f"--nproc-per-node={nodes.ranks_each}", f"--max-restarts={nodes.restarts}", *where]
        + [f"--signals-to-handle={_SIGNALS}", "--module", "imagenet_fast.launch"]
    )
    if os.environ.get("TORCH_CPP_LOG_LEVEL") == "FATAL":  # set by our command line for launchers
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    torchrun.training_script_args = [str(job), str(nodes.patience_s)]
    try:
        run(torchrun)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        fate = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return code, describe_exit(rank, fate, job.parent)
    except SignalException:
        raise KeyboardInterrupt from None
    except DistError:
        return 1, f"the node at {endpoint} ended while this one was still at work"
    except RendezvousError as error:
        raise JobAborted(_apart(error, nodes)) from None
    except AttributeError as error:  # torchrun's agent has no result if this node was not needed until the end
        if nodes.least is None or error.name != "is_failed":
            raise
    return 0, ""


def _meeting_again(endpoint: Endpoint, met: RendezvousInfo, patience_s: float) -> list[str]:
    """Return the options by which torchrun has the nodes meet again, in the same store, whenever one leaves or joins.

    Each time another node may become the first, and a new store is made there for the ranks. Hence torchrun must not
    share its store: nodes that had joined before would keep its old address.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    holds = met.number == 0
    route = None if holds else route_to(endpoint.host)
    seconds = {"join_timeout": math.ceil(patience_s) + _SETTLING_S, "last_call_timeout": _LAST_CALL_S}
    settings = {"is_host": int(holds), **seconds}
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={met.name}",
        f"--rdzv-conf={','.join(f'{key}={value}' for key, value in settings.items())}",
        f"--local-addr={route.address if route else endpoint.host}",
    ]


def _apart(error: Exception, nodes: LaunchConfig) -> str:
    """Return one sentence on why nodes that may leave and join stopped training."""
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

    again = "the same command on every node goes on where the run was saved"
    match error:
        case RendezvousTimeoutError():
            return f"fewer than --nodes {nodes.least} are left at {nodes.endpoint}, and no others came in time; {again}"
        case RendezvousClosedError():
            return f"the nodes at {nodes.endpoint} have ended; see what they say, and {again}"
        case _:
            return f"the node at {nodes.endpoint} has ended; see what it says, and {again}"
