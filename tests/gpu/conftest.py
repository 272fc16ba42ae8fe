"""What tests of this folder need: a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need a GPU."""
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this node")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(missing)
