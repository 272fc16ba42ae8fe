"""A GPU, and two ranks of NCCL where they can be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need a GPU."""
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this node")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(missing)


@pytest.fixture(scope="session")
def two_ranks() -> None:
    """Skips, in NCCL's own words, where two ranks may not share the GPU there is."""
    try:
        assert run(2, _sum_of_ranks, backend="nccl") == [1, 1]
    except AssertionError as failure:
        if torch.cuda.device_count() > 1 or "nccl" not in str(failure).lower():  # torch's exceptions for it differ
            raise
        version = ".".join(map(str, torch.cuda.nccl.version()))
        pytest.skip(f"NCCL {version} refuses two ranks on one GPU: {str(failure).strip().splitlines()[-1]}")


def _sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)
