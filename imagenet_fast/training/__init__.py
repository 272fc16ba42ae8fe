"""Train a model: loop, step, optimizers, evaluation and training state."""
