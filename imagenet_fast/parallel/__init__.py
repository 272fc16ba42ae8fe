"""Axes of parallelism beside data: how ranks are laid out, and models divided over them."""
