"""Replayed steps end with the bits of launched ones. Run with `pytest tests/gpu` where there is a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu_semantics.test_replayed_steps import CASES, ENGINES, LOOPS, same


class RealGpu:
    """What stands in for the pretended one."""

    strict_capture = False
    detector = SimpleNamespace(found=())

    def __enter__(self) -> RealGpu:
        torch.backends.cudnn.deterministic = True  # else gradients differ from step to step
        return self

    def __exit__(self, *_: object) -> None:
        torch.backends.cudnn.deterministic = False

    def move(self, model: nn.Module) -> nn.Module:
        return model.cuda()

    def take(self, values: Tensor) -> Tensor:
        return values.cuda()


ON_GPU: dict[str, Any] = {"on": RealGpu, "backend": "nccl"}


@pytest.mark.parametrize("sync", [*ENGINES, "auto"])
def test_a_replayed_run_ends_with_the_bits_of_a_launched_one(sync: str):
    end = same(1, sync, **ON_GPU)
    assert end.news == [{"replayed": True, "images": [4, 3, 4, 4]}]
    assert end.replayed > 5


@pytest.mark.parametrize(("sync", "loop"), CASES)
def test_loops_are_replayed(sync: str, loop: str):
    end = same(1, sync, **LOOPS[loop], **ON_GPU)
    assert {told["replayed"] for told in end.news} == {True}
    assert end.replayed > 1
