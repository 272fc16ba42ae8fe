"""Ranks on this node: torchrun, inside this process, with its ends made readable."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Literal

from imagenet_fast.launch.nodes import Nodes, meet
from imagenet_fast.ranks.cores import usable_cores

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # torchrun passes them on to the ranks


def run_ranks(task: Literal["train", "eval"], job: Path, nodes: Nodes) -> tuple[int, str]:
    """Do what the file ``job`` says on this node's ranks, once the other nodes have come, until all have ended.

    Returns the exit code of the rank that failed first and what became of it, or 0 and nothing. Raises UserError
    where the nodes cannot meet, and KeyboardInterrupt when told to stop.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    from imagenet_fast.ranks.whereabouts import tell_ended

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # torchrun's own account of an end, which we give instead
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nodes.ranks_each)))
    endpoint = nodes.endpoint
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"]
    if endpoint is not None:
        met = meet(endpoint, nodes.count, nodes.patience_s)
        where = [f"--node-rank={met.number}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={met.name}"]
    torchrun = get_args_parser().parse_args(
        [f"--nnodes={nodes.count}", f"--nproc-per-node={nodes.ranks_each}", f"--max-restarts={nodes.restarts}", *where]
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
        return code, tell_ended(rank, fate, job.parent)
    except SignalException:
        raise KeyboardInterrupt from None
    except DistError:
        return 1, f"the node at {endpoint} ended while this one was still at work"
    return 0, ""
