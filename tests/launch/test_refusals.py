"""What a rank refuses is heard, whichever is ended before it speaks, and is not tried again; so are signals."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from imagenet_fast import errors
from imagenet_fast.checkpoint.folder import Manifest
from imagenet_fast.distributed.network import Endpoint
from imagenet_fast.distributed.ranks import TORCHRUN, rank_info_from_env
from imagenet_fast.launch import launcher, signals
from imagenet_fast.launch.nodes import LaunchConfig
from imagenet_fast.launch.rank import train_as_rank
from imagenet_fast.recipe.job import Job, write_job
from imagenet_fast.run.launcher_dir import LauncherDir
from imagenet_fast.run.run_dir import RunDir
from imagenet_fast.training.trainer import Trainer
from tests.conftest import make_images, refuses, tiers
from tests.e2e.command import COMMAND, Forked, environment, events_of, outcome_of, setting, train_here
from tests.ports import free_port
from tests.ranks import run, with_ranks
from tests.root import as_user
from tests.training.jobs import job_of


def test_a_refusal_is_heard_though_rank_0_is_ended_before_it_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(errors, "_report", errors._report[:])
    launcher_dir = LauncherDir(tmp_path)
    sentence = os.fsdecode(b"caf\xe9.jpg") + " cannot be decoded; replace it"  # a name that is no UTF-8

    def torchrun(_: object) -> None:
        errors.report_errors_by(partial(launcher_dir.leave, "failed"))  # as a rank
        with pytest.raises(SystemExit) as end:
            errors.exit_with_error(sentence)
        assert end.value.code == 2
        raise failed(-signal.SIGTERM)

    monkeypatch.setattr("torch.distributed.run.run", torchrun)
    assert launcher.run_ranks(job(tmp_path), launcher_dir, LaunchConfig(2)) == (2, sentence)


def failed(code: int) -> ChildFailedError:
    return ChildFailedError("imagenet_fast.launch", {1: ProcessFailure(1, 4711, code, "")})


@pytest.mark.ci
def test_what_a_rank_refuses_or_warns_of_is_printed_once_and_ends_a_run_that_may_restart(tmp_path: Path):
    images = make_images(tmp_path / "images", train=30, val=6)
    bad = sorted(images.glob("train/*/*.jpg"))[7]
    bad.write_bytes(b"no image")
    run = tmp_path / "run"
    code, printed, said = Forked(
        tmp_path, "train", "--recipe", "demo", "--data", str(images), "--nproc", "2", "--out", str(run),
        "--max-restarts", "3", *setting("data.loader=threads", "global_batch=4", "micro_batch=2", "epochs=2",
        "reference_ranks=2", "checkpoint.every_steps=1", "data.prefetch=1", "target_top1=0.85"),
    ).ended()  # fmt: skip
    assert code == 2, printed + said
    warning, error = said.splitlines()
    assert warning == "warning: target_top1 is 0.85 %; did you mean 85?"
    assert re.match(f"error: .*{re.escape(str(bad))}", error)
    assert not events_of(run, "resume")


@pytest.mark.ci
@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("most", [3, *(pytest.param(most, marks=pytest.mark.weekly) for most in (2, 12, 23, 33))])
def test_a_limit_of_processes_and_threads_is_named_wherever_it_is_met(most: int, tmp_path: Path):
    """By the launcher, by torchrun, by a rank, or by torch in one, which aborts."""
    out = tmp_path / "run"
    out.mkdir()
    out.chmod(0o777)
    limited = [*as_user(47_111), "bash", "-c", f'ulimit -u {most}; exec "$0" "$@"', *COMMAND]
    done = subprocess.run(
        [*limited, "train", "--recipe", "smoke", "--nproc", "2", "--set", "epochs=1", "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=240, env=environment(HOME=str(out)),
    )  # fmt: skip
    said = done.stderr + done.stdout
    assert done.returncode in (1, 2), said
    assert "Traceback" not in said
    assert ": no more processes and threads may be started; raise `ulimit -u`, or the " in said


@pytest.mark.parametrize("name", tiers(["events.jsonl"], ["environment.json"]))
@with_ranks(1)
def test_a_run_whose_own_files_are_in_the_way_says_so(name: str, tmp_path: Path):
    train_here(job(tmp_path))
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    refuses(rf"{re.escape(str(tmp_path / name))} cannot be (read|written) ", train_here, job(tmp_path, epochs=2))


def job(folder: Path, epochs: int = 1) -> Job:
    small = {"reference_ranks": 1, "data__train_images": 16, "data__val_images": 3}
    return job_of(folder, resume=epochs > 1, epochs=epochs, **small)


def test_a_local_rank_in_the_shell_silences_nothing(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    """Without RANK this process is no rank, and nobody else would print the error."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert refusal("plan", "--recipe", "absent", "--cluster", "dgx1").startswith("error: there is no recipe 'absent'")


@pytest.mark.parametrize(("code", "fate"), [(-9, "was killed by SIGKILL"), (7, "ended with exit code 7")])
def test_it_is_told_how_the_first_rank_of_this_node_ended(code: int, fate: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("torch.distributed.run.run", Mock(side_effect=failed(code)))
    assert launcher.run_ranks(job(tmp_path), LauncherDir(tmp_path), LaunchConfig(2)) == (code, f"rank 1 {fate}")


def test_checkpoints_that_lead_nowhere_are_refused_before_a_step_is_lost(tmp_path: Path):
    """As a link to a disk that is not mounted; a link to a directory is one."""
    checkpoints = RunDir(tmp_path).checkpoints
    checkpoints.symlink_to(tmp_path / "disk")
    refuses(rf"cannot be written to {tmp_path}: {checkpoints} is no directory; give", RunDir(tmp_path).check_writable)
    (tmp_path / "disk").mkdir()
    RunDir(tmp_path).check_writable()


HERE = "the ranks of this node could not be started or kept together"


@pytest.mark.parametrize(
    ("error", "endpoint", "sentence"),
    [
        (DistError("no store"), None, f"{HERE} (no store)"),
        (DistError("no store"), Endpoint("a", 1), "the node at a:1 ended while this one was still at work"),
        (RendezvousConnectionError("no way"), None, f"{HERE} (no way)"),
        (RendezvousConnectionError("no way"), Endpoint("a", 1), "the nodes at a:1 have ended; see what they say, and "),
        (RendezvousTimeoutError("too late"), Endpoint("a", 1), f"{HERE} (too late)"),
    ],
)
def test_what_torchrun_says_is_quoted_where_its_cause_is_not_known(
    error: Exception, endpoint: Endpoint | None, sentence: str
):
    assert launcher._why_ended(error, LaunchConfig(2, 2, endpoint)).startswith(sentence)


LOST, KEPT = "stopped by a signal in step 5, and not saved", "stopped by a signal, and nothing is lost"
SILENT, KILLED = "rank 1 on a stopped answering in data", "rank 1 on a was killed by SIGKILL in data"
ENDS = [
    ([("preempted", KEPT)], (0, ""), "preempted", KEPT),
    ([("preempted", KEPT)], (4, "rank 0 ended"), "preempted", KEPT),
    ([("preempted", KEPT), ("interrupted", LOST)], (4, "rank 1 ended"), "interrupted", LOST),
    ([("preempted", KEPT)], (-9, KILLED), "failed", KILLED),
    ([("failed", SILENT)], (-9, KILLED), "failed", KILLED),
    ([("finished", "")], (-9, KILLED), "failed", KILLED),
    ([], KeyboardInterrupt, "interrupted", "killed before they had saved; .* begins again, as no checkpoint .*"),
    ([("step", 4)], KeyboardInterrupt, "interrupted", "killed before they had saved; .* goes on from step 4"),
]
"""What ranks have left, how the first to fail has ended, and what the launcher makes of it."""


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(("left", "ended", "status", "message"), ENDS)
def test_the_launcher_says_how_the_run_has_ended(
    left: list[tuple[Any, Any]], ended: Any, status: str, message: str, tmp_path: Path, monkeypatch, capsys
):
    def ranks(job: Job, launcher_dir: LauncherDir, *_: object) -> tuple[int, str]:
        launcher_dir.opened.touch()
        for number, (how, what) in enumerate(left):
            if how == "step":
                (checkpoint := RunDir(tmp_path).checkpoints / "step-00000004").mkdir(parents=True)
                Manifest(step=what, epoch=1, world=2, layout={}, number=1, files={}).write(checkpoint)
            else:
                LauncherDir(launcher_dir.folder, number).leave(how, what)
        if ended is KeyboardInterrupt:  # as by SIGQUIT
            raise ended
        return ended

    monkeypatch.setattr(launcher, "run_ranks", ranks)
    assert launcher.launch(job(tmp_path), LaunchConfig(2)) == (4 if status == "preempted" else 1)
    assert outcome_of(tmp_path)["status"] == status
    assert re.search(f"{message}$", outcome_of(tmp_path)["message"])
    assert re.search(f"failed: {message}; what" if status == "failed" else "", capsys.readouterr().out)


@pytest.mark.usefixtures("own_signals")
def test_where_nodes_may_leave_a_launcher_leaves_the_outcome_to_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Which was here once, and may be on another node by now."""

    def ranks(job: Job, launcher_dir: LauncherDir, *_: object) -> tuple[int, str]:
        launcher_dir.opened.touch()
        return -9, KILLED

    monkeypatch.setattr(launcher, "run_ranks", ranks)
    assert launcher.launch(replace(job(tmp_path), elastic=True), LaunchConfig(2)) == 1
    assert not [*tmp_path.iterdir()]


def test_a_signal_to_one_rank_during_the_start_stops_all_without_loss(tmp_path: Path):
    """It opens the data; the other waits for it."""
    with free_port() as port:
        assert run(2, _start, tmp_path, port, fresh=True) == [4, 4]


def _start(folder: Path, port: int) -> int:
    def open_data(trainer: Trainer) -> None:
        if trainer.world.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        dist.barrier()

    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with patch.object(Trainer, "open_data", open_data), patch.object(signals, "GRACE_S", 60.0):
        code = train_as_rank(job_of(folder), rank_info_from_env(), 60.0)
    dist.destroy_process_group()  # as the end of the process does
    return code


@pytest.mark.usefixtures("own_signals")
def test_a_node_that_comes_when_the_run_has_ended_ends_as_it_did_and_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As a pod that was evicted while the others ended, and is made anew."""
    monkeypatch.setattr(launcher, "run_ranks", Mock(return_value=(0, "")))
    ended = replace(job(tmp_path), resume=True)
    run(1, train_here, ended)
    assert launcher.launch(ended, LaunchConfig(1, 2, Endpoint("node0", 1))) == 0
    launcher.run_ranks.assert_not_called()
    told = f"Trained to the end; the recipe has no target.\n{tmp_path} had ended so; its weights are {tmp_path}"
    assert capsys.readouterr().out == f"{told}/checkpoints/final.safetensors\n"
    launcher.launch(job(tmp_path, epochs=2), LaunchConfig(1, 2, Endpoint("node0", 1)))
    launcher.run_ranks.assert_called_once()


@pytest.mark.usefixtures("own_signals")
def test_after_torchrun_a_signal_interrupts_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torchrun leaves its handlers, whose exception nobody would catch; what is ignored stays so, as under nohup."""
    told: list[str] = []

    def as_torchrun(arguments: argparse.Namespace) -> None:
        told.extend(arguments.signals_to_handle.split(","))
        signal.signal(signal.SIGINT, lambda *_: 1 / 0)

    monkeypatch.setattr("torch.distributed.run.run", as_torchrun)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert launcher.run_ranks(job(tmp_path), LauncherDir(tmp_path), LaunchConfig(1)) == (0, "")
    assert told == ["SIGINT", "SIGTERM", "SIGUSR1", "SIGQUIT"]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.ci
@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ("mount -t tmpfs -o noexec none $TMPDIR", "compile true cannot load what it makes in "),
        ("export PATH=/sbin/nothing", "compile true needs a compiler, and there is no g++ here; install one"),
        ("echo 127.0.0.1 here >$TMPDIR/hosts && mount --bind $TMPDIR/hosts /etc/hosts", ""),
        ("ip link set lo down", "the ranks of this node cannot reach each other at 127.0.0.1 ("),
        ("ip address del 127.0.0.1/8 dev lo", "the ranks of this node cannot reach each other at 127.0.0.1 ("),
        ("ip link set lo down && ip link set lo up && ip address replace 127.0.0.1/8 dev lo", ""),
        (f"hostname {64 * 'a'}", f"{64 * 'a'} cannot be a host's name, since a part of it is empty or has more than"),
    ],
    ids=["noexec", "no compiler", "no localhost", "no loopback", "no IPv4", "as it says", "a long name"],
)
def test_a_node_that_lacks_something_is_told_what(node: str, sentence: str, tmp_path: Path):
    """In namespaces of their own."""
    run = [*COMMAND, "train", "--recipe", "smoke", "--nproc", "1", "--out", str(tmp_path / "run")]
    compiles = str("compile" in sentence).lower()
    run += setting(f"compile={compiles}", "epochs=1", "data.train_images=64", "data.val_images=15")
    # The variable is torch's, where it has compiled.
    script = f'unset TORCHINDUCTOR_CACHE_DIR; ip link set lo up && {node} && exec "$@"'
    shell = ["unshare", "-nmu", "sh", "-c", script, "sh", *run]
    done = subprocess.run(shell, env=environment(TMPDIR=str(tmp_path)), capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (2 if sentence else 0, False), done.stderr[-1000:]
    assert f"error: {sentence}" in done.stderr if sentence else not done.stderr


@pytest.mark.ci
def test_a_rank_whose_launcher_was_killed_before_it_began_ends_at_once(tmp_path: Path):
    write_job(job(tmp_path), tmp_path / "train.json")
    with free_port() as port:
        place = dict(zip(TORCHRUN, ("0", "2", "0", "2"), strict=True)) | {"MASTER_ADDR": "127.0.0.1"}
        rank = [sys.executable, "-m", "imagenet_fast.launch", tmp_path / "train.json", "60"]
        launcher = ["sh", "-c", '"$@" $$ & kill -KILL $$', "sh", *rank]
        told = environment(**place, MASTER_PORT=str(port))
        subprocess.run(launcher, env=told, capture_output=True, timeout=20)  # the rank holds the pipes until it ends
