"""Ranks on this node: torchrun, inside this process, with its ends made readable."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from pathlib import Path
from typing import Literal

from imagenet_fast.distributed.cpu_count import usable_cores
from imagenet_fast.distributed.network_interfaces import Endpoint, route_to
from imagenet_fast.errors import JobAborted, refusal_in
from imagenet_fast.launch.rendezvous import LaunchConfig, RendezvousInfo, meet

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # torchrun passes them on to the ranks
_LAST_CALL_S = 10  # for which nodes that are enough wait for further ones
_SETTLING_S = 40  # beyond their grace, in which ranks of other nodes end, and a node that is gone is taken for lost
_ENDING_S = 10  # beyond their grace, after which ranks are killed


def run_ranks(
    task: Literal["train", "eval", "doctor"], job: Path, nodes: LaunchConfig, grace_s: float = 20.0
) -> tuple[int, str]:
    """Do what the file ``job`` says on this node's ranks, once the other nodes have come, until all have ended. Told to
    stop, they may take ``grace_s`` seconds.

    Returns the exit code of the rank that failed first and what became of it, or 0 and nothing. Where ranks refuse, one
    of their sentences is printed, and returned with their exit code. Raises UserError where the nodes cannot meet,
    Fault where those that may leave and join do not meet again, and KeyboardInterrupt when told to stop.
    """
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(grace_s) + _ENDING_S)
    code, fate = _run_ranks(task, job, nodes, grace_s)
    if code:
        fate, code = refusal_in(job.parent) or (fate, code)
    if code == 2:
        print(f"error: {fate}", file=sys.stderr)
    return code, fate


def _run_ranks(
    task: Literal["train", "eval", "doctor"], job: Path, nodes: LaunchConfig, grace_s: float
) -> tuple[int, str]:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import get_args_parser, run

    from imagenet_fast.distributed.heartbeat import describe_exit

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # torchrun's own account of an end, which we give instead
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nodes.ranks_each)))
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
    if os.environ.get("TORCH_CPP_LOG_LEVEL") == "FATAL":  # as the command line has it for a launcher
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    torchrun.training_script_args = [task, str(job), str(nodes.patience_s)]
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
    except AttributeError as error:  # torchrun's agent has no result where this node was one too many to the end
        if nodes.least is None or error.name != "is_failed":
            raise
    return 0, ""


def _meeting_again(endpoint: Endpoint, met: RendezvousInfo, patience_s: float) -> list[str]:
    """Options by which torchrun has the nodes meet anew whenever one comes or goes, in the store that they have met in.

    Each time another node may become the first, which has a new store made for the ranks then: the one that torchrun
    would share with them stays where it was for those that had come before.
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
    """Why nodes that may leave and join train no more, in a sentence."""
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

    again = "the same command on every node goes on where the run was saved"
    match error:
        case RendezvousTimeoutError():
            return f"fewer than --nodes {nodes.least} are left at {nodes.endpoint}, and no others came in time; {again}"
        case RendezvousClosedError():
            return f"the nodes at {nodes.endpoint} have ended; see what they say, and {again}"
        case _:
            return f"the node at {nodes.endpoint} has ended; see what it says, and {again}"
