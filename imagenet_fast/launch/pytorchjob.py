"""A PyTorchJob (kubeflow.org/v1) for Kubernetes: a pod a node, whose launcher starts its ranks.

The operator tells every pod the name of the first (MASTER_ADDR), at which the launchers meet. It counts pods where
torchrun counts ranks, in RANK and WORLD_SIZE, which are therefore taken away
(https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/).
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from imagenet_fast.errors import UserError
from imagenet_fast.launch.jobtext import ClusterJob
from imagenet_fast.launch.yaml_text import Yaml, to_yaml

DATA, RUNS = "/data", "/runs"
"""Where the pods see their volumes."""

_RECIPES = "/recipes"
_GRACE_S = 60  # between SIGTERM and SIGKILL; ranks save and end within 20
_RESTARTS = 10  # of a pod; the operator counts those of all together
_PATIENCE_S = 900  # that launchers wait for each other: Kubernetes puts restarts off by up to 5 minutes


def pytorchjob_text(
    job: ClusterJob,
    *,
    label: str,
    image: str,
    run_claim: str,
    data_claim: str | None = None,
    folder: str | None = None,
    namespace: str | None = None,
    gpus: bool = True,
    port: int = 29400,
    time_limit_s: int | None = None,
) -> str:
    """A manifest for ``kubectl apply``, with a ConfigMap before it where the recipe is not one of the image's.

    A container that fails or is stopped starts again in its pod, and a pod that is evicted is made anew; either way it
    goes on with what lies in ``folder``, on the volume ``run_claim``.

    Raises UserError where a name is not Kubernetes', or ``folder`` would go with the pod.
    """
    _check_names(label, image, {"--data-claim": data_claim, "--run-claim": run_claim, "--namespace": namespace})
    where = PurePosixPath(folder or f"{RUNS}/{label}")
    if PurePosixPath(RUNS) not in where.parents or ".." in where.parts:
        raise UserError(f"--out {where} is not on --run-claim, which pods see at {RUNS}; choose a directory below that")
    # The key of a ConfigMap has fewer characters than a file; as the recipe's name it is that of the run.
    file = re.sub(r"[^-._a-zA-Z0-9]", "-", job.path.name)
    recipe = job.path.stem if job.shipped else f"{_RECIPES}/{file}"
    words = job.train(recipe, data_claim and DATA, str(where), "--join-timeout", str(_PATIENCE_S))
    meeting = ["--nodes", str(job.nodes), "--rdzv-endpoint", f"$(MASTER_ADDR):{port}"] if job.nodes > 1 else []
    command = ["env", "-u", "RANK", "-u", "WORLD_SIZE", "imagenet-fast", *map(_literal, words), *meeting]

    volumes: dict[str, tuple[str, dict[str, Yaml]]] = {
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),
        "runs": (RUNS, {"persistentVolumeClaim": {"claimName": run_claim}}),
    }
    if data_claim is not None:
        volumes["data"] = DATA, {"persistentVolumeClaim": {"claimName": data_claim, "readOnly": True}}
    if not job.shipped:
        volumes["recipe"] = _RECIPES, {"configMap": {"name": f"{label}-recipe"}}
    resources: dict[str, Yaml] = {"resources": {"limits": {"nvidia.com/gpu": job.ranks_each}}} if gpus else {}
    container: Yaml = {
        "name": "pytorch",  # by which the operator knows it, as it does the port
        "image": image,
        "command": list(command),
        "ports": [{"name": "pytorchjob-port", "containerPort": port}],
        **resources,
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    pod: Yaml = {
        "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},  # a sidecar would outlive the training
        "spec": {
            "terminationGracePeriodSeconds": _GRACE_S,
            "containers": [container],
            "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
        },
    }
    counts = {"Master": 1} | ({"Worker": job.nodes - 1} if job.nodes > 1 else {})
    deadline: dict[str, Yaml] = {"activeDeadlineSeconds": time_limit_s} if time_limit_s is not None else {}
    at: dict[str, Yaml] = {"namespace": namespace} if namespace is not None else {}
    manifest: dict[str, Yaml] = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": label, **at},
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": _RESTARTS * job.nodes, **deadline},
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "OnFailure", "template": pod}
                for kind, count in counts.items()
            },
        },
    }
    config: dict[str, Yaml] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{label}-recipe", **at},
        "data": {file: job.path.read_text()},
    }
    documents = [manifest] if job.shipped else [config, manifest]
    return f"# {job.note}\n" + "---\n".join(map(to_yaml, documents))


def _check_names(label: str, image: str, others: dict[str, str | None]) -> None:
    """Raise UserError with the first that Kubernetes would not take; ``others`` by their options."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", label):
        raise UserError(f"--name {label!r} is no name of a job; use at most 40 small letters, digits and -")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*", image):
        raise UserError(f"--image {image!r} is no image; write for example registry.example/imagenet-fast:1")
    for option, name in others.items():
        if name is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name):
            raise UserError(f"{option} {name!r} is no name of Kubernetes'; use small letters, digits, - and .")


def _literal(word: str) -> str:
    """As Kubernetes' own ``$(NAME)`` leaves it: two dollars are one."""
    return word.replace("$", "$$")
