"""Divide models over ranks: the axes of parallelism besides data."""
