"""`imagenet-fast launch`: print the text of a cluster job for the user to check and submit.

Options of several commands:
    nodes: Number of nodes.
    nproc: Ranks on each node, one per GPU. Default: the recipe's ranks, divided by the nodes.
    out: Run directory, as every node sees it. Default: a new one in runs.
    scale_batch: As in train.
    time: Time limit in Slurm's form: 90 (minutes), 24:00:00, 2-12:00:00 or UNLIMITED.
    port: Port of the first node, where all nodes meet.
    no_gpus: Train on CPUs.
    program: Words that start imagenet-fast on the nodes, without a shell. Default: this Python.
    file: Write to this file instead of the terminal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagenet_fast.cli import options as opt
from imagenet_fast.cli.app import App

launch_app = App(
    help="Print a job for a cluster: one that saves, and resumes after an interruption.", no_args_is_help=True
)

_Name = Annotated[str | None, typer.Option(metavar="NAME")]
_Program = Annotated[str | None, typer.Option(metavar="WORDS")]
_TimeLimit = Annotated[str | None, typer.Option(metavar="LIMIT")]
_Port = Annotated[int, typer.Option(min=1, max=65535)]


@launch_app.command()
def slurm(
    recipe: opt.Recipe[str],
    nodes: opt.Count[int],
    nproc: opt.Count[int | None] = None,
    data: opt.Directory[Path | None] = None,
    out: opt.RunDirectory = None,
    sync: opt.Sync = None,
    keys: opt.Keys = opt.NO_KEYS,
    scale_batch: bool = False,
    time: _TimeLimit = None,
    partition: _Name = None,
    account: _Name = None,
    cores: opt.Count[int | None] = None,
    no_gpus: bool = False,
    program: _Program = None,
    file: opt.NewFile[Path | None] = None,
) -> None:
    """Print a script for sbatch.

    After a preemption or at the time limit, Slurm queues the job again, and it
    resumes.

    Args:
        partition: Slurm partition.
        account: Slurm account.
        cores: Cores on each node. Default: whole nodes, not shared.
    """
    from imagenet_fast.launch.cluster_job import emit, plan_cluster_job
    from imagenet_fast.launch.slurm import sbatch_text

    job = plan_cluster_job(recipe, sync, keys, nodes, nproc, scale_batch)
    folder = job.folder(out)
    text = sbatch_text(
        job, job.command(program, data, folder), folder, gpus=not no_gpus, cores=cores, time_limit=time,
        partition=partition, account=account,
    )  # fmt: skip
    emit(text, file)


@launch_app.command()
def k8s(
    recipe: opt.Recipe[str],
    nodes: opt.Count[int],
    image: Annotated[str, typer.Option()],
    run_claim: Annotated[str, typer.Option(metavar="NAME")],
    data_claim: _Name = None,
    nproc: opt.Count[int | None] = None,
    out: opt.Directory[str | None] = None,
    name: _Name = None,
    namespace: _Name = None,
    sync: opt.Sync = None,
    keys: opt.Keys = opt.NO_KEYS,
    scale_batch: bool = False,
    time: _TimeLimit = None,
    port: _Port = 29400,
    no_gpus: bool = False,
    file: opt.NewFile[Path | None] = None,
) -> None:
    """Print a JobSet for kubectl apply.

    Pods that are evicted start again and resume.

    Args:
        image: Container image that has imagenet-fast, such as one of our Dockerfile.
        run_claim: PersistentVolumeClaim for runs, mounted at /runs.
        data_claim: PersistentVolumeClaim of the images, mounted at /data.
        out: Run directory, under /runs. Default: /runs/<name>.
        name: Name of the job. Default: made from the recipe's.
        namespace: Kubernetes namespace.
    """
    from imagenet_fast.launch.cluster_job import check_data, emit, job_label, parse_time_limit, plan_cluster_job
    from imagenet_fast.launch.jobset import jobset_text

    job = plan_cluster_job(recipe, sync, keys, nodes, nproc, scale_batch)
    check_data(job.recipe, data_claim, "--data-claim")
    text = jobset_text(
        job, job_label(job.path.stem) if name is None else name, image, run_claim, data_claim=data_claim, out=out,
        namespace=namespace, gpus=not no_gpus, port=port, time_limit_s=parse_time_limit(time),
    )  # fmt: skip
    emit(text, file)


@launch_app.command()
def ssh(
    recipe: opt.Recipe[str],
    hosts: opt.Names[str],
    nodes: opt.Count[int | None] = None,
    nproc: opt.Count[int | None] = None,
    data: opt.Directory[Path | None] = None,
    out: opt.RunDirectory = None,
    sync: opt.Sync = None,
    keys: opt.Keys = opt.NO_KEYS,
    scale_batch: bool = False,
    port: _Port = 29400,
    program: _Program = None,
    file: opt.NewFile[Path | None] = None,
) -> None:
    """Print a shell script that starts the job on each host, with one ssh per host.

    Args:
        hosts: Hosts, by names or addresses that all of them can reach.
        nodes: Use only the first N hosts. Default: all.
    """
    from imagenet_fast.distributed.network import Endpoint
    from imagenet_fast.launch.cluster_job import emit, plan_cluster_job
    from imagenet_fast.launch.ssh import parse_hosts, ssh_text

    chosen = parse_hosts(hosts, nodes)
    job = plan_cluster_job(recipe, sync, keys, len(chosen), nproc, scale_batch)
    first = str(Endpoint(chosen[0].rpartition("@")[2], port))
    meeting = ["--nodes", str(len(chosen)), "--rdzv-endpoint", first] if len(chosen) > 1 else []
    emit(ssh_text(job, job.command(program, data, job.folder(out), *meeting), chosen), file)
