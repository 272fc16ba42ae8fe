"""Train with many ranks on this node, and measure what grows with their number.

python -m experiments.ranks [RANKS...] [--json FILE]    16, 32, ...; default: 64 256 512, which take 15 GB of memory

Each rank is a process, forked from this one after the imports, and does what a rank of our launcher does: it meets the
others, trains a model of a few thousand values, evaluates, saves, resumes and stops. Launchers of eight ranks meet
before, and the first holds the store. Gloo connects a rank to those that it sends to. Only its rings are stood in for,
by trees: they take ranks squared messages in all, which cluster nodes send at once, and two cores one after another.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NoReturn

import numpy.random  # noqa: F401  (by each rank otherwise)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast.cli.options import show_rows
from imagenet_fast.distributed.cores import freeze_gc, raise_open_files
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.distributed.join import meet
from imagenet_fast.distributed.network import Endpoint
from imagenet_fast.distributed.ranks import RankInfo, kill_with_parent
from imagenet_fast.errors import UserError
from imagenet_fast.launch import rank as launch_rank
from imagenet_fast.launch.job_setup import on_ranks, plan_job
from imagenet_fast.metrics.tables import Row, column
from imagenet_fast.netlab.forks import RankError
from imagenet_fast.netlab.ranks import Lab
from imagenet_fast.recipe.job import Job
from imagenet_fast.recipe.load import find_file, load_recipe
from imagenet_fast.run.launcher_dir import LauncherDir
from imagenet_fast.training.trainer import Trainer

Fault = Literal["slow", "killed", "hanging", "stopped"]
"""What becomes of the last rank after a few steps; once it has been named as slow, it is stopped."""

NODE = 8  # ranks
LIMIT_S = 600.0  # to meet, and for each thing that is waited for
SETTLED = 4  # steps; as many are an epoch
RANK_BYTES = 12 << 20  # of memory, measured, beside those of an idle one
NOISE = ("frame #", "hostname of the client socket")  # torch's, in a log
TCP_INFO_SEGMENTS = 152  # where the kernel's tcp_info counts segments with data that have come in


@dataclass(frozen=True)
class RanksRow(Row):
    """What so many ranks take."""

    note = (
        "control: processor time of rank 0 between two steps. named: from the fault of the last rank until rank 0 has "
        "the reason. resume: from the first image order to the loaded state, checksums included."
    )

    ranks: int = field(metadata=column("ranks"))
    meet_s: float = field(metadata=column("meet", "s", ".1f"))
    """Seconds from the first fork until all ranks have met and connected."""
    files: int = field(metadata=column("store files"))
    """Most open files of the first launcher, which holds the store."""
    connections: int = field(metadata=column("sockets"))
    """Most sockets among them."""
    requests_per_s: float = field(metadata=column("requests/s", form=".0f"))
    """Messages that come to the store in a second of training."""
    control_s: float = field(metadata=column("control", "ms", ".2f"))
    """Processor time of rank 0's training thread from the end of a step to the next."""
    save_s: float = field(metadata=column("save", "s", ".1f"))
    """Seconds from the end of an evaluation to a complete checkpoint."""
    stop_s: float = field(metadata=column("stop", "s", ".1f"))
    """Seconds from SIGTERM at one rank until all have saved and ended."""
    find_s: float = field(metadata=column("verify", "s", ".1f"))
    """Seconds in which ranks that resume find and verify the checkpoint, and compare their images."""
    resume_s: float = field(metadata=column("resume", "s", ".1f"))
    """Seconds until as many ranks have built the model and loaded it, verification included."""
    resume_half_s: float = field(metadata=column("on half", "s", ".1f"))
    """The same on half the ranks."""
    slow_s: float = field(metadata=column("slow named", "s", ".1f"))
    """Seconds until a rank of several times the others' step time is named."""
    killed_s: float = field(metadata=column("killed", "s", ".1f"))
    """Seconds until a killed rank is named."""
    hanging_s: float = field(metadata=column("hanging", "s", ".1f"))
    """Seconds until a rank that hangs is named; ``timeout.step_s`` is among them."""
    memory: float = field(metadata=column("a rank", "MB", ".1f"))
    """Private memory of a rank after the first evaluation, in bytes."""
    step_limit_s: float
    """``timeout.step_s`` of the runs."""

    @property
    def title(self) -> str:
        """Say where all ranks were."""
        return f"all ranks on this node of {os.cpu_count()} processors, timeout.step_s {self.step_limit_s:g}"


def measure(counts: Sequence[int]) -> list[RanksRow]:
    """Train with each number of ranks, and with faults.

    Raises:
        UserError: A number is no multiple of 16, or memory does not suffice.
        RankError: A rank failed otherwise than it was meant to.
    """
    for count in counts:
        if count % (2 * NODE):
            raise UserError(f"{count} ranks are no multiple of {2 * NODE}: half of them fill nodes of {NODE}")
        Lab(1, count).check_memory(RANK_BYTES, f"{count} ranks", "take fewer")
    raise_open_files()
    freeze_gc()  # else each rank's collections would copy all that it shares with others
    return [_measure(count) for count in counts]


def tiny(classes: int) -> nn.Module:
    """Return a network of a few thousand values, for images of 16 pixels."""
    norm = nn.BatchNorm1d(32)
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(192, 32), norm, nn.ReLU(), nn.Linear(32, classes))


def _measure(count: int) -> RanksRow:
    step_limit_s = 10.0 + count / 8  # of two cores for so many
    keys = (
        "model.kind=python", f"model.name={__name__}:tiny", "data.image_size=16", "precision.kind=fp32",
        "micro_batch=2",
        f"global_batch={2 * count}", f"data.train_images={2 * SETTLED * count}", f"data.val_images={2 * count}",
        "epochs=1000", "first_eval=1", "eval_every=1000", "log_every=1", "sync.collective=native",
        "sync.threshold_mb=1", "checkpoint.every_minutes=0", f"timeout.step_s={step_limit_s}",
    )  # fmt: skip
    recipe = load_recipe(find_file("recipe", "smoke"), overrides=keys)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = plan_job("ranks", recipe, count, folder=Path(folder, "run"), resume=True)

        def run(fault: Fault, ranks: int = count) -> dict[str, Any]:
            with _started(on_ranks(job, ranks), fault, Path(folder, f"{fault}-{ranks}")) as forked:
                figures = _observed(forked, fault)
            shown = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
            print(f"{ranks} ranks, one {fault}: {shown}", file=sys.stderr, flush=True)
            return figures

        slow, killed, hanging, half = run("slow"), run("killed"), run("hanging"), run("stopped", count // 2)
    names = ("meet_s", "files", "connections", "requests_per_s", "control_s", "save_s", "stop_s", "memory")
    return RanksRow(
        ranks=count, **{name: slow[name] for name in names}, find_s=killed["find_s"], resume_s=killed["resume_s"],
        resume_half_s=half["resume_s"], slow_s=slow["named_s"], killed_s=killed["named_s"],
        hanging_s=hanging["named_s"], step_limit_s=step_limit_s,
    )  # fmt: skip


@dataclass
class _Forked:
    """The launchers and ranks of one run, and what they have told."""

    job: Job
    folder: Path
    heard: int
    told: int
    begun: float = field(default_factory=time.monotonic)
    launchers: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """Processes that have not been seen to end."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    _rest: bytes = b""

    def fork(self, processes: list[int], function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function`` in a new process, whose output goes to the log."""
        process = os.fork()
        if process:
            processes.append(process)
        else:
            self._become(partial(function, self, *arguments))

    def _become(self, function: Callable[[], object]) -> NoReturn:
        code = 1
        try:
            kill_with_parent()
            log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(log, stream)
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    @property
    def named(self) -> Path:
        """File that is there once the rank with the fault has been named."""
        return self.folder / "named"

    @property
    def log(self) -> Path:
        """What processes have printed."""
        return self.folder / "log"

    def tell(self, what: str, **values: Any) -> None:
        """Tell the parent; a line is shorter than what a pipe takes in one piece."""
        os.write(self.told, json.dumps({"what": what, "at": time.monotonic(), **values}).encode() + b"\n")

    def all(self, what: str) -> list[dict[str, Any]]:
        """Return the messages of a kind that have come so far."""
        return [message for message in self.messages if message["what"] == what]

    def wait(self, condition: Callable[[], Any], what: str, may_end: bool = False) -> Any:
        """Listen until the condition is true, and return it.

        Raises:
            RankError: It takes too long, or a rank has ended before; with ``may_end``, all ranks.
        """
        deadline, before = time.monotonic() + LIMIT_S, len(self.ranks)
        while True:
            while select.select([self.heard], [], [], 0.05)[0]:
                *told, self._rest = (self._rest + os.read(self.heard, 1 << 16)).split(b"\n")
                self.messages += map(json.loads, told)
            ended = len(self.ranks) < (1 if may_end else before)
            if found := condition():
                return found
            if ended or time.monotonic() > deadline:
                printed = self.log.read_text(errors="replace").splitlines()
                lines = [line for line in printed if not any(noise in line for noise in NOISE)]
                said = "\n".join([*lines[:40], "...", *lines[-40:]])
                raise RankError(
                    f"{self.job.batching.ranks} ranks, {what}: not within {LIMIT_S:g} s, or they ended\n{said}"
                )
            self.ranks = [process for process in self.ranks if os.waitpid(process, os.WNOHANG)[0] == 0]


@contextmanager
def _started(job: Job, fault: Fault, folder: Path) -> Iterator[_Forked]:
    """Fork launchers that meet, then ranks that train ``job``; kill all that are left."""
    count, (heard, told) = job.batching.ranks, os.pipe()
    nodes = count // NODE
    for node in range(nodes):
        Path(folder, str(node)).mkdir(parents=True)
    forked = _Forked(job, folder, heard, told)
    try:
        forked.fork(forked.launchers, _hold_store, socket.create_server(("127.0.0.1", 0)), nodes)
        port = forked.wait(lambda: forked.all("store"), "the first launcher")[0]["port"]
        for _ in range(nodes - 1):
            forked.fork(forked.launchers, _join_launchers, Endpoint("127.0.0.1", port), nodes)
        for rank in range(count):
            forked.fork(forked.ranks, _train, RankInfo(rank, count, rank % NODE, NODE), port, fault)
        yield forked
    finally:
        left = [*forked.ranks, *forked.launchers]
        for process in left:
            os.kill(process, signal.SIGKILL)  # nobody has waited for it, so it is ours
        for process in left:
            os.waitpid(process, 0)
        os.close(heard)
        os.close(told)


def _observed(forked: _Forked, fault: Fault) -> dict[str, Any]:
    """Return the figures of a run, once its ranks have ended as they should."""
    count = forked.job.batching.ranks
    met = forked.wait(lambda: len(found := forked.all("met")) == count and found, "meeting")
    built = forked.wait(lambda: len(found := forked.all("built")) == count and found, "building")
    settled = forked.wait(lambda: forked.all("settled"), "the first steps")[0]
    figures = {
        "meet_s": max(message["at"] for message in met) - forked.begun,
        "memory": median(map(_private_bytes, forked.ranks[:NODE])),
        "save_s": settled["save_s"], "control_s": settled["control_s"],
        **{name: max(message[name] for message in built) for name in ("find_s", "resume_s")},
    }  # fmt: skip
    first_node, who = LauncherDir(forked.folder / "0"), f"rank {count - 1} on {socket.gethostname()} "

    def named() -> bool:
        if fault == "slow":
            return who in forked.log.read_text(errors="replace")
        return any(who in end.message for end in first_node.ends())

    if fault != "stopped":
        begun = forked.wait(lambda: forked.all("fault"), "the fault")[0]["at"]
        forked.wait(named, f"naming the {fault} one", True)
        figures["named_s"] = time.monotonic() - begun
        forked.named.touch()
    if fault in ("slow", "stopped"):
        begun = time.monotonic()
        os.kill(forked.ranks[-1], signal.SIGTERM)
        forked.wait(lambda: not forked.ranks, "saving at a stop", may_end=True)
        figures["stop_s"] = time.monotonic() - begun
        if {end.status for end in first_node.ends()} != {"preempted"}:
            raise RankError(f"{count} ranks did not save when one was stopped: {first_node.ends()}; before: {figures}")
    forked.wait(lambda: len(forked.ranks) <= (fault == "hanging"), f"the end after one was {fault}", may_end=True)
    if fault == "slow":
        store = forked.all("store")
        figures |= {name: max(message[name] for message in store) for name in ("files", "connections")}
        first, *_, last = (message for message in store if settled["at"] < message["at"] < begun)
        figures["requests_per_s"] = (last["requests"] - first["requests"]) / (last["at"] - first["at"])
    return figures


def _private_bytes(process: int) -> float:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return 1024.0 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _hold_store(forked: _Forked, free: socket.socket, nodes: int) -> None:
    """Be the first launcher: hold the store, and tell every second what it has to do."""
    endpoint = Endpoint("127.0.0.1", free.getsockname()[1])
    free.close()
    forked.tell("store", port=endpoint.port, files=0, connections=0, requests=0)
    met = meet(endpoint, nodes, LIMIT_S)
    while met:
        files = [*Path("/proc/self/fd").iterdir()]
        counts = [_segments_in(int(file.name)) for file in files if file.is_socket()]
        connected = [count for count in counts if count is not None]
        forked.tell("store", files=len(files), connections=len(connected), requests=sum(connected))
        time.sleep(1)


def _segments_in(file: int) -> int | None:
    """Return the segments with data that came over a TCP connection, one for each short request; None if it is none."""
    with socket.socket(fileno=os.dup(file)) as connection:
        if connection.family == socket.AF_UNIX or connection.type != socket.SOCK_STREAM:
            return None
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("I", info, TCP_INFO_SEGMENTS)[0])


def _join_launchers(forked: _Forked, endpoint: Endpoint, nodes: int) -> None:
    met = meet(endpoint, nodes, LIMIT_S)
    while met:
        signal.pause()


def _train(forked: _Forked, place: RankInfo, port: int, fault: Fault) -> None:
    """Be a rank."""
    node = place.rank // NODE
    os.environ.update(place.variables(node) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_GLOO_LAZY_INIT": "1"})
    torch.set_num_threads(1)
    vars(dist).update(all_reduce=partial(_all_reduce, dist.all_reduce))
    vars(dist.distributed_c10d).update(all_gather=_all_gather)
    vars(launch_rank).update(Trainer=partial(_Observed, forked, fault if place.rank == place.size - 1 else ""))
    launch_rank.train_as_rank(forked.job, place, LIMIT_S, LauncherDir(forked.folder / str(node), place.local_rank))


class _Observed(Trainer):
    """A trainer that tells what it does, and may have a fault."""

    def __init__(self, forked: _Forked, fault: str, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._forked, self._fault = forked, fault
        self._left_s, self._evaluated, self._step_s, self._steps = 0.0, 0.0, 0.0, 0
        self._between: list[float] = []
        forked.tell("met")

    def open_data(self) -> None:
        self._begun = time.monotonic()
        super().open_data()
        self._find_s = time.monotonic() - self._begun

    def build(self, model: nn.Module | None = None) -> None:
        super().build(model)
        self._forked.tell("built", find_s=self._find_s, resume_s=time.monotonic() - self._begun)

    def evaluate(self) -> Any:
        accuracy = super().evaluate()
        self._evaluated = time.monotonic()
        return accuracy

    def train_step(self) -> None:
        if self._steps == SETTLED:  # in a new run, an evaluation was just before
            assert self.checkpoints is not None
            self.checkpoints.last_saved()
            if self.world.is_main:
                saved_s = time.monotonic() - self._evaluated
                self._forked.tell("settled", save_s=saved_s, control_s=median(self._between[1:]))
        elif self._steps:
            self._between.append(time.thread_time() - self._left_s)
        if self._fault and self._steps > SETTLED:
            self._fail()
        begun = time.monotonic()
        super().train_step()
        self._step_s, self._left_s = time.monotonic() - begun, time.thread_time()
        self._steps += 1

    def _fail(self) -> None:
        here.enter("data")
        self._forked.tell("fault")
        match self._fault:
            case "slow":
                until = time.monotonic() + max(2.0, 4 * self._step_s)
                while time.monotonic() < until and not self._forked.named.exists():
                    time.sleep(0.1)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hanging":
                time.sleep(2 * LIMIT_S)


def _all_reduce(
    ring: Callable[..., Any], values: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduce to the group's first rank along a binary tree, and send the result; few numbers go around gloo's ring."""
    if values.numel() <= 8:
        return ring(values, op, group, async_op)
    rank, size, step = dist.get_rank(group), dist.get_world_size(group), 1
    while step < size and not rank & step:
        if rank + step < size:
            dist.recv(arrived := torch.empty_like(values), group=group, group_src=rank + step)
            values.copy_(torch.maximum(values, arrived) if op == dist.ReduceOp.MAX else values + arrived)
        step *= 2
    if rank:
        dist.send(values, group=group, group_dst=rank - step)
    dist.broadcast(values, group=group, group_src=0)
    return None


def _all_gather(parts: list[Tensor], own: Tensor, group: Any = None, async_op: bool = False) -> None:
    """Gather along the same tree, each rank its own part of a sum."""
    together = torch.zeros(len(parts), *own.shape, dtype=own.dtype)
    together[dist.get_rank(group)] = own
    _all_reduce(dist.all_reduce, together, group=group)
    for part, value in zip(parts, together, strict=True):
        part.copy_(value)


def main(arguments: Sequence[str]) -> int:
    """Measure, print the table, and write it as JSON; return the exit code."""
    counts, file = [*arguments], None
    if counts[-2:-1] == ["--json"]:
        counts, file = counts[:-2], Path(counts[-1])
    if not all(count.isdecimal() for count in counts):
        print(__doc__, file=sys.stderr)
        return 2
    show_rows(measure([int(count) for count in counts] or [64, 256, 512]), file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
