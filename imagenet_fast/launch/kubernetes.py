"""Manifests for Kubernetes: a JobSet with one pod per node whose launcher starts the node's ranks.

JobSet (jobset.x-k8s.io/v1alpha2) names a Job's pods in a headless service, ``JOBSET-REPLICATEDJOB-0-INDEX.JOBSET``. The
launchers meet at the pod with index 0 (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2). The Job's
podFailurePolicy defines what an exit code means. It needs pods that do not restart their containers themselves
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from imagenet_fast.errors import UserError
from imagenet_fast.launch.cluster_job import ClusterJob, to_utf8
from imagenet_fast.metrics.run_result import STOPPED

DATA, RUNS = "/data", "/runs"
"""Mount points of the volumes in a pod."""

_RESTARTS = 10
"""Restarts per node; Kubernetes counts those of all nodes together."""

_RECIPES = "/recipes"
_GRACE_S = 60  # between SIGTERM and SIGKILL; ranks save within checkpoint.grace_s, by default 50
_JOIN_TIMEOUT_S = 900  # for launchers to wait for each other: Kubernetes delays restarts by up to 6 minutes

_JOB = "workers"
_CONTAINER = "trainer"
_SHORT_OF_TARGET = 3  # exit code of a run that ended without reaching its target


def jobset_text(pods: Pods) -> str:
    """Return a manifest for ``kubectl apply``.

    Stopped pods are created again, and resume from the run directory. Their number is not limited if they were evicted,
    or stopped by a signal and saved. Failures are limited in number. A run that ended short of its target fails at
    once, since it would only end the same way again.
    """
    nodes = pods.job.nodes
    deadline = {"activeDeadlineSeconds": pods.time_limit_s} if pods.time_limit_s is not None else {}
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": _RESTARTS * nodes,
        **deadline,
        "podFailurePolicy": {
            "rules": [
                _on_exit_code(_SHORT_OF_TARGET, "FailJob"),
                _on_exit_code(STOPPED, "Ignore"),
                # JobSet's own schema has no default for the status.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": pods.template(),
    }
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True},
        "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": job}}],
    }
    return pods.text(spec)


def _on_exit_code(code: int, action: str) -> Any:
    """Return a rule for an exit code; "Ignore" creates the pod again without counting it."""
    return {"action": action, "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [code]}}


@dataclass(frozen=True)
class Pods:
    """Identical pods of a Kubernetes job, one per node.

    Raises:
        UserError: If Kubernetes would reject a name, or the run directory would be lost with the pod.
    """

    job: ClusterJob
    label: str
    """Name of the Kubernetes job."""
    image: str
    run_claim: str
    """Claim of the volume at ``RUNS``."""
    data_claim: str | None = None
    folder: str | None = None
    """Run directory; None for one named after the Kubernetes job."""
    namespace: str | None = None
    gpus: bool = True
    port: int = 29400
    """Port of the first pod, where all launchers meet."""
    time_limit_s: int | None = None

    def __post_init__(self) -> None:
        """Check the names and the run directory."""
        claims = {"--data-claim": self.data_claim, "--run-claim": self.run_claim, "--namespace": self.namespace}
        _check_names(self.label, self.image, claims)
        if PurePosixPath(RUNS) not in self._where.parents or ".." in self._where.parts:
            raise UserError(
                f"--out {self._where} is not on --run-claim, which pods see at {RUNS}; choose a directory below that"
            )

    def template(self) -> dict[str, Any]:
        """Return the template of the pods."""
        job, first = self.job, f"{self.label}-{_JOB}-0-0.{self.label}"
        recipe = job.path.stem if job.shipped else f"{_RECIPES}/{self._file}"
        words = job.train(recipe, self.data_claim and DATA, str(self._where), "--join-timeout", str(_JOIN_TIMEOUT_S))
        meeting = ["--nodes", str(job.nodes), "--rdzv-endpoint", f"{first}:{self.port}"] if job.nodes > 1 else []
        volumes: dict[str, tuple[str, dict[str, Any]]] = {
            "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),
            "runs": (RUNS, {"persistentVolumeClaim": {"claimName": self.run_claim}}),
        }
        if self.data_claim is not None:
            volumes["data"] = DATA, {"persistentVolumeClaim": {"claimName": self.data_claim, "readOnly": True}}
        if not job.shipped:
            volumes["recipe"] = _RECIPES, {"configMap": {"name": f"{self.label}-recipe"}}
        resources: dict[str, Any] = {"resources": {"limits": {"nvidia.com/gpu": job.ranks_each}}} if self.gpus else {}
        one: Any = {
            "name": _CONTAINER,
            "image": self.image,
            "command": ["imagenet-fast", *map(_literal, words), *meeting],
            "ports": [{"containerPort": self.port}],
            **resources,
            "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
        }
        return {
            "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},  # a sidecar would outlive the training
            "spec": {
                "restartPolicy": "Never",
                # Volumes are made for root, and our Dockerfile's user is another.
                "securityContext": {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"},
                "terminationGracePeriodSeconds": max(_GRACE_S, math.ceil(job.recipe.checkpoint.grace_s) + 10),
                "containers": [one],
                "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
            },
        }

    def text(self, spec: dict[str, Any]) -> str:
        """Return a manifest for ``kubectl apply``, after a ConfigMap with the recipe if the image lacks it."""
        at: dict[str, Any] = {"namespace": self.namespace} if self.namespace is not None else {}
        manifest: dict[str, Any] = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": self.label, **at},
            "spec": spec,
        }
        if self.job.shipped:
            return f"# {self.job.note}\n{to_yaml(manifest)}"
        config: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{self.label}-recipe", **at},
            "data": {self._file: self.job.path.read_text(encoding="utf-8")},
        }
        return f"# {self.job.note}\n{to_yaml(config)}---\n{to_yaml(manifest)}"

    @property
    def _where(self) -> PurePosixPath:
        return PurePosixPath(f"{RUNS}/{self.label}" if self.folder is None else self.folder)

    @property
    def _file(self) -> str:
        """File name of the recipe in the ConfigMap, whose keys allow fewer characters; it also names the run."""
        return re.sub(r"[^-._a-zA-Z0-9]", "-", self.job.path.name)


def _check_names(label: str, image: str, others: dict[str, str | None]) -> None:
    """Raise UserError for the first name that Kubernetes would reject; ``others`` are given by their options."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", label):
        raise UserError(f"--name {label!r} is no name of a job; use at most 40 small letters, digits and -")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*", image):
        raise UserError(f"--image {image!r} is no image; write for example registry.example/imagenet-fast:1")
    for option, name in others.items():
        if name is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name):
            raise UserError(f"{option} {name!r} is no name of Kubernetes'; use small letters, digits, - and .")


def _literal(word: str) -> str:
    """Escape dollars, since Kubernetes expands ``$(NAME)`` and reads two dollars as one."""
    return word.replace("$", "$$")


class _Dumper(yaml.SafeDumper):
    """Quote all text but plain words, write several lines as a block, and a value that occurs twice without an anchor.

    What is no text without quotes depends on the reader: for kubectl ``00215e6`` is a number, and ``y`` is true.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Write lines as a block; escape what cannot be printed: YAML 1.1 reads U+0085 as the end of a line."""
        to_utf8(text)
        style = None if re.fullmatch("[A-Za-z]{2,}", text) else "|" if "\n" in text else '"'
        style = style if text.replace("\n", "").isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(document: dict[str, Any]) -> str:
    """Return one YAML document in block style, its keys in their order."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return text
