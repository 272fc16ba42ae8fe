"""The official files, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.prepare.replica import Images, official_tars, small_imagenet


@pytest.fixture(scope="module")
def images() -> Images:
    return small_imagenet()


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory, images: Images) -> Path:
    return official_tars(tmp_path_factory.mktemp("official") / "tars", images)
