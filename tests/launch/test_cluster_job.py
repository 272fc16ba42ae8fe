"""Jobs for clusters: read by those who read them there, and run as far as that goes on one node."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from imagenet_fast.cli.main import app
from imagenet_fast.launch.cluster_job import job_label, parse_time_limit
from imagenet_fast.recipe.load import find_file
from tests.conftest import refuses
from tests.e2e.command import environment, in_process, wait_for

NAMES = (
    "plain", "two words", "it's", 'a "b" c', "$(touch hit) `touch hit` ${HOME} $$ $(MASTER_ADDR)",
    "new\nline\n#SBATCH --nodes=9", "tab\tand\rreturn\\n", "größe-数-🏔\u2028\x85\ufeff", "~;&|<>*?[x]{a,b}!", "-x",
    " : - # % @ ' ",
)  # fmt: skip
IMAGE = "registry.example:5000/imagenet-fast@sha256:0a"
SLURM = ("slurm", "--nodes", "2", "--out", "/runs/a")
K8S = ("k8s", "--nodes", "2", "--image", IMAGE, "--run-claim", "runs")
SSH = ("ssh", "--hosts", "a,me@b", "--out", "/runs/a")

FAKES = {
    # The words of each call, and of a step's how many have been.
    "srun": 'printf "%s\\0" "$@" >"$SEEN/words"; cd "$SEEN" || exit 9\n'
    "trap 'echo >>told; sleep 0.2; exit ${STOPPED:-4}' USR1\n"
    'echo >begun; while [ ! -e end ]; do sleep 0.02; done; read -r code <end; exit "$code"',
    "scontrol": 'echo "$@" >>"$SEEN/scontrol"; exit "${REFUSED:-0}"',
    # As ssh does: the host, and the rest to the host's shell.
    "ssh": '[ "$*" != "${*#-o BatchMode=yes }" ] || exit 9; host=$9; shift 9; HOST=$host exec sh -c "$*"',
    "trainer": 'printf "%s\\0" "$@" >"$SEEN/words-$HOST"; cd "$SEEN" || exit 9\n'
    "trap 'echo \"$HOST\" >>told; echo 4 >end' TERM\n"
    'echo >"begun-$HOST"; while [ ! -e end ]; do sleep 0.02; done; read -r code <end; exit "$code"',
}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch shell whose srun, scontrol and ssh are here, and leave what they saw in ``SEEN``."""
    folder, seen = tmp_path / "bin", tmp_path / "seen"
    for made in (folder, seen):
        made.mkdir()
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    told = {"SLURM_JOB_ID": "1234", "SLURMD_NODENAME": "n7", "PATH": f"{folder}:{os.environ['PATH']}"}
    return environment(**told, SEEN=str(seen), TMPDIR=str(tmp_path), HOME=str(seen))


launch = partial(in_process, "launch")
"""What the command prints."""


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """What `train` makes of these words, which begin with it."""
    command = get_command(app).commands["train"]
    rest = list(words[1:])
    assert words[0] == "train"
    assert rest[rest.index("--resume") + 1] == "auto"
    parameters: dict[str, Any] = command.make_context("train", rest).params
    return parameters


def seen_words(file: Path) -> list[str]:
    return file.read_bytes().decode().split("\0")[:-1]


def jobset(text: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A JobSet, and the specs of its one Job and of that one's pods."""
    read = json.loads(text)
    manifest = read["items"][1] if read["kind"] == "List" else read
    (job,) = manifest["spec"]["replicatedJobs"]
    assert (job["name"], job["replicas"]) == ("workers", 1)
    spec = job["template"]["spec"]
    return manifest, spec, spec["template"]["spec"]


def pod_words(pod: dict[str, Any], **variables: str) -> list[str]:
    """The words of a pod, as the kubelet hands them on: ``$$`` is a dollar, ``$(NAME)`` a variable it knows."""
    (container,) = pod["containers"]
    known = re.compile(r"\$\$|\$\(([^)]*)\)")
    return [
        known.sub(lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), word)
        for word in container["command"]
    ]


def hostile_job(folder: Path, number: int, *options: str) -> str:
    """A job whose recipe, and the directories that it names, bear a hostile name."""
    recipe = folder / NAMES[number] / f"{NAMES[number]}.toml"
    recipe.parent.mkdir()
    recipe.write_text(find_file("recipe", "demo").read_text())
    return launch(*options, "--recipe", str(recipe), "--set", f"seed={number}", "--out", f"/runs/{NAMES[number]}")


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_scripts_hand_on_every_name_as_it_is_and_are_sound_shell(kind: str, tmp_path: Path, cluster: dict[str, str]):
    seen, scripts = Path(cluster["SEEN"]), []
    (seen / "end").write_text("0\n")
    for number, name in enumerate(NAMES):
        program = tmp_path / "programs" / name / "trainer"
        program.parent.mkdir(parents=True)
        program.symlink_to(tmp_path / "bin" / "trainer")
        where = ("--nodes", "2") if kind == "slurm" else ("--hosts", "a,me@b")
        options = ("--data", f"/data/{name}", "--sync", "ring", "--program", f"{shlex.quote(str(program))} -v")
        scripts.append(tmp_path / f"{number}.sh")
        scripts[-1].write_text(hostile_job(tmp_path, number, kind, *where, *options), newline="")
        subprocess.run(["bash", scripts[-1]], check=True, env=cluster, cwd=tmp_path)
        if kind == "slurm":
            words = seen_words(seen / "words")
            step, words = words[: words.index(str(program))], words[words.index(str(program)) + 1 :]
            assert step == ["--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0"]
        else:
            words = seen_words(seen / "words-a")
            assert seen_words(seen / "words-me@b") == words
        assert words[0] == "-v"
        asked = parsed(words[1:])
        assert asked["recipe"] == str(tmp_path / name / f"{name}.toml")
        assert [str(asked["data"]), str(asked["out"])] == [f"/data/{name}", f"/runs/{name}"]
        assert (asked["sync"], asked["keys"], asked["nproc"]) == ("ring", [f"seed={number}"], 1)
        endpoint = "n7:21234" if kind == "slurm" else "a:29400"  # whatever a container keeps of the environment
        assert (asked["nodes"], asked["rdzv_endpoint"], asked["max_restarts"]) == ("2", endpoint, 3)
    assert not list(tmp_path.rglob("hit"))
    shellcheck = Path(sys.executable).with_name("shellcheck")
    options = ("--severity=style", "--exclude=SC2016")  # single quotes are meant
    checked = subprocess.run([shellcheck, *options, *scripts], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_manifests_hand_on_every_name_and_recipe_as_it_is(tmp_path: Path):
    for number, name in enumerate(NAMES):
        text = hostile_job(tmp_path, number, *K8S, "--name", "my-job")
        program, *words = pod_words(jobset(text)[-1])
        asked = parsed(words)
        ((file, toml),) = json.loads(text)["items"][0]["data"].items()
        assert (program, asked["recipe"], toml) == (
            "imagenet-fast", f"/recipes/{file}", find_file("recipe", "demo").read_text()
        )  # fmt: skip
        assert re.fullmatch(r"[-._a-zA-Z0-9]+", file)
        assert (str(asked["out"]), asked["keys"]) == (f"/runs/{name}", [f"seed={number}"])
        assert (asked["nproc"], asked["nodes"], asked["max_restarts"]) == (1, "2", None), "a pod is made anew"
        assert asked["rdzv_endpoint"] == "my-job-workers-0-0.my-job:29400"


def test_a_jobset_is_an_indexed_job_whose_pods_have_claims_gpus_and_the_command():
    manifest, job, pod = jobset(launch(
        *K8S, "--recipe", "resnet50-512gpu", "--nodes", "64", "--data-claim", "imagenet", "--namespace",
        "vision", "--port", "1234", "--time", "2-12", "--set", "checkpoint.grace_s=299.5",
    ))  # fmt: skip
    note = "recipe written for 512 ranks: 512 ranks, micro-batch 128, 1 accumulation step"
    assert manifest["metadata"].pop("annotations") == {"imagenet-fast/batch": note}
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"] == {"name": "resnet50-512gpu", "namespace": "vision"}
    assert manifest["spec"]["network"] == {"enableDNSHostnames": True}
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 64, 64)
    assert (job["backoffLimit"], job["activeDeadlineSeconds"]) == (640, 216_000)
    assert pod["terminationGracePeriodSeconds"] == 310
    (container,) = pod["containers"]
    assert (container["image"], container["ports"]) == (IMAGE, [{"containerPort": 1234}])
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"shm": "/dev/shm", "runs": "/runs", "data": "/data"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory"}
    assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert volumes["data"]["persistentVolumeClaim"] == {"claimName": "imagenet", "readOnly": True}
    asked = {key: str(value) for key, value in parsed(pod_words(pod)[1:]).items()}
    assert asked.items() >= {
        "recipe": "resnet50-512gpu", "data": "/data", "out": "/runs/resnet50-512gpu", "nodes": "64", "nproc": "8",
        "rdzv_endpoint": "resnet50-512gpu-workers-0-0.resnet50-512gpu:1234",
    }.items()  # fmt: skip


def test_jobset_failure_policy_by_exit_code():
    """Short of its target it would end so again; stopped or evicted it goes on; all else counts, up to a limit."""
    manifest, job, pod = jobset(launch(*K8S, "--recipe", "smoke"))
    assert pod["restartPolicy"] == "Never"  # or Kubernetes refuses the policy

    def on(code: int) -> dict[str, Any]:
        return {"containerName": pod["containers"][0]["name"], "operator": "In", "values": [code]}

    assert job["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": on(3)},
        {"action": "Ignore", "onExitCodes": on(4)},
        # The status as text: JobSet's schema refuses its absence, and a boolean.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    assert "failurePolicy" not in manifest["spec"]  # or JobSet would begin again where the Job has failed


def test_one_pod_meets_nobody_and_a_pod_without_gpus_asks_for_none():
    pod = jobset(launch(*K8S, "--recipe", "smoke", "--nodes", "1", "--no-gpus"))[-1]
    assert "resources" not in pod["containers"][0]
    asked = parsed(pod_words(pod)[1:])
    assert (asked["nodes"], asked["nproc"], asked["rdzv_endpoint"]) == (None, 2, None)
    assert pod["securityContext"]["fsGroup"] == 1000, "pods of our image may write the claim of runs"
    assert "USER 1000:1000" in (Path(__file__).parents[2] / "Dockerfile").read_text()


def test_sbatch_requests_whole_nodes_or_cores_and_a_signal():
    text = launch(
        *SLURM, "--recipe", "resnet50-512gpu", "--data", "/d", "--nodes", "64", "--time", "24:00:00", "--partition",
        "gpu", "--account", "vision", "--set", "checkpoint.grace_s=299.5",
    )  # fmt: skip
    head = text.split("srun")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    assert {line.removeprefix("#SBATCH --") for line in head if line.startswith("#SBATCH")} == {
        "job-name=resnet50-512gpu", "nodes=64", "ntasks-per-node=1", "gpus-per-node=8", "exclusive", "mem=0",
        "time=24:00:00", "partition=gpu", "account=vision", "open-mode=append", "requeue", "signal=B:USR1@370",
    }  # fmt: skip
    text = launch(*SLURM, "--recipe", "smoke", "--cores", "8", "--no-gpus")
    assert text.count("--cpus-per-task=8") == 2
    assert "gpus" not in text.split("srun")[0]
    assert "--exclusive" not in text


def started(cluster: dict[str, str], text: str, number: signal.Signals) -> subprocess.Popen[str]:
    """The shell of a job whose ranks are at work, which answers the signal."""
    script = Path(cluster["TMPDIR"]) / "job.sh"
    script.write_text(text)
    shell = subprocess.Popen(["bash", script], env=cluster, text=True, stderr=subprocess.PIPE, start_new_session=True)
    wait_for(lambda: len(list(Path(cluster["SEEN"]).glob("begun*"))) == len(hosts_of(text)))
    wait_for(lambda: answers(shell, number))
    return shell


def answers(process: subprocess.Popen[Any], number: signal.Signals) -> bool:
    """Whether it has set a handler, or has ended."""
    found = re.search(r"SigCgt:\t(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return found is None or bool(int(found[1], 16) >> (number - 1) & 1)


def manifest(step: Path, time_s: float) -> None:
    step.resolve().mkdir(parents=True)
    (step / "manifest.json").touch()
    os.utime(step / "manifest.json", (time_s, time_s))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("told", "code", "saves", "refuses", "ends_with"),
    [
        *((False, code, False, False, code) for code in (0, 1, 2, 3, 137)),
        (False, 4, False, False, "queued again"), (True, 4, False, False, "queued again"), (True, 4, False, True, 4),
        (True, 1, True, False, "queued again"), (True, 1, False, False, 1),
    ],
)  # fmt: skip
def test_sbatch_queues_again_what_was_stopped_and_saved(
    told: bool, code: int, saves: bool, refuses: bool, ends_with: int | str, tmp_path: Path, cluster: dict[str, str]
):
    """Also what could not be saved in time: a slow moment of a file system does not end a chain of jobs. But if this
    start has made no checkpoint, the next would train the same steps again, and so on for ever."""
    seen = Path(cluster["SEEN"])
    if not told:
        (seen / "end").write_text(f"{code}\n")
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.parent.mkdir()
    checkpoints.symlink_to(tmp_path / "large disk")
    manifest(checkpoints / "step-00000050", time_s=2e9)  # that this start has not made
    program = ("--program", "sh wrapper.sh --out log trainer")
    text = launch(*SLURM[:3], *program, "--out", str(tmp_path / "run"), "--recipe", "smoke")
    shell = started(cluster | {"STOPPED": str(code), "REFUSED": str(int(refuses))}, text, signal.SIGUSR1)
    if saves:
        manifest(checkpoints / "step-00000100", time_s=1e9)  # by the clock of a file server
    if told:
        shell.send_signal(signal.SIGUSR1)
        wait_for((seen / "told").exists)
        shell.send_signal(signal.SIGUSR1)  # while it saves
    said = shell.communicate()[1]
    assert not told or (seen / "told").read_text() == "\n", "once"
    asked = ends_with == "queued again" or refuses
    assert ((seen / "scontrol").read_text() if asked else "") == ("requeue 1234\n" if asked else "")
    assert (seen / "scontrol").exists() == asked
    assert ("not queued again; submit the same script" in said) == refuses
    assert shell.returncode == (0 if ends_with == "queued again" else ends_with)


@pytest.mark.usefixtures("subprocesses")
def test_tasks_of_a_job_array_do_not_train_into_one_another(cluster: dict[str, str]):
    shell, task = ["bash", "-c", launch(*SLURM, "--recipe", "smoke")], {"SLURM_ARRAY_TASK_ID": "0"}
    done = subprocess.run(shell, env=cluster | task, capture_output=True, text=True, timeout=9, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: tasks of an array would all train in one directory; leave --array out, or p")
    assert not list(Path(cluster["SEEN"]).iterdir())


@pytest.mark.ci
def test_a_job_that_is_cancelled_is_not_queued_again(cluster: dict[str, str]):
    seen = Path(cluster["SEEN"])
    shell = started(cluster, launch(*SLURM, "--recipe", "smoke"), signal.SIGUSR1)
    shell.send_signal(signal.SIGTERM)  # scancel's; the ranks get it too, save, and end as those of a pre-empted job
    assert shell.wait() == -signal.SIGTERM
    (seen / "end").write_text("4\n")
    shell.communicate()
    assert not (seen / "scontrol").exists()


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_ssh_script_hands_on_a_signal_to_the_first_launcher(
    number: signal.Signals, tmp_path: Path, cluster: dict[str, str]
):
    text = launch(*SSH, "--recipe", "smoke", "--program", str(tmp_path / "bin" / "trainer"))
    first = started(cluster, text, number)
    if number == signal.SIGINT:  # of a terminal
        os.killpg(first.pid, number)
    first.send_signal(number)
    assert first.wait() == 4
    assert (Path(cluster["SEEN"]) / "told").read_text() == "a\n"


@pytest.mark.ci
def test_an_ssh_job_runs_where_it_was_printed(tmp_path: Path, cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    place, program = tmp_path / "it's $HOME", tmp_path / "bin" / "tell"
    place.mkdir()
    program.write_text('#!/bin/sh\npwd >"$SEEN/where-$HOST"\n')
    program.chmod(0o755)
    monkeypatch.chdir(place)
    script = launch(*SSH, "--recipe", "smoke", "--program", str(program))
    monkeypatch.chdir(tmp_path)
    assert subprocess.run(["bash", "-c", script], env=cluster, check=False).returncode == 0
    for host in ("a", "me@b"):
        assert (Path(cluster["SEEN"]) / f"where-{host}").read_text() == f"{place}\n"


def hosts_of(text: str) -> list[str]:
    *others, first = re.findall(r"ssh (?:-o \S+ )+(\S+) 'exec sh -c", text) or [""]
    return [first, *others]


@pytest.mark.parametrize(
    ("options", "hosts", "words"),
    [
        ("--hosts fd00::1,10.0.0.2 --port 7", ["fd00::1", "10.0.0.2"], "[fd00::1]:7"),
        ("--hosts a,b,c --nodes 2", ["a", "b"], "--nodes 2 --rdzv-endpoint a:29400"),
        ("--hosts a", ["a"], "--nproc 2 --max-restarts 3 --out /runs/a"),
    ],
    ids=["addresses", "the first of more", "one meets nobody"],
)
def test_one_ssh_for_each_host(options: str, hosts: list[str], words: str):
    text = launch("ssh", *options.split(), "--recipe", "smoke", "--out", "/runs/a")
    assert hosts_of(text) == hosts
    assert text.count(words) == len(hosts)


def test_a_relative_run_directory_is_of_where_the_job_was_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert f"--out {tmp_path}/runs/a --resume auto" in launch(*SLURM, "--recipe", "smoke", "--out", "runs/a")
    text = launch("slurm", "--nodes", "2", "--recipe", "smoke")
    assert re.search(rf"--out {tmp_path}/runs/\d+-\d+-smoke-lazy-[0-9a-f]{{6}} ", text)


def test_ranks_a_node_are_those_the_recipe_was_written_for_unless_said():
    def ranks(*more: str) -> int:
        found = re.search(r"--nproc (\d+)", launch(*SLURM, "--recipe", "resnet50-8gpu", "--data", "/d", *more))
        return int(found[1]) if found else 0

    assert [ranks(), ranks("--nodes", "1"), ranks("--nproc", "2")] == [4, 8, 2]
    assert ranks("--nproc", "8", "--scale-batch") == 8


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((*SLURM, "--nodes", "3"), "--nproc"),
        ((*SLURM, "--recipe", "resnet50-8gpu"), "say it with --data"),
        ((*K8S, "--recipe", "resnet50-8gpu"), "say it with --data-claim"),
        ((*SLURM, "--data", "/d"), "--data /d would not be read"),
        ((*SLURM, "--time", "soon"), "--time soon is no time limit"),
        ((*SLURM, "--time", "4"), "leaves no time to train"),
        ((*SLURM, "--partition", "a\n#SBATCH --nodes=9"), "is no name of Slurm's; begin it with a letter, a digit"),
        ((*SLURM, "--account", "-a"), "'-a' is no name of Slurm's; begin it with a letter, a digit or _, and use only"),
        ((*SLURM, "--program", "it's"), "--program it's cannot be read"),
        ((*SLURM, "--program", "module load && it"), "'module load && it' has '&&', which is for a shell, and nodes"),
        ((*SLURM, "--program", '"$APPS/it" -v'), "has '$', which is for a shell, and nodes start words without one; p"),
        (("ssh", "--hosts", "a", "--program", "N=4 it"), "--program 'N=4 it' has 'N=', which is for a shell"),
        ((*SLURM, "--program", " "), "--program is empty"),
        ((*SLURM, "--out", "/runs/\udcff"), "not UTF-8"),
        ((*SLURM, "--file", "/dev"), "--file /dev is a directory; name a file"),
        ((*K8S, "--out", "/here/a"), "--out /here/a is not on --run-claim"),
        ((*K8S, "--out", "/runs/../a"), "is not on --run-claim"),
        ((*K8S, "--run-claim", "b:"), "--run-claim 'b:' is no name of Kubernetes'; use only small letters, digits, ."),
        ((*K8S, "--run-claim", "a..b"), "'a..b' is no name of Kubernetes'; begin each part with a letter or digit"),
        ((*K8S, "--namespace", "a.b"), "'a.b' is no name of Kubernetes'; use only small letters, digits and -"),
        ((*K8S, "--name", "8gpu"), "--name '8gpu' is no name of Kubernetes'; begin it with a letter"),
        ((*K8S, "--name", "a-"), "--name 'a-' is no name of Kubernetes'; end it with a letter or digit"),
        ((*K8S, "--name", "A"), "--name 'A' is no name of Kubernetes'; use only small letters, digits and -"),
        ((*K8S, "--name", 41 * "a"), "is no name of Kubernetes'; shorten it to 40 characters"),
        ((*K8S, "--image", "a b"), "--image 'a b'"),
        (("ssh", "--hosts", "a,b", "--nodes", "3"), "names 2 of 3 nodes"),
        (("ssh", "--hosts", "a,me@a"), "names me@a twice (a and me@a are the same)"),
        (("ssh", "--hosts", "a,-oProxyCommand=x"), "is no host"),
        (("ssh", "--hosts", "node0:2222,b"), "'node0:2222' has a port; write it into"),
        (("ssh", "--hosts", "me@127.0.0.1,b"), "to the others 127.0.0.1 is themselves"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_printed(arguments: tuple[str, ...], reason: str, refusal):
    assert reason in refusal("launch", *arguments[:1], "--recipe", "smoke", *arguments[1:])


def test_a_job_is_written_to_a_file_instead(tmp_path: Path):
    file = tmp_path / "a b.sh"
    printed = launch(*SLURM, "--recipe", "smoke")
    assert launch(*SLURM, "--recipe", "smoke", "--file", str(file)) == ""
    assert file.read_text() == printed


def test_time_limits_are_slurms():
    limits = {"90": 5400, "90:30": 5430, "24:00:00": 86_400, "2-12": 216_000, "1-0:30": 88_200, "1-2:3:4": 93_784}
    limits |= dict.fromkeys(("0", "0:00", "UNLIMITED", "unlimited", "INFINITE", None))
    assert {text: parse_time_limit(text) for text in limits} == limits
    assert "#SBATCH --time=UNLIMITED\n" in launch(*SLURM, "--recipe", "smoke", "--time", "UNLIMITED")
    assert "activeDeadlineSeconds" not in launch(*K8S, "--recipe", "smoke", "--time", "0")
    for text in ("", "-5", "1:2:3:4", "1-2:3:4:5", "1h", "1.5", "५", "1\n", "NONE"):
        refuses("is no time limit", parse_time_limit, text)


def test_a_job_is_named_after_its_recipe_as_far_as_clusters_allow():
    labels = {
        "resnet50-8gpu": "resnet50-8gpu", "My Net_2": "my-net-2", "8gpu": "imagenet-fast-8gpu", "数": "imagenet-fast",
        "a" * 39 + "--b": "a" * 39, "-x-": "x", "#\n": "imagenet-fast",
    }  # fmt: skip
    assert {name: job_label(name) for name in labels} == labels
