"""Train a model: loop, step, optimisers, evaluation and training state."""
