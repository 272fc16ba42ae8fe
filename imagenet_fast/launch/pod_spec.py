"""Pod that Kubernetes runs on a node: one container, whose launcher starts the node's ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from imagenet_fast.errors import UserError
from imagenet_fast.launch.cluster_job import ClusterJob
from imagenet_fast.launch.yaml_text import Yaml, to_yaml

DATA, RUNS = "/data", "/runs"
"""Mount points of the volumes in a pod."""

RESTARTS = 10
"""Restarts per node; Kubernetes counts those of all nodes together."""

_RECIPES = "/recipes"
_GRACE_S = 60  # between SIGTERM and SIGKILL; ranks save within checkpoint.grace_s, by default 50
_PATIENCE_S = 900  # for launchers to wait for each other: Kubernetes delays restarts by up to 6 minutes


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

    def template(
        self, container: str, ports: Yaml, first: str, before: Sequence[str] = (), **more: Yaml
    ) -> dict[str, Yaml]:
        """Return the template of the pods.

        Args:
            container: Name of the container.
            ports: Ports of the container.
            first: Host name of the first pod.
            before: Words before the command.
            more: Further fields of the pod's spec.
        """
        job = self.job
        recipe = job.path.stem if job.shipped else f"{_RECIPES}/{self._file}"
        words = job.train(recipe, self.data_claim and DATA, str(self._where), "--join-timeout", str(_PATIENCE_S))
        meeting = ["--nodes", str(job.nodes), "--rdzv-endpoint", f"{first}:{self.port}"] if job.nodes > 1 else []
        volumes: dict[str, tuple[str, dict[str, Yaml]]] = {
            "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),
            "runs": (RUNS, {"persistentVolumeClaim": {"claimName": self.run_claim}}),
        }
        if self.data_claim is not None:
            volumes["data"] = DATA, {"persistentVolumeClaim": {"claimName": self.data_claim, "readOnly": True}}
        if not job.shipped:
            volumes["recipe"] = _RECIPES, {"configMap": {"name": f"{self.label}-recipe"}}
        resources: dict[str, Yaml] = {"resources": {"limits": {"nvidia.com/gpu": job.ranks_each}}} if self.gpus else {}
        one: Yaml = {
            "name": container,
            "image": self.image,
            "command": [*before, "imagenet-fast", *map(_literal, words), *meeting],
            "ports": ports,
            **resources,
            "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
        }
        return {
            "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},  # a sidecar would outlive the training
            "spec": {
                **more,
                "terminationGracePeriodSeconds": _GRACE_S,
                "containers": [one],
                "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
            },
        }

    @property
    def deadline(self) -> dict[str, Yaml]:
        """Field of a job that ends it at its time limit; empty without a limit."""
        return {"activeDeadlineSeconds": self.time_limit_s} if self.time_limit_s is not None else {}

    def text(self, api_version: str, kind: str, spec: dict[str, Yaml]) -> str:
        """Return a manifest for ``kubectl apply``, after a ConfigMap with the recipe if the image lacks it."""
        at: dict[str, Yaml] = {"namespace": self.namespace} if self.namespace is not None else {}
        manifest: dict[str, Yaml] = {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {"name": self.label, **at},
            "spec": spec,
        }
        if self.job.shipped:
            return f"# {self.job.note}\n{to_yaml(manifest)}"
        config: dict[str, Yaml] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{self.label}-recipe", **at},
            "data": {self._file: self.job.path.read_text(encoding="utf-8")},
        }
        return f"# {self.job.note}\n{to_yaml(config)}---\n{to_yaml(manifest)}"

    @property
    def _where(self) -> PurePosixPath:
        return PurePosixPath(self.folder or f"{RUNS}/{self.label}")

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
