"""Record a run's metrics: events, sent from the training loop to the sinks.

The flow is one way: no sink reports back to the training loop.
"""
