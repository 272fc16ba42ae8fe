"""Weights from anybody's files: what is read, and the one sentence for what is not."""

from __future__ import annotations

import argparse
import os
import re
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models
from safetensors.torch import save_file
from torch import Tensor, nn

from imagenet_fast.errors import UserError
from imagenet_fast.models import build_model
from imagenet_fast.models.weights import Weights, describe, fill, fit, read_weights, under_names_of, write_weights
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.recipe.schema import CifarNet, Model, ResNet
from tests.conftest import refuses, tables

SMALL = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.tensor([0.5, -1.0])}
RESNET18 = ResNet(kind="resnet18")


@cache
def zeros(model: Model, classes: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        state = build_model(model, classes).state_dict()
    return {name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for name, tensor in state.items()}


def resnet18(**changes: Tensor | None) -> Weights:
    """A network of 10 classes, with some of its tensors replaced, or removed."""
    return Weights("w.pth", {n: t for n, t in (zeros(RESNET18, 10) | changes).items() if t is not None})


PICKLED: dict[str, Any] = {
    "bare": SMALL,
    "as in PyTorch's ImageNet example": {"epoch": 3, "arch": "x", "state_dict": SMALL, "best_acc1": torch.tensor(7.0)},
    "as in torchvision's references": {
        "model": SMALL,
        "optimizer": {"state": {}, "param_groups": []},
        "args": argparse.Namespace(lr=0.1, data="/d"),
    },
    "an average": {"model_ema": {"n_averaged": torch.tensor(9)} | {f"module.{n}": t for n, t in SMALL.items()}},
    "of a compiled model under DDP": {"net": {f"module._orig_mod.{n}": t for n, t in SMALL.items()}, "acc": 81.2},
    "as Lightning saves it": {"state_dict": {f"model.net.{n}": t for n, t in SMALL.items()}, "global_step": 3},
    "only its features wrapped, as in PyTorch's examples": {"features.module.0.bias": SMALL["fc.bias"]},
    "of parameters": {name: nn.Parameter(tensor) for name, tensor in SMALL.items()},
}


@pytest.mark.parametrize("content", PICKLED.values(), ids=PICKLED)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_a_pth_is_read_however_people_wrap_it_and_whatever_it_is_called(content: Any, zipped: bool, tmp_path: Path):
    file = tmp_path / "größe 1:2.safetensors"
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    wanted = {"features.0.bias": SMALL["fc.bias"]} if "features.module.0.bias" in content else SMALL
    found = under_names_of(wanted, read_weights(file).tensors)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_written_weights_are_reproducible_to_the_byte(tmp_path: Path):
    recipe = parse_recipe("test", tables(data={"dataset": "digits", "loader": "dali", "image_size": 48, "resize": 56}))
    about = describe("demo", recipe, ["null", "eins"])
    files = [tmp_path / "a.pth", tmp_path / "b.safetensors"]
    for file in files:
        write_weights(SMALL | {"w": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)}, file, about)
    assert files[0].read_bytes() == files[1].read_bytes()
    found = read_weights(files[0])
    assert found.class_names == ["null", "eins"]
    assert found.about["model"]["kind"] == "resnet18"
    assert (found.about["recipe"], found.about["image_size"], found.about["resize"]) == ("demo", 48, 56)
    assert torch.equal(found.tensors["fc.weight"], SMALL["fc.weight"])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.pth", "b.safetensors"]


@pytest.mark.parametrize("metadata", [{"format": "pt"}, {"imagenet_fast": "no JSON"}, {"imagenet_fast": "[1]"}, None])
def test_others_safetensors_say_nothing_of_themselves(metadata: dict[str, str] | None, tmp_path: Path):
    save_file(SMALL, tmp_path / "w", metadata)
    found = read_weights(tmp_path / "w")
    assert (found.about, found.class_names) == ({}, [])


class Trap:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch '{self._mark}'",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_does_not(zipped: bool, tmp_path: Path):
    file, mark = tmp_path / "w.pth", tmp_path / "mark"
    torch.save({"state_dict": SMALL, "more": Trap(mark)}, file, _use_new_zipfile_serialization=zipped)
    assert "\n" not in refuses(r"w\.pth would have (posix|os)\.system called .*state_dict\(\)", read_weights, file)
    assert not mark.exists()


def _cut_off(path: Path, save: Callable[[Any, Path], object]) -> None:
    save(SMALL, path)
    path.write_bytes(path.read_bytes()[:-3])


def _scripted(path: Path) -> None:
    """By its index, which is what tells such an archive from torch.save's."""
    torch.save(SMALL, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{path.stem}/constants.pkl", b"")


UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: path.write_bytes(b""), "holds no weights; give a .safetensors file, a .pth"),
    "a web page": (lambda path: path.write_text("<!DOCTYPE html><html>404"), "holds no weights"),
    "a pointer": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"),
        "pointer of Git LFS and not the weights; run `git lfs pull`",
    ),
    "half a .pth": (lambda path: _cut_off(path, torch.save), "damaged, or no state dict.*; copy or fetch it again"),
    "half a .safetensors": (lambda path: _cut_off(path, save_file), "damaged or cut off .*; copy or fetch it again"),
    "a whole model": (lambda path: torch.save(nn.Linear(2, 2), path), r"would have torch\.nn\."),
    "TorchScript": (_scripted, "damaged, or no state dict"),
    "a number": (lambda path: torch.save(3, path), "holds no state dict; give"),
    "no state dict": (
        lambda path: torch.save({"epoch": 3, "lr": [0.1]}, path), "holds no state dict; its entries are epoch, lr; give"
    ),
    "two networks": (
        lambda path: torch.save({"G": SMALL, "D": SMALL, "epoch": 1}, path),
        r"holds several state dicts, G and D; give a file of one alone, as torch.save\(checkpoint\['D'\], FILE\) makes",
    ),
    "a moving average of another name": (
        lambda path: torch.save({"ema": {f"module.{n}": t for n, t in SMALL.items()}, "model": SMALL}, path),
        "holds several state dicts, ema and model; give a file of one alone",
    ),
    "a folder": (lambda path: path.mkdir(), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "sentence"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_holds_no_weights_is_refused_in_a_sentence(make: Callable[[Path], object], sentence: str, tmp_path: Path):
    file = tmp_path / "w.pth"
    make(file)
    told = refuses(sentence, read_weights, file)
    assert str(file) in told
    assert "\n" not in told


def test_torchvision_weights_load_in_half_precision_with_batch_counts_or_wrappers_and_without():
    theirs = torchvision.models.resnet18(num_classes=10).state_dict()
    half = {name: tensor.half() for name, tensor in theirs.items()}
    wrapped = {f"model.net._orig_mod.{name}": tensor for name, tensor in half.items()}
    for given in (half, {n: t for n, t in half.items() if not n.endswith("num_batches_tracked")}, wrapped):
        ours = build_model(RESNET18, 10)
        fill(ours, fit(Weights("w.pth", given), RESNET18, 10))
        for name, tensor in ours.state_dict().items():
            assert tensor.dtype == theirs[name].dtype
            assert torch.equal(tensor, half[name].to(tensor.dtype)), name


HEADLESS: dict[str, Tensor | None] = {"fc.weight": None, "fc.bias": None}
MISFITS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "missing": ({"layer4.1.bn2.running_var": None}, "model resnet18: layer4.1.bn2.running_var is missing; give"),
    "unknown": ({"total_ops": torch.zeros(1)}, "not of the recipe's model resnet18: total_ops is not known to"),
    "for small images": (
        {"conv1.weight": torch.zeros(64, 3, 3, 3)}, "conv1.weight is [64, 3, 3, 3] instead of [64, 3, 7, 7]; give"
    ),
    "no head": (HEADLESS, "resnet18: fc.weight is missing, fc.bias is missing; give"),
    "much": (
        HEADLESS | {"a": torch.zeros(1), "b": torch.zeros(1)},
        "fc.weight is missing, fc.bias is missing, a is not known to it and 1 more do not fit; give",
    ),
    "a negative variance": (
        {"layer1.0.bn1.running_var": torch.tensor([1.0] * 63 + [-0.5])},
        "layer1.0.bn1.running_var in w.pth holds variances below 0; give other weights",
    ),
    "NaN": ({"fc.bias": torch.full((10,), torch.nan)}, "fc.bias in w.pth holds values that are not finite; give"),
    "beyond fp32": ({"fc.bias": torch.full((10,), 1e300, dtype=torch.float64)}, "fc.bias in w.pth holds values th"),
    "whole numbers": ({"fc.bias": torch.zeros(10, dtype=torch.int8)}, "fc.bias in w.pth is torch.strided torch.int8"),
    "sparse": ({"fc.bias": torch.zeros(10).to_sparse()}, "is torch.sparse_coo torch.float32 on cpu, and"),
    "no memory": ({"fc.bias": torch.zeros(10, device="meta")}, "is torch.strided torch.float32 on meta, and"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Tensor | None], sentence: str):
    refuses(re.escape(sentence), fit, resnet18(**changes), RESNET18, 10)


def test_weights_of_other_classes_or_of_another_model_are_called_so():
    with pytest.raises(UserError, match=r"w tells 1000 classes apart, and the data has 10; .*an empty folder train/<c"):
        fit(Weights("w", zeros(RESNET18, 1000)), RESNET18, 10)
    with pytest.raises(UserError, match=r"recipe's model resnet18: conv1.weight is missing, .*or a recipe with theirs"):
        fit(Weights("w", zeros(CifarNet(kind="cifarnet"), 1000)), RESNET18, 10)


def test_with_a_fresh_head_whatever_the_last_layer_was_does_not_matter():
    network = build_model(RESNET18, 3)
    before = network.fc.weight.detach().clone()
    for changes in ({}, HEADLESS, {"fc.bias": torch.full((10,), torch.nan)}):
        nn.init.ones_(network.conv1.weight)
        fill(network, fit(resnet18(**changes), RESNET18, 3, fresh_head=True))
        assert torch.equal(network.fc.weight, before)
        assert before.any()
        assert not network.conv1.weight.any()
