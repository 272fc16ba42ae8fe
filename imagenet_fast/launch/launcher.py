"""Launch ranks by torchrun, on this node and others, and report how they ended."""

from __future__ import annotations

import logging
import math
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from imagenet_fast.checkpoint.folder import MANIFEST
from imagenet_fast.distributed.cores import cores_per_rank
from imagenet_fast.distributed.heartbeat import describe_exit
from imagenet_fast.distributed.join import Meeting, meet
from imagenet_fast.distributed.network import route_to
from imagenet_fast.errors import JobAborted, UserError, first_error_in, first_line
from imagenet_fast.launch.nodes import LaunchConfig, refused_threads
from imagenet_fast.launch.signals import ignore_signals, interrupt_on_signals
from imagenet_fast.metrics.console import verdict
from imagenet_fast.metrics.exit_status import OPENED
from imagenet_fast.metrics.run_dir import RunDir
from imagenet_fast.metrics.run_result import NOTHING_LOST, STOPPED_WORDS, RunResult, read_outcome
from imagenet_fast.recipe.job import AnyJob, Job, write_job
from imagenet_fast.training.run_lock import ended_run, locked

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # torchrun forwards them to the ranks
_LAST_CALL_S = 10  # how long the minimum number of nodes waits for more
_SETTLING_S = 40  # on top of the grace time: other nodes' ranks end, and a lost node is noticed
_LEAST_THREADS, _MOST_THREADS = 10, 40  # of a rank, besides those that compute and decode
_ENDING_S = 10  # on top of the grace time: after it, ranks are killed


def launch(job: Job, nodes: LaunchConfig) -> int:
    """Train ``job`` on this node's ranks and those of the other ``nodes``; return the command's exit code.

    The job file is in a temporary directory of this launcher, not in the run directory. Which node is the first, and so
    owns the run directory, is known only when all have met. Nodes that share the directory would overwrite each other's
    files.

    Raises:
        UserError: If the run directory cannot be written, the nodes cannot meet, or ranks refuse.
        JobAborted, KeyboardInterrupt: If a rank failed, or a signal came, before a run had begun.
    """
    if job.resume and (ended := ended_run(job)) is not None:  # other nodes may be done: they would not come
        print(f"{verdict(vars(ended))}\n{job.folder} had ended so.")
        return ended.exit_code
    run = RunDir(job.folder)
    run.check_writable(job.resume)
    interrupted, code, cause = False, 0, ""
    with tempfile.TemporaryDirectory(prefix="imagenet-fast-") as folder:
        launcher_dir = Path(folder)
        try:
            code, cause = run_ranks(job, launcher_dir, nodes, job.recipe.checkpoint.grace_s)
        except KeyboardInterrupt:
            interrupted = True
        ignore_signals()  # what is left takes milliseconds, and is to be written
        left = read_outcome(launcher_dir)
        has_run = (launcher_dir / OPENED).exists()  # rank 0 is here
    if left is None and not has_run:
        if interrupted:
            raise KeyboardInterrupt
        if code:
            raise UserError(cause) if code == 2 else JobAborted(cause)
        return 0
    outcome = left or RunResult.of(job.name, job.recipe, job.batching)
    if interrupted and outcome.status == "failed":
        outcome.status = "interrupted"
        saved = any(run.checkpoints.glob(f"step-*/{MANIFEST}"))
        then = "goes on from the last checkpoint" if saved else "begins again, as no checkpoint was written"
        outcome.message = outcome.message or (
            f"{STOPPED_WORDS}, and its ranks were killed before they had saved; {job.resuming} {then}"
        )
    elif code and not interrupted and (outcome.status != "preempted" or outcome.message.startswith(NOTHING_LOST)):
        outcome.status = "failed"  # a rank that reports no loss was stopped since another one failed
        if code < 0 or outcome.message.startswith(NOTHING_LOST):  # of a killed rank others only know that it is silent
            outcome.message = cause
        outcome.message = outcome.message or cause
        if code != 2:
            there = f"; what there is of the run lies in {job.folder}" if has_run else ""
            print(f"failed: {outcome.message}{there}")
    if outcome.status in ("preempted", "interrupted") and not (has_run and outcome.run_s):  # else rank 0 has told it
        print(outcome.message)
    if has_run and not (job.elastic and interrupted):  # after this node left, others may have resumed
        # rank 0 may have written it; a new run has started; the disk is full
        with suppress(OSError, UserError), locked(job.folder):
            outcome.write(job.folder)
    if code == 2:
        raise UserError(cause)
    return outcome.exit_code


def run_ranks(job: AnyJob, launcher_dir: Path, nodes: LaunchConfig, grace_s: float = 20.0) -> tuple[int, str]:
    """Run ``job`` on this node's ranks, once the other nodes have arrived, until all ranks have ended.

    The job file is in ``launcher_dir``, where ranks leave their messages and positions. After a signal they have
    ``grace_s`` seconds to end.

    Returns:
        The exit code of the rank that failed first and how it ended, or 0 and an empty string. If ranks report a user
        error, the code is 2, and the first one's message is returned.

    Raises:
        UserError: If the nodes cannot meet.
        JobAborted: If nodes that may leave and join do not meet again.
        KeyboardInterrupt: If a signal stopped this process.
    """
    interrupt_on_signals()  # until torchrun has started ranks and handles signals itself
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(grace_s) + _ENDING_S)
    path = launcher_dir / f"{job.task}.json"
    write_job(job, path)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # torchrun's own report of a failure, which ours replaces
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_per_rank(nodes.ranks_each)))
    if limit := refused_threads(nodes.ranks_each * _LEAST_THREADS):
        raise UserError(f"the ranks of this node cannot be started: {limit}")
    met = meet(nodes.endpoint, nodes.count, nodes.join_timeout_s, nodes.least)
    where = [f"--rdzv-endpoint={met.endpoint}", f"--rdzv-id={met.name}"]
    if nodes.least is None:
        count, where = str(nodes.count), [*where, f"--node-rank={met.number}"]
    else:
        count, where = f"{nodes.least}:{nodes.count}", [*where, *_elastic_options(met, nodes.join_timeout_s + grace_s)]
    # torchrun would no longer ignore what it is told to handle, such as SIGHUP under nohup.
    handled = [name for name in _SIGNALS if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN]
    options = torchrun.get_args_parser().parse_args(
        [f"--nnodes={count}", f"--nproc-per-node={nodes.ranks_each}", f"--max-restarts={nodes.restarts}", *where]
        + [f"--signals-to-handle={','.join(handled)}", "--module", "imagenet_fast.launch"]
    )
    if os.environ.get("TORCH_CPP_LOG_LEVEL") == "FATAL":  # set by our command line for launchers
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    hosts = [f"{host.address}={host.namespace}" for host in nodes.hosts]
    options.training_script_args = [str(path), str(nodes.join_timeout_s), str(os.getpid()), *hosts]
    code, cause = 0, ""
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        limit = refused_threads(nodes.ranks_each * (_MOST_THREADS + 3 * cores_per_rank(nodes.ranks_each)))
        cause = describe_exit(rank, end, launcher_dir) + (limit and f": {limit}")
    except SignalException:
        raise KeyboardInterrupt from None
    except DistError as error:
        code, cause = 1, _why_ended(error, nodes)
    except RendezvousError as error:
        raise JobAborted(_why_ended(error, nodes)) from None
    except AttributeError as error:  # torchrun's agent has no result if this node was not needed until the end
        if nodes.least is None or error.name != "is_failed":
            raise
    finally:
        interrupt_on_signals()  # torchrun leaves its own handlers, whose exception nobody would catch
    if code:
        cause, code = first_error_in(launcher_dir) or (cause, code)
    return code, cause


def _elastic_options(met: Meeting, join_timeout_s: float) -> list[str]:
    """Return the options by which torchrun has the nodes meet again, in the same store, whenever one leaves or joins.

    Each time another node may become the first, and a new store is made there for the ranks. Hence torchrun must not
    share its store: nodes that had joined before would keep its old address.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    holds = met.number == 0
    route = None if holds else route_to(met.endpoint.host)
    seconds = {"join_timeout": math.ceil(join_timeout_s) + _SETTLING_S, "last_call_timeout": _LAST_CALL_S}
    settings = {"is_host": int(holds), **seconds}
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-conf={','.join(f'{key}={value}' for key, value in settings.items())}",
        f"--local-addr={route.address if route else met.endpoint.host}",
    ]


def _why_ended(error: Exception, nodes: LaunchConfig) -> str:
    again = "the same command on every node goes on where the run was saved"
    match error:
        case RendezvousTimeoutError() if nodes.least is not None:
            return f"fewer than --nodes {nodes.least} are left at {nodes.endpoint}, and no others came in time; {again}"
        case RendezvousClosedError() | RendezvousConnectionError() if nodes.endpoint is not None:
            return f"the nodes at {nodes.endpoint} have ended; see what they say, and {again}"
        case DistError() if nodes.endpoint is not None:
            return f"the node at {nodes.endpoint} ended while this one was still at work"
        case _:
            return f"the ranks of this node could not be started or kept together ({first_line(error)})"
