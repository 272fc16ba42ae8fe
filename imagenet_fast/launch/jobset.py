"""A JobSet (jobset.x-k8s.io/v1alpha2): an indexed Job with one pod per node, and a name for each pod.

JobSet names a Job's pods in a headless service, ``JOBSET-REPLICATEDJOB-0-INDEX.JOBSET``. The launchers meet at the pod
with index 0 (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2). The Job's podFailurePolicy defines what an
exit code means. It needs pods that do not restart their containers themselves
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy).
"""

from __future__ import annotations

from imagenet_fast.launch.pod_spec import RESTARTS, Pods
from imagenet_fast.launch.yaml_text import Yaml
from imagenet_fast.metrics.run_result import STOPPED

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
    first = f"{pods.label}-{_JOB}-0-0.{pods.label}"
    template = pods.template(_CONTAINER, [{"containerPort": pods.port}], first, restartPolicy="Never")
    job: dict[str, Yaml] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": RESTARTS * nodes,
        **pods.deadline,
        "podFailurePolicy": {
            "rules": [
                _on_exit_code(_SHORT_OF_TARGET, "FailJob"),
                _on_exit_code(STOPPED, "Ignore"),
                # JobSet's own schema has no default for the status.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }
    spec: dict[str, Yaml] = {
        "network": {"enableDNSHostnames": True},
        "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": job}}],
    }
    return pods.text("jobset.x-k8s.io/v1alpha2", "JobSet", spec)


def _on_exit_code(code: int, action: str) -> Yaml:
    """Return a rule for an exit code; "Ignore" creates the pod again without counting it."""
    return {"action": action, "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [code]}}
