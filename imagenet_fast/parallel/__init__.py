"""Axes of parallelism beside data: models divided over ranks."""
