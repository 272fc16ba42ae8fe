"""Record a run's metrics: events, sent from the training loop to the sinks.

The flow is one way: no sink reports back to the training loop.
"""

from __future__ import annotations

from imagenet_fast.metrics.events import Event, MetricLogger, Sink
from imagenet_fast.metrics.run_result import Accuracy, RunResult, Status

__all__ = ["Accuracy", "Event", "MetricLogger", "RunResult", "Sink", "Status"]
