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
from typing import Any

from imagenet_fast.launch.cluster_job import ClusterJob
from imagenet_fast.metrics.run_result import STOPPED

_DATA, _RUNS, _RECIPES = "/data", "/runs", "/recipes"  # where volumes are mounted in a pod
_RESTARTS = 10  # per node; Kubernetes counts those of all nodes together
_GRACE_S = 60  # between SIGTERM and SIGKILL; ranks save within checkpoint.grace_s, by default 50
_JOIN_TIMEOUT_S = 900  # for launchers to wait for each other: Kubernetes delays restarts by up to 6 minutes
_JOB, _CONTAINER = "workers", "trainer"
_PORT = 29_400  # where launchers meet; each pod has an address of its own
_SHORT_OF_TARGET = 3  # exit code of a run that ended without reaching its target


def jobset_text(job: ClusterJob, label: str, image: str, run_claim: str, data_claim: str | None, *, gpus: bool) -> str:
    """Return a manifest for ``kubectl apply``, with a ConfigMap of the recipe if the image lacks it.

    It is JSON, in which all readers take a text for a text: ``00215e6`` in YAML is a number for some.

    Stopped pods are created again, and resume from the run directory, which is named after the job. Their number is not
    limited if they were evicted, or stopped by a signal and saved. Failures are limited in number. A run that ended
    short of its target fails at once, since it would only end the same way again.
    """
    file = re.sub(r"[^-._a-zA-Z0-9]", "-", job.path.name)  # what a ConfigMap's keys allow; it also names the run
    recipe = job.path.stem if job.shipped else f"{_RECIPES}/{file}"
    words = job.train(recipe, data_claim and _DATA, f"{_RUNS}/{label}", "--join-timeout", str(_JOIN_TIMEOUT_S))
    first = f"{label}-{_JOB}-0-0.{label}:{_PORT}"
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
        "command": ["imagenet-fast", *words, *meeting],
        "ports": [{"containerPort": _PORT}],
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
        _on_exit_code(_SHORT_OF_TARGET, "FailJob"),
        _on_exit_code(STOPPED, "Ignore"),
        # JobSet's own schema has no default for the status.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": _RESTARTS * job.nodes,
        "podFailurePolicy": {"rules": rules},
        # A sidecar would outlive the training.
        "template": {"metadata": {"annotations": {"sidecar.istio.io/inject": "false"}}, "spec": pod},
    }
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{label}-recipe"},
        "data": {file: job.path.read_text(encoding="utf-8")},
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": label, "annotations": {"imagenet-fast/batch": job.note}},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": spec}}],
        },
    }
    both = {"apiVersion": "v1", "kind": "List", "items": [config, manifest]}
    return json.dumps(manifest if job.shipped else both, indent=2, ensure_ascii=False) + "\n"


def _on_exit_code(code: int, action: str) -> dict[str, Any]:
    """Return a rule for an exit code; "Ignore" creates the pod again without counting it."""
    return {"action": action, "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [code]}}
