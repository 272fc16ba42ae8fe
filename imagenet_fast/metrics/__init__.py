"""Record a run's metrics: events, sent one way, from the training loop to the sinks."""
