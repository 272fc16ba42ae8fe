"""What ranks find imported: all that tests start are forked from one server, which imports this once."""

# ruff: noqa: F401

from __future__ import annotations

import pytest
import torch

import imagenet_fast.bench.comm_volume
import imagenet_fast.bench.engines
import imagenet_fast.data.prepare.run
import imagenet_fast.parallel.pipeline_parallel
import imagenet_fast.training.trainer
import tests.conftest
import tests.ranks
from imagenet_fast.distributed.cores import freeze_gc

torch.set_num_threads(1)
freeze_gc()  # else a rank's first collection would look at all this, and copy the pages that it shares with the others
