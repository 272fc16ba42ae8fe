"""A PyTorchJob (kubeflow.org/v1), for clusters that still have the training operator, which is being retired.

The operator tells every pod the name of the first (MASTER_ADDR), at which the launchers meet. It counts pods where
torchrun counts ranks, in RANK and WORLD_SIZE, which are therefore taken away
(https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/).
"""

from __future__ import annotations

from imagenet_fast.launch.pod_spec import RESTARTS, Pods
from imagenet_fast.launch.yaml_text import Yaml


def pytorchjob_text(pods: Pods) -> str:
    """A manifest for ``kubectl apply``.

    A container that fails or is stopped starts again in its pod, and a pod that is evicted is made anew; either way it
    goes on with what lies in the run directory. So does one that came to its end short of its target (exit code 3),
    until no restart is left: a PyTorchJob does not tell exit codes below 128 apart.
    """
    ports: Yaml = [{"name": "pytorchjob-port", "containerPort": pods.port}]  # by which the operator knows it
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
