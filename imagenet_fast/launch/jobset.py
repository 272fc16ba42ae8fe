"""Manifest for Kubernetes: a JobSet with one pod per node whose launcher starts the node's ranks.

JobSet (jobset.x-k8s.io/v1alpha2) names a Job's pods in a headless service, ``JOBSET-REPLICATEDJOB-0-INDEX.JOBSET``. The
launchers meet at the pod with index 0 (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2). The Job's
podFailurePolicy defines what an exit code means. It needs pods that do not restart their containers themselves
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy).
"""

from __future__ import annotations

import json
import math
import re
from pathlib import PurePosixPath
from typing import Any

from imagenet_fast.errors import UserError
from imagenet_fast.launch.cluster_job import ClusterJob
from imagenet_fast.recipe.load import read_text
from imagenet_fast.run.result import STOPPED

_DATA, _RUNS, _RECIPES = "/data", "/runs", "/recipes"  # where volumes are mounted in a pod
_RESTARTS = 10  # per node; Kubernetes counts those of all nodes together
_GRACE_S = 60  # between SIGTERM and SIGKILL; ranks save within checkpoint.grace_s, by default 50
_JOIN_TIMEOUT_S = 900  # for launchers to wait for each other: Kubernetes delays restarts by up to 6 minutes
_JOB, _CONTAINER = "workers", "trainer"
_SHORT_OF_TARGET = 3  # exit code of a run that ended without reaching its target


def jobset_text(
    job: ClusterJob, label: str, image: str, run_claim: str, *, data_claim: str | None, out: str | None,
    namespace: str | None, gpus: bool, port: int, time_limit_s: int | None,
) -> str:  # fmt: skip
    """Return a manifest for ``kubectl apply``, with a ConfigMap of the recipe if the image lacks it.

    It is JSON, in which all readers take a text for a text: ``00215e6`` in YAML is a number for some.

    Stopped pods are created again, and resume from the run directory. Their number is not limited if they were evicted,
    or stopped by a signal and saved. Failures are limited in number. A run that ended short of its target fails at
    once, since it would only end the same way again. The options are those of `launch k8s`.

    Raises:
        UserError: If Kubernetes would reject a name, or the run directory would be lost with the pod.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*", image):
        raise UserError(f"--image {image!r} is no image; write for example registry.example/imagenet-fast:1")
    _check_name("--name", label, 40, first="a-z")
    _check_name("--namespace", namespace, 63)
    for option, claim in (("--run-claim", run_claim), ("--data-claim", data_claim)):
        _check_name(option, claim, 253, dots=".")
    folder = PurePosixPath(f"{_RUNS}/{label}" if out is None else out)
    if PurePosixPath(_RUNS) not in folder.parents or ".." in folder.parts:
        raise UserError(f"--out {folder} is not on --run-claim, which pods see at {_RUNS}; choose a directory below it")
    file = re.sub(r"[^-._a-zA-Z0-9]", "-", job.path.name)  # what a ConfigMap's keys allow; it also names the run
    recipe = job.path.stem if job.shipped else f"{_RECIPES}/{file}"
    words = job.train(recipe, data_claim and _DATA, str(folder), "--join-timeout", str(_JOIN_TIMEOUT_S))
    first = f"{label}-{_JOB}-0-0.{label}:{port}"
    meeting = ["--nodes", str(job.nodes), "--rdzv-endpoint", first] if job.nodes > 1 else []
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),
        "runs": (_RUNS, {"persistentVolumeClaim": {"claimName": run_claim}}),
    }
    if data_claim is not None:
        volumes["data"] = _DATA, {"persistentVolumeClaim": {"claimName": data_claim, "readOnly": True}}
    if not job.shipped:
        volumes["recipe"] = _RECIPES, {"configMap": {"name": f"{label}-recipe"}}
    container = {
        "name": _CONTAINER,
        "image": image,
        "command": ["imagenet-fast", *(word.replace("$", "$$") for word in words), *meeting],  # $(NAME) is expanded
        "ports": [{"containerPort": port}],
        **({"resources": {"limits": {"nvidia.com/gpu": job.ranks_each}}} if gpus else {}),
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    pod = {
        "restartPolicy": "Never",
        # Volumes are made for root, and our Dockerfile's user is another.
        "securityContext": {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"},
        "terminationGracePeriodSeconds": max(_GRACE_S, math.ceil(job.recipe.checkpoint.grace_s) + 10),
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }
    rules = [
        *(
            {"action": action, "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [code]}}
            for code, action in ((_SHORT_OF_TARGET, "FailJob"), (STOPPED, "Ignore"))  # created again, and not counted
        ),
        # JobSet's own schema has no default for the status.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": _RESTARTS * job.nodes,
        **({} if time_limit_s is None else {"activeDeadlineSeconds": time_limit_s}),
        "podFailurePolicy": {"rules": rules},
        # A sidecar would outlive the training.
        "template": {"metadata": {"annotations": {"sidecar.istio.io/inject": "false"}}, "spec": pod},
    }
    at = {} if namespace is None else {"namespace": namespace}
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{label}-recipe", **at},
        "data": {file: read_text(job.path)},
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": label, **at, "annotations": {"imagenet-fast/batch": job.note}},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": spec}}],
        },
    }
    both = {"apiVersion": "v1", "kind": "List", "items": [config, manifest]}
    return json.dumps(manifest if job.shipped else both, indent=2, ensure_ascii=False) + "\n"


def _check_name(option: str, name: str | None, most: int, first: str = "a-z0-9", dots: str = "") -> None:
    """Raise UserError with the rule of DNS that a name breaks; with ``dots`` it may have several parts."""
    it = "each part" if dots else "it"
    for pattern, fix in (
        (f"[^a-z0-9{dots}-]", f"use only small letters, digits{', . and -' if dots else ' and -'}"),
        (f"(?:^|[.])(?![{first}])", f"begin {it} with a letter{' or digit' * ('0' in first)}"),
        (r"-(?:$|[.])", f"end {it} with a letter or digit"),
        (f".{{{most + 1}}}", f"shorten it to {most} characters"),
    ):
        if name is not None and re.search(pattern, name):
            raise UserError(f"{option} {name!r} is no name of Kubernetes'; {fix}")
