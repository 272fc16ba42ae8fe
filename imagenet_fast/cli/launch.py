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
_Port = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the first node, where all nodes meet.")]


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
    cores: Annotated[
        int | None, typer.Option(min=1, help="Cores on each node. Default: whole nodes, not shared.")
    ] = None,
    no_gpus: _NoGpus = False,
    program: _Program = None,
) -> None:
    """Print a script for sbatch.

    sbatch takes Slurm's own options: --time, --partition, --account. After a
    preemption or at the time limit, Slurm queues the job again, and it resumes.
    """
    from imagenet_fast.launch.cluster_job import plan_cluster_job
    from imagenet_fast.launch.slurm import sbatch_text

    job = plan_cluster_job(recipe, sync, [*overrides, *keys], nodes, nproc, scale_batch)
    folder = job.folder(out)
    command = job.command(program, data, folder)
    print(sbatch_text(job, command, folder, gpus=not no_gpus, cores=cores), end="")


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
    name: Annotated[
        str | None, typer.Option(help="Name of the job, and of its run under /runs. Default: made from the recipe's.")
    ] = None,
    sync: SyncOption = None,
    keys: KeysArgument = NO_KEYS,
    overrides: SetOption = NO_KEYS,
    scale_batch: _ScaleBatch = False,
    no_gpus: _NoGpus = False,
) -> None:
    """Print a JobSet for kubectl apply.

    Pods that are evicted start again and resume.
    """
    from imagenet_fast.launch.cluster_job import check_data, job_label, plan_cluster_job
    from imagenet_fast.launch.jobset import jobset_text

    job = plan_cluster_job(recipe, sync, [*overrides, *keys], nodes, nproc, scale_batch)
    check_data(job.recipe, data_claim, "--data-claim")
    label = job_label(job.path.stem) if name is None else name
    print(jobset_text(job, label, image, run_claim, data_claim, gpus=not no_gpus), end="")


@launch_app.command()
def ssh(
    recipe: RecipeOption,
    hosts: Annotated[str, typer.Option(metavar="A,B", help="Hosts, by names or addresses that all of them can reach.")],
    nproc: _RanksEach = None,
    data: DataOption = None,
    out: _Out = None,
    sync: SyncOption = None,
    keys: KeysArgument = NO_KEYS,
    overrides: SetOption = NO_KEYS,
    scale_batch: _ScaleBatch = False,
    port: _Port = 29400,
    program: _Program = None,
) -> None:
    """Print a shell script that starts the job on each host, with one ssh per host."""
    from imagenet_fast.distributed.network import Endpoint
    from imagenet_fast.launch.cluster_job import plan_cluster_job
    from imagenet_fast.launch.ssh import parse_hosts, ssh_text

    chosen = parse_hosts(hosts)
    job = plan_cluster_job(recipe, sync, [*overrides, *keys], len(chosen), nproc, scale_batch)
    first = str(Endpoint(chosen[0].rpartition("@")[2], port))
    meeting = ["--nodes", str(len(chosen)), "--rdzv-endpoint", first] if len(chosen) > 1 else []
    print(ssh_text(job, job.command(program, data, job.folder(out), *meeting), chosen), end="")
