"""A tree comes back from a file as it was: the same bits, strides, types, order, and shared tensors."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from imagenet_fast.checkpoint.tree import HostCopy, read_tree
from tests.checkpoint.trees import hostile, same

CPU = torch.device("cpu")


def as_file(tree: Any, copy: HostCopy | None = None) -> bytes:
    return b"".join((copy or HostCopy()).take(tree))


def back(tree: Any) -> Any:
    return read_tree(as_file(tree), CPU)


def resolved(tree: Any) -> Any:
    """As it comes back: plain dicts, and no tensor that is only marked as conjugate."""
    tree = {key: dict(value) if isinstance(value, OrderedDict) else value for key, value in tree.items()}
    return {key: value.resolve_conj() if key == "conjugate" else value for key, value in tree.items()}


def test_whatever_a_tree_may_hold_comes_back_alone_and_together_and_so_do_trees_that_are_no_dict():
    whole = hostile()
    for tree in (*({name: value} for name, value in whole.items()), whole):
        assert same(back(tree), resolved(tree)), tree.keys()
    for bare in (None, 3, "text", [], (1, 2), torch.arange(3), float("nan")):
        assert same(back(bare), bare)


def test_shared_tensor_is_saved_once():
    tied = torch.randn(1000)
    tree = {"encoder": tied, "decoder": tied, "other": tied.clone()}
    data = as_file(tree)
    assert len(data) < 3 * tied.nbytes
    found = read_tree(data, CPU)
    assert found["encoder"] is found["decoder"]
    found["encoder"].zero_()
    assert torch.equal(found["other"], tied)


def test_views_of_one_buffer_come_back_apart_each_with_its_values():
    buffer = torch.arange(12.0)
    tree = {"all": buffer, "left": buffer[:6], "every other": buffer[::2], "wide": buffer[:1].expand(4)}
    found = back(tree)
    assert all(torch.equal(found[name], tree[name]) for name in tree)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 4
    assert found["wide"].is_contiguous()


def test_what_torch_reads_otherwise_from_the_same_memory_is_another_tensor():
    whole = torch.randn(3, dtype=torch.complex64)
    tree = {"whole": whole, "conjugate": whole.conj(), "bits": whole.view(torch.int64), "minus": whole.conj().imag}
    tree["imaginary"] = whole.imag
    found = back(tree)
    assert all(torch.equal(found[name], tree[name].resolve_conj().resolve_neg()) for name in tree)


def test_what_is_dense_in_no_order_comes_back_dense_in_the_order_it_had():
    padded = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)[:, :3]
    assert not padded.is_contiguous(memory_format=torch.channels_last)
    found = back({"padded": padded})["padded"]
    assert torch.equal(found, padded)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_any_reader_of_safetensors_finds_the_tensors_by_their_paths():
    tree = {"model": {"conv.weight": torch.randn(4, 3, 2, 2), "scale": torch.tensor(2.0)}, "steps": [torch.arange(3)]}
    found = load(as_file(tree))
    assert found.keys() == {"model/conv.weight", "model/scale", "steps/0"}
    assert torch.equal(found["model/conv.weight"], tree["model"]["conv.weight"])


def test_one_buffer_serves_trees_of_all_sizes_one_after_another():
    copy = HostCopy()
    for values in (10, 1000, 3, 0, 2_000_000, 7):
        tree = {"values": torch.randn(values), "half": torch.randn(values).half(), "odd": torch.ones(3).char()}
        data = as_file(tree, copy)
        tree["values"].add_(1)  # the copy is one
        found = read_tree(data, CPU)
        assert torch.equal(found["values"] + 1, tree["values"])
        assert torch.equal(found["half"], tree["half"])


def test_what_json_and_safetensors_cannot_hold_is_refused_with_its_path():
    for tree, sentence in (
        ({"a": [1, {2}]}, "/a/1: a builtins.set has no place in a checkpoint"),
        ({"lr": np.float64(1.0)}, "/lr: a numpy.float64 "),
        ({"step": np.int64(1)}, "/step: a numpy.int64 "),
        ({"where": Path("x")}, "/where: a pathlib.PosixPath "),
        ({"of": {torch.float32: 1}}, "/of/key: a torch.dtype "),
        ({"sparse": torch.eye(3).to_sparse()}, "/sparse: a torch.Tensor "),
        ({"shape": torch.Size([1])}, "/shape: a torch.Size "),
        ({"meta": torch.empty(3, device="meta")}, "/meta: a torch.Tensor "),
        (lambda: 0, "/: a builtins.function "),
    ):
        with pytest.raises(TypeError, match=re.escape(sentence)):
            as_file(tree)


def test_a_file_that_holds_no_tree_is_told_from_one_that_does():
    data = as_file({"a": torch.arange(4.0)})
    forged = [
        b"", b"12345678", data[:-1], data[8:], data + b"0", save({"a": torch.ones(3)}),
        data.replace(b'"tree"', b'"tRee"'), data.replace(b"float32", b"float64"), data.replace(b"float32", b"nn     "),
        data.replace(b"[4]", b"[9]"), data.replace(b"[1]", b"[7]"), data.replace(b'"a\\"', b'"b\\"'),
    ]  # fmt: skip
    for number, other in enumerate(forged):
        assert other != data, number
        with pytest.raises(ValueError, match="holds no tree"):
            read_tree(other, CPU)
