"""A PyTorchJob (kubeflow.org/v1), for clusters that still have the training operator, which is being retired.

The operator gives every pod the name of the first (MASTER_ADDR), at which the launchers meet. In RANK and WORLD_SIZE it
counts pods, where torchrun counts ranks; so both are unset
(https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/).
"""

from __future__ import annotations

from imagenet_fast.launch.pod_spec import RESTARTS, Pods
from imagenet_fast.launch.yaml_text import Yaml


def pytorchjob_text(pods: Pods) -> str:
    """Return a manifest for ``kubectl apply``.

    A container that fails or is stopped is restarted in its pod, and an evicted pod is created again. Either way the
    run resumes from the run directory. A run that ended short of its target (exit code 3) is restarted too, until no
    restart is left: a PyTorchJob does not distinguish exit codes below 128.
    """
    ports: Yaml = [{"name": "pytorchjob-port", "containerPort": pods.port}]  # the name that the operator looks for
    template = pods.template("pytorch", ports, "$(MASTER_ADDR)", before=("env", "-u", "RANK", "-u", "WORLD_SIZE"))
    counts = {"Master": 1} | ({"Worker": pods.job.nodes - 1} if pods.job.nodes > 1 else {})
    spec: dict[str, Yaml] = {
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": RESTARTS * pods.job.nodes, **pods.deadline},
        "pytorchReplicaSpecs": {
            kind: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
            for kind, count in counts.items()
        },
    }
    return pods.text("kubeflow.org/v1", "PyTorchJob", spec)
