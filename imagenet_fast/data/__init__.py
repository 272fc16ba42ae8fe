"""Data pipeline: read, decode, augment and batch images."""
