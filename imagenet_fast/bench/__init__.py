"""Benchmarks of training steps, loaders and engines on this node."""
