"""What a run was begun with is known again: classes, counts, names and labels, wherever the data lies."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from imagenet_fast.checkpoint.tree import flatten_tree, unflatten_tree
from imagenet_fast.data.fingerprint import Contents, differences
from imagenet_fast.data.verify import verify
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.training.resume import ResumePoint
from tests.conftest import refusal_of
from tests.data.encoded import BAD, BLOBS, JPEG, encoded
from tests.data.small import FORMATS, as_format, image_data, opened, put
from tests.e2e.command import train_here
from tests.ranks import with_ranks
from tests.training.jobs import job_of

ONE = Batching(1, 1, 1)


def contents_of(root: Path) -> Contents:
    return opened(root, "threads", ONE).contents


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three classes; in train two images each, in val one, each of a name of its own."""
    for split, count in (("train", 2), ("val", 1)):
        for name in ("bee", "cat", "dog"):
            put(tmp_path / "data" / split / name, *(f"{name}{number}.jpg" for number in range(count)))
    return tmp_path / "data"


def rename_class(root: Path) -> None:
    """In the middle of the alphabet for its end: labels swap, and nothing else changes."""
    for split in ("train", "val"):
        (root / split / "cat").rename(root / split / "zebra")


def add_class(root: Path) -> None:
    """With an image of another, so that there are as many."""
    for split in ("train", "val"):
        put(root / split / "ape", "ape0.jpg")
    (root / "train/dog/dog1.jpg").unlink()


def remove_class(root: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(root / split / "dog")


def relabel(root: Path) -> None:
    """Two images change places; counts and names of files stay."""
    for one, other in (("bee", "dog"), ("dog", "bee")):
        (root / f"train/{one}/{one}0.jpg").rename(root / f"train/{other}/{one}0.jpg")


def shrink(root: Path) -> None:
    """As a node has them that holds what `data prepare --resize` made."""
    for path in (root / "train").rglob("*.jpg"):
        path.write_bytes(encoded(BLOBS.resize((60, 40)), "JPEG"))


def rename_image(root: Path) -> None:
    (root / "val/bee/bee0.jpg").rename(root / "val/bee/other.JPG")


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (rename_class, "the class 'zebra' for 'cat'"),
    (add_class, "a class 'ape' that it had not and 4 validation images for 3"),
    (remove_class, "no class 'dog' any more and 4 training images for 6 and 2 validation images for 3"),
    (lambda root: shutil.rmtree(root / "val/dog"), "2 validation images for 3"),
    (relabel, "other names or labels of its training images"),
    (rename_image, "other names or labels of its validation images"),
    (shrink, "other training images under the same names, perhaps of another size"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_a_run_does_not_go_on_with_other_data(root: Path, change: Callable[[Path], None], told: str):
    outline, tensors = flatten_tree(contents_of(root))
    saved = unflatten_tree(json.loads(json.dumps(outline)), tensors, torch.device("cpu"))
    checkpoint = cast(Any, SimpleNamespace(folder=Path("run/step-1"), shared={"data": saved}))
    change(root)
    refusal = refusal_of(ResumePoint(checkpoint, elsewhere=False, gap_s=0.0).check_data, contents_of(root))
    assert f"the data has {told} since run/step-1 was written; restore it, or begin anoth" in refusal


def test_a_class_list_in_another_order_is_told_by_its_first_place():
    split = {"images": 3, "digest": "a"}
    before = {"classes": ["a", "b", "c"], "train": split, "val": split}
    assert differences(before, before | {"classes": ["a", "c", "b"]}) == ["the class 'c' as number 1 for 'b'"]
    assert differences(before, before | {"classes": ["x", "y", "z"]}) == ["the class 'x' for 'a' and 2 more such"]


@pytest.mark.parametrize("kind", FORMATS)
def test_data_that_was_moved_or_copied_is_the_same(root: Path, tmp_path: Path, kind: str, monkeypatch):
    (root / "train/dog" / os.fsdecode(b"-\xff %\n.jpg")).write_bytes(JPEG)
    root = as_format(root, kind, tmp_path / "shards", 9000)
    before = contents_of(root)
    shutil.copytree(root, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    assert differences(before, contents_of(Path("copy"))) == []
    for path in (tmp_path / "copy/train").rglob("*0*"):
        path.rename(path.with_name(f"x{path.name}"))
    assert differences(before, contents_of(Path("copy"))) == ["other names or labels of its training images"]


def test_what_is_quarantined_counts_as_gone(root: Path):
    before = contents_of(root)
    (root / "train/dog/dog1.jpg").write_bytes(BAD["half a jpeg"])
    verify(root)
    assert differences(before, contents_of(root)) == ["5 training images for 6"]


@with_ranks(1)
def test_a_resumed_run_refuses_a_renamed_class(root: Path, tmp_path: Path) -> None:
    data, schedule = image_data(image_size=32, resize=32).model_dump(), {"kind": "step", "milestones": []}
    changes = {"reference_ranks": 1, "global_batch": 6, "data": data, "schedule": schedule}
    assert train_here(job_of(tmp_path / "run", root, epochs=1, **changes)).status == "finished"
    rename_class(root)
    told = refusal_of(train_here, job_of(tmp_path / "run", root, resume=True, epochs=2, **changes))
    assert "the data has the class 'zebra' for 'cat' since" in told
