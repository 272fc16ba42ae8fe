"""The networks that a recipe's ``[model]`` table names, their stages and their weights."""

from __future__ import annotations

from imagenet_fast.models.factory import build_model, compile_blocks, fuse_norms

__all__ = ["build_model", "compile_blocks", "fuse_norms"]
