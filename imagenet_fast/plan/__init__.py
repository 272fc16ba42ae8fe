"""Predictions for machines that nobody here has: clusters, devices, steps and times to train. Without torch."""
