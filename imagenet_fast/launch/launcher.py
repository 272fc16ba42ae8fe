"""Launch ranks by torchrun, on this node and others, and report how they ended."""

from __future__ import annotations

import logging
import math
import os
import signal
from contextlib import suppress

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

from imagenet_fast.checkpoint.folder import read_survey
from imagenet_fast.distributed.cores import cores_per_rank
from imagenet_fast.distributed.heartbeat import describe_exit
from imagenet_fast.distributed.join import Meeting, meet
from imagenet_fast.distributed.network import route_to
from imagenet_fast.errors import JobAborted, UserError, first_line
from imagenet_fast.launch.nodes import LaunchConfig, refused_threads
from imagenet_fast.launch.signals import ENDS, ignore_signals, interrupt_on_signals
from imagenet_fast.recipe.job import AnyJob, Job, write_job
from imagenet_fast.run.launcher_dir import LauncherDir
from imagenet_fast.run.result import STOPPED, STOPPED_WORDS, RunResult, Status, read_outcome
from imagenet_fast.run.run_dir import RunDir
from imagenet_fast.training.run_lock import describe_ended, ended_run, locked

_LAST_CALL_S = 10  # how long the minimum number of nodes waits for more
_SETTLING_S = 40  # on top of the grace time: other nodes' ranks end, and a lost node is noticed
_LEAST_THREADS, _MOST_THREADS = 10, 40  # of a rank, besides those that compute and decode
_WORST_FIRST = ("failed", "interrupted", "preempted", "finished", "reached")
_ENDING_S = 10  # on top of the grace time: after it, ranks are killed


def launch(job: Job, nodes: LaunchConfig) -> int:
    """Train ``job`` on this node's ranks and those of the other ``nodes``; return the command's exit code.

    The job file is in a temporary directory of this launcher, not in the run directory. Which node is the first, and so
    owns the run directory, is known only when all have met. Nodes that share the directory would overwrite each other's
    files.

    Raises:
        UserError: If the run directory cannot be written, the nodes cannot meet, or ranks refuse.
        JobAborted: If nodes that may leave and join do not meet again.
        KeyboardInterrupt: If a signal came before a run had begun.
    """
    if job.resume and (ended := ended_run(job)) is not None:  # other nodes may be done: they would not come
        print(describe_ended(job, ended))
        return ended.exit_code
    run = RunDir(job.folder)
    run.check_writable(job.resume)
    with LauncherDir.temporary() as launcher_dir:
        try:
            code, cause = run_ranks(job, launcher_dir, nodes, job.recipe.checkpoint.grace_s)
        except KeyboardInterrupt:
            code, cause = STOPPED, ""
        ignore_signals()  # what is left takes milliseconds, and is to be written
        ends, has_run = launcher_dir.ends(), launcher_dir.opened.exists()
    stopped = code == STOPPED or -code in ENDS  # a signal kills a rank that still imports
    if stopped and not ends and not has_run:
        raise KeyboardInterrupt
    if not code and not ends:  # as on a node that was not needed until the end, or without space for what ranks leave
        left = read_outcome(job.folder) if has_run else None
        return 0 if left is None else left.exit_code
    status: Status
    if code and not stopped:
        status, message = "failed", cause
    elif ends:
        worst = min(ends, key=lambda end: _WORST_FIRST.index(end.status))
        status, message = worst.status or "failed", worst.message
    else:
        saved = max((manifest.step for manifest in read_survey(run.checkpoints)[0].values()), default=0)
        killed = f"{STOPPED_WORDS}, and its ranks were killed before they had saved; {job.going_on(saved)}"
        status, message = "interrupted", killed
        print(message)
    outcome = RunResult.of(job.name, job.recipe, job.batching)
    if has_run and not job.elastic:  # else the run may be another node's by now
        with suppress(OSError, UserError), locked(job.folder):  # a new run has started; the disk is full
            outcome = read_outcome(job.folder) or outcome
            outcome.status, outcome.message = status, message
            outcome.write(job.folder)
    outcome.status = status
    if code == 2:
        raise UserError(cause)
    if status == "failed":
        print(f"failed: {message}" + (f"; what there is of the run lies in {job.folder}" if has_run else ""))
    return outcome.exit_code


def run_ranks(job: AnyJob, launcher_dir: LauncherDir, nodes: LaunchConfig, grace_s: float = 20.0) -> tuple[int, str]:
    """Run ``job`` on this node's ranks, once the other nodes have arrived, until all ranks have ended.

    The job file is in ``launcher_dir``, where ranks leave what they have to say. After a signal they have ``grace_s``
    seconds to end.

    Returns:
        0 and an empty string if all ranks succeed; else the exit code of the rank that failed first and how it ended.
        1 or 2 and the first message if ranks report errors, 2 if the user can fix one; ``STOPPED`` if all were stopped.

    Raises:
        UserError: If the nodes cannot meet.
        JobAborted: If nodes that may leave and join do not meet again.
        KeyboardInterrupt: If a signal stopped this process.
    """
    interrupt_on_signals()  # until torchrun has started ranks and handles signals itself
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(grace_s) + _ENDING_S)
    path = launcher_dir.job(job.task)
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
    # What torchrun handles it forwards to the ranks, and no longer ignores, as SIGHUP under nohup.
    handled = [number.name for number in (*ENDS, signal.SIGQUIT) if signal.getsignal(number) is not signal.SIG_IGN]
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
        left = LauncherDir(launcher_dir.folder, failure.local_rank)
        cause = describe_exit(rank, end, left.heartbeat) + (limit and f": {limit}")
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
    ends, least = launcher_dir.ends() if code else [], 2 if code < 0 else 1  # of a killed rank others know little
    if failures := [end for end in ends if end.code >= least]:
        code, cause = max(end.code for end in failures), failures[0].message
    elif code > 0 and ends:
        code = STOPPED
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
