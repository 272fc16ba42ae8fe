"""A JobSet (jobset.x-k8s.io/v1alpha2): an indexed Job with a pod a node, and a name for each pod.

JobSet names a Job's pods in a headless service, ``JOBSET-REPLICATEDJOB-0-INDEX.JOBSET``; the launchers meet at the pod
of index 0 (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2). The Job's podFailurePolicy says what an exit
code means; it needs pods that do not restart their containers themselves
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy).
"""

from __future__ import annotations

from imagenet_fast.launch.pod_spec import RESTARTS, Pods
from imagenet_fast.launch.yaml_text import Yaml
from imagenet_fast.metrics.run_result import STOPPED

_JOB = "workers"
_CONTAINER = "trainer"
_SHORT_OF_TARGET = 3  # exit code of a run that came to its end without reaching its target


def jobset_text(pods: Pods) -> str:
    """A manifest for ``kubectl apply``.

    Pods that are stopped are made anew, and go on with what lies in the run directory: as often as need be where they
    were told to stop and saved, or were evicted; a limited number of times where they failed. A run that came to its
    end short of its target has failed at once: it would only come to the same end.
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
                # JobSet's own schema knows no default for the status.
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
    """A rule; "Ignore" makes a pod anew without counting it."""
    return {"action": action, "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [code]}}
