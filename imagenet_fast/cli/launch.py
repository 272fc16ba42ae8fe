"""`imagenet-fast launch`: print the text of a cluster job for the user to check and submit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagenet_fast.cli.app import App
from imagenet_fast.cli.options import (
    NO_KEYS,
    DataOption,
    KeysArgument,
    RecipeOption,
    SetOption,
    SyncOption,
    in_a_directory,
    run_directory,
    whole_nodes,
)

launch_app = App(
    help="Print a job for a cluster: one that saves, and resumes after an interruption.", no_args_is_help=True
)

_Nodes = Annotated[int, typer.Option("--nodes", metavar="N", parser=whole_nodes, help="Number of nodes.")]
_RanksEach = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, help="Ranks on each node, one per GPU. Default: the recipe's ranks, divided by the nodes."
    ),
]
_ScaleBatch = Annotated[bool, typer.Option("--scale-batch", help="As in train.")]
_NoGpus = Annotated[bool, typer.Option("--no-gpus", help="Train on CPUs.")]
_Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        parser=run_directory,
        help="Run directory, as every node sees it. Default: a new one in runs.",
    ),
]
_Program = Annotated[
    str | None,
    typer.Option(
        "--program", metavar="WORDS", help="Command that starts imagenet-fast on the nodes. Default: this Python."
    ),
]
_TimeLimit = Annotated[
    str | None,
    typer.Option("--time", metavar="LIMIT", help="Time limit in Slurm's form: 90 (minutes), 24:00:00 or 2-12:00:00."),
]
_Port = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the first node, where all nodes meet.")]
_File = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", callback=in_a_directory, help="Write to this file instead of the terminal."),
]


@launch_app.command()
def slurm(
    recipe: RecipeOption,
    nodes: _Nodes,
    nproc: _RanksEach = None,
    data: DataOption = None,
    out: _Out = None,
    sync: SyncOption = None,
    keys: KeysArgument = NO_KEYS,
    overrides: SetOption = NO_KEYS,
    scale_batch: _ScaleBatch = False,
    time: _TimeLimit = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm account.")] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Cores on each node. Default: whole nodes, not shared.")
    ] = None,
    no_gpus: _NoGpus = False,
    program: _Program = None,
    file: _File = None,
) -> None:
    """Print a script for sbatch.

    After a preemption or at the time limit, Slurm queues the job again, and it
    resumes.
    """
    from imagenet_fast.launch.cluster_job import emit, plan_cluster_job
    from imagenet_fast.launch.slurm import sbatch_text

    job = plan_cluster_job(recipe, sync, [*overrides, *keys], nodes, nproc, scale_batch)
    folder = job.folder(out)
    text = sbatch_text(
        job, job.command(program, data, folder), folder, gpus=not no_gpus, cores=cores, time_limit=time,
        partition=partition, account=account,
    )  # fmt: skip
    emit(text, file)


@launch_app.command()
def k8s(
    recipe: RecipeOption,
    nodes: _Nodes,
    image: Annotated[str, typer.Option(help="Container image that has imagenet-fast, such as one of our Dockerfile.")],
    run_claim: Annotated[
        str, typer.Option("--run-claim", metavar="NAME", help="PersistentVolumeClaim for runs, mounted at /runs.")
    ],
    data_claim: Annotated[
        str | None,
        typer.Option("--data-claim", metavar="NAME", help="PersistentVolumeClaim of the images, mounted at /data."),
    ] = None,
    nproc: _RanksEach = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Run directory, under /runs. Default: /runs/<name>.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job. Default: made from the recipe's.")] = None,
    namespace: Annotated[str | None, typer.Option(metavar="NAME", help="Kubernetes namespace.")] = None,
    sync: SyncOption = None,
    keys: KeysArgument = NO_KEYS,
    overrides: SetOption = NO_KEYS,
    scale_batch: _ScaleBatch = False,
    time: _TimeLimit = None,
    port: _Port = 29400,
    no_gpus: _NoGpus = False,
    file: _File = None,
) -> None:
    """Print a JobSet for kubectl apply.

    Pods that are evicted start again and resume.
    """
    from imagenet_fast.launch.cluster_job import check_data, emit, job_label, parse_time_limit, plan_cluster_job
    from imagenet_fast.launch.jobset import jobset_text

    job = plan_cluster_job(recipe, sync, [*overrides, *keys], nodes, nproc, scale_batch)
    check_data(job.recipe, data_claim, "--data-claim")
    text = jobset_text(
        job, job_label(job.path.stem) if name is None else name, image, run_claim, data_claim=data_claim, out=out,
        namespace=namespace, gpus=not no_gpus, port=port,
        time_limit_s=None if time is None else parse_time_limit(time),
    )  # fmt: skip
    emit(text, file)


@launch_app.command()
def ssh(
    recipe: RecipeOption,
    hosts: Annotated[str, typer.Option(metavar="A,B", help="Hosts, by names or addresses that all of them can reach.")],
    nodes: Annotated[
        int | None, typer.Option(metavar="N", parser=whole_nodes, help="Use only the first N hosts. Default: all.")
    ] = None,
    nproc: _RanksEach = None,
    data: DataOption = None,
    out: _Out = None,
    sync: SyncOption = None,
    keys: KeysArgument = NO_KEYS,
    overrides: SetOption = NO_KEYS,
    scale_batch: _ScaleBatch = False,
    port: _Port = 29400,
    program: _Program = None,
    file: _File = None,
) -> None:
    """Print a shell script that starts the job on each host, with one ssh per host."""
    from imagenet_fast.distributed.network import Endpoint
    from imagenet_fast.launch.cluster_job import emit, plan_cluster_job
    from imagenet_fast.launch.ssh import parse_hosts, ssh_text

    chosen = parse_hosts(hosts, nodes)
    job = plan_cluster_job(recipe, sync, [*overrides, *keys], len(chosen), nproc, scale_batch)
    first = str(Endpoint(chosen[0].rpartition("@")[2], port))
    meeting = ["--nodes", str(len(chosen)), "--rdzv-endpoint", first] if len(chosen) > 1 else []
    emit(ssh_text(job, job.command(program, data, job.folder(out), *meeting), chosen), file)
