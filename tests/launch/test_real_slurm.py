"""The script of `launch slurm` as it is, in a real Slurm: two nodes of this machine, in namespaces of their own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from imagenet_fast.distributed.ranks import kill_with_parent
from tests.e2e.command import COMMAND, environment, events_of, in_process, outcome_of, setting, wait_for

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.usefixtures("root"),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="Slurm is not installed (slurm-wlm, munge)"),
]

CLUSTER = """
cd $0
ip link set lo up; ip link add d0 type veth peer name d1; ip address add 10.66.0.1/24 dev d0; ip link set d0 up
(cat /etc/hosts; echo 10.66.0.1 n1 n2) >hosts; mount --bind hosts /etc/hosts
for made in /run/munge /var/lib/munge /var/log/munge; do mkdir -p $made; mount -t tmpfs -o mode=755 none $made; done
(umask 077; head -c 1024 /dev/urandom >/var/lib/munge/key); munged --force --key-file=/var/lib/munge/key
slurmctld; slurmd -N n1; slurmd -N n2; exec sleep infinity
"""

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(10.66.0.1)
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
KillWait=60
NodeName=n[1-2] NodeHostname={host} NodeAddr=10.66.0.1 Port=[27001-27002] CPUs=2
PartitionName=all Nodes=n[1-2] Default=YES
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Calls one of Slurm's commands on the first node, and returns what it prints."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=os.uname().nodename.partition(".")[0]))
    own = environment(SLURM_CONF=str(folder / "slurm.conf"))
    apart = ["unshare", "-mnp", "--fork", "--kill-child", "--mount-proc", "bash", "-c", CLUSTER, folder]
    cluster = subprocess.Popen(apart, env=own, preexec_fn=kill_with_parent)
    first = Path(f"/proc/{cluster.pid}/task/{cluster.pid}/children")

    def call(*words: str | Path) -> str:
        inside = ["nsenter", "-t", first.read_text().strip(), "-m", "-n", "-p", "--", *words]
        return subprocess.run(inside, env=own, cwd=Path.cwd(), capture_output=True, text=True, check=False).stdout

    try:
        wait_for(lambda: call("sinfo", "-ht", "idle", "-o", "%D") == "2\n")
        yield call
    finally:
        cluster.kill()
        cluster.wait()


class Batch:
    """A job whose ranks train in ``run``."""

    def __init__(self, slurm: Callable[..., str], run: Path, epochs: int, *options: str) -> None:
        script = run.with_suffix(".sh")
        where = ("--nodes", "2", "--no-gpus", "--cores", "1", "--out", str(run), "--file", str(script))
        in_process("launch", "slurm", "--recipe", "smoke", *setting(f"epochs={epochs}"), *where, *options)
        self.slurm, self.run = slurm, run
        self.number = slurm("sbatch", "--parsable", "-o", run.with_suffix(".out"), script).strip()

    def has_saved(self) -> bool:
        return any(self.run.glob("checkpoints/step-*/manifest.json"))

    def awaited(self, state: str) -> None:
        """Wait until Slurm says so."""
        said = partial(self.slurm, "scontrol", "show", "job", self.number)
        wait_for(lambda: bool(re.search(rf"JobState=(?:{state})\b", said())), timeout_s=600)


@pytest.mark.parametrize("program", [(), ("env", "-i", f"PATH={os.environ['PATH']}", *COMMAND)], ids=["", "emptied"])
def test_nodes_train_together_also_where_a_container_empties_the_environment(
    program: tuple[str, ...], slurm: Callable[..., str], tmp_path: Path
):
    job = Batch(slurm, tmp_path / "run", 2, *(("--program", shlex.join(program)) if program else ()))
    job.awaited("COMPLETED|FAILED")
    assert (outcome_of(job.run)["world_size"], outcome_of(job.run)["status"]) == (2, "finished")


@pytest.mark.parametrize("kind", ["told of its end", "a rank lost"])
def test_a_job_goes_on(kind: str, slurm: Callable[..., str], tmp_path: Path):
    """Queued again by its shell after a warning of Slurm's, or with ranks started again in the same step."""
    job = Batch(slurm, tmp_path / "run", 6)
    wait_for(job.has_saved, timeout_s=300)
    if kind == "a rank lost":
        slurm("pkill", "-KILL", "-n", "-f", "imagenet_fast.launch")  # in the processes of these namespaces
    else:
        slurm("scancel", "--batch", "--signal=USR1", job.number)
        job.awaited("PENDING")  # for two minutes
    job.awaited("COMPLETED|FAILED")
    assert outcome_of(job.run)["status"] == "finished"
    assert len(events_of(job.run, "resume")) == 1


def test_a_job_that_is_cancelled_has_saved_and_is_not_queued_again(slurm: Callable[..., str], tmp_path: Path):
    job = Batch(slurm, tmp_path / "run", 400)
    wait_for(job.has_saved, timeout_s=300)
    slurm("scancel", job.number)
    job.awaited("CANCELLED")
    wait_for(lambda: (job.run / "outcome.json").is_file())
    assert outcome_of(job.run)["status"] == "preempted"
    assert "and saved" in outcome_of(job.run)["message"]
