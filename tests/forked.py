"""What ranks find imported: all that tests start are forked from one server, which imports this once."""

# ruff: noqa: F401

from __future__ import annotations

import pytest
import scipy.io

import imagenet_fast.bench.counting
import imagenet_fast.bench.engine_times
import imagenet_fast.data.preparing.preparation
import imagenet_fast.parallel.pipeline
import imagenet_fast.training.loop
import tests.conftest
import tests.spawning
