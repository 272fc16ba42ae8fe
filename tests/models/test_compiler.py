"""What a node lacks for torch.compile is told before torch tells it in pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from imagenet_fast.models.compiler import check_compiler
from tests.conftest import refuses

pytestmark = pytest.mark.usefixtures("subprocesses")


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    check_compiler.cache_clear()
    yield
    check_compiler.cache_clear()


def test_this_node_compiles_also_where_nothing_has_been_compiled_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
    check_compiler()
    assert not list((tmp_path / "new").iterdir())


def test_a_compiler_without_pythons_headers_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "g++").write_text("#!/bin/sh\necho 'a.c:1: fatal error: Python.h: no such file' >&2; exit 1\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    refuses(r"g\+\+ fails \(a.c:1: fatal error: Python.h: no such file\); install python3", check_compiler)


@pytest.mark.parametrize("cache", ["/proc/cache", "/dev/null"])
def test_a_directory_that_cannot_be_written_is_named(cache: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
    refuses(rf"cannot load what it makes in {cache} \(.*\); set TORCHINDUCTOR_CACHE_DIR", check_compiler)
