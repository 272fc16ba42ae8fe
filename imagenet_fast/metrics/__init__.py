"""What a run says about itself: events, which flow one way from the training loop to the sinks."""

from __future__ import annotations

from imagenet_fast.metrics.event import Event, MetricLogger, Sink
from imagenet_fast.metrics.run_result import RunResult, Status

__all__ = ["Event", "MetricLogger", "RunResult", "Sink", "Status"]
