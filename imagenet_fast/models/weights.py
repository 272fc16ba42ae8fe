"""Read and write weights: safetensors, and state dicts saved by ``torch.save``.

The latter are pickles, which can run any code when they are read. They are read by torch's weights-only reader, which
makes only tensors, containers and numbers; a file that asks for more is refused. The kind of a file is found from its
first bytes, not from its name.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeGuard

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from imagenet_fast.atomic_io import atomic_path
from imagenet_fast.distributed.heartbeat import here
from imagenet_fast.errors import UserError, first_line
from imagenet_fast.models import build_model
from imagenet_fast.recipe import schema
from imagenet_fast.recipe.schema import Recipe

_KEY = "imagenet_fast"  # the only metadata key: safetensors writes several in any order, and files would differ
_LFS = b"version https://git-lfs"
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_CLASSES = 7919  # a prime number, and no layer of a network is as wide
_PIECE = 1 << 24  # bytes that are written at once
_LISTED = 3  # number of misfitting weights that a message lists


@dataclass(frozen=True)
class Weights:
    """Weights of one file, under the names of a model's state dict, which may have a wrapper's before all of them."""

    source: str
    """Name of the source in messages."""
    tensors: dict[str, Tensor]
    about: dict[str, Any] = field(default_factory=dict)
    """Description made by ``describe``; empty for files of other programs."""

    @property
    def class_names(self) -> list[str]:
        """Names of the classes; empty if they are not known."""
        names = self.about.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else []


def read_weights(file: Path) -> Weights:
    """Read the weights in ``file``, on the CPU.

    Raises:
        UserError: The file holds no weights, cannot be read, or would run code.
    """
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); give a file of weights, or a run") from None
    if start.startswith(_LFS):
        raise UserError(f"{file} is a pointer of Git LFS and not the weights; run `git lfs pull` where it lies")
    if start[8:9] == b"{":  # the header, after its length
        return _read_safetensors(file)
    if start.startswith((_ZIP, _PICKLE)):
        return _unwrap(file, _read_pickle(file))
    raise UserError(f"{file} holds no weights; give a .safetensors file, a .pth of a state dict, or a run")


def write_weights(tensors: Mapping[str, Tensor], path: Path, about: Mapping[str, Any]) -> None:
    """Write weights by name, and ``about`` them what ``describe`` says, as a safetensors file, atomically."""
    metadata = {_KEY: json.dumps(about, sort_keys=True)} if about else None
    apart = {  # each with memory of its own, as safetensors wants, also where weights are tied
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    content = memoryview(save(apart, metadata))
    with atomic_path(path) as partial, partial.open("wb") as file:
        for start in range(0, len(content), _PIECE):
            file.write(content[start : start + _PIECE])
            here.move()  # a slow disk is no hang


def describe(name: str | None, recipe: Recipe, class_names: Sequence[str]) -> dict[str, Any]:
    """Return what a user of the weights needs: their model, and how images are prepared for it.

    The ``name`` of the recipe is left out if it is None, and so are the names of the classes if there are none.
    """
    data = recipe.data.model_dump(include={"resize", "mean", "std"}) | {"image_size": recipe.data.evaluated_size}
    classes = {"classes": list(class_names)} if class_names else {}
    named = {} if name is None else {"recipe": name}
    return {**named, "model": recipe.model.model_dump(), **data, **classes}


def fit(weights: Weights, model: schema.Model, classes: int, fresh_head: bool = False) -> Weights:
    """Return the tensors of ``weights`` that a model is filled with, in the dtypes of its own.

    Batch counts, which nothing here reads, may be missing, as in files from before torch had them. With ``fresh_head``
    the last layer is left out.

    Raises:
        UserError: A tensor is missing, unknown, of another shape, not plain or not finite, or a variance is negative.
    """
    expected = _expected(model, classes)
    weights = replace(weights, tensors=under_names_of(expected, weights.tensors))
    left_out = _head(model) if fresh_head else {}
    found = {n: tensor for n, tensor in weights.tensors.items() if n not in left_out and _is_read(n, tensor, expected)}
    expected = {name: tensor for name, tensor in expected.items() if name not in left_out}
    if wrong := _differences(found, expected):
        raise UserError(_misfit(weights, model, classes, wrong))
    fitting = {}
    for name, tensor in found.items():
        dtype = expected[name].dtype
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if not plain or tensor.is_floating_point() != dtype.is_floating_point:
            form = f"{tensor.layout} {tensor.dtype} on {tensor.device}"
            fix = "give weights in floating point" if dtype.is_floating_point else "give the weights as they were saved"
            raise UserError(f"{name} in {weights.source} is {form}, and plain {dtype} is wanted; {fix}")
        fitting[name] = fits = tensor.detach().to(dtype)
        trained = isinstance(expected[name], nn.Parameter) or name.endswith((".running_mean", ".running_var"))
        if not (fits.isfinite() if trained else ~fits.isnan()).all():  # a mask may hold infinities
            raise UserError(f"{name} in {weights.source} holds values that are not finite; give other weights")
        if name.endswith(".running_var") and fits.lt(0).any():
            raise UserError(f"{name} in {weights.source} holds variances below 0; give other weights")
    return replace(weights, tensors=fitting)


def with_classes(weights: Weights, model: schema.Model, class_names: Sequence[str]) -> Weights:
    """Return the result of ``fit`` with its classes in the order of ``class_names``, which are theirs."""
    order = torch.tensor([weights.class_names.index(name) for name in class_names])
    head = {name: weights.tensors[name].index_select(axis, order) for name, axis in _head(model).items()}
    return replace(weights, tensors=weights.tensors | head, about={**weights.about, "classes": list(class_names)})


def _is_read(name: str, tensor: Tensor, expected: Mapping[str, Tensor]) -> bool:
    """Return whether a network needs the tensor of a file: no batch counts, which conversions of a whole file spoil."""
    if name.endswith(".num_batches_tracked") and name in expected:
        return tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
    return True


def fill(network: nn.Module, fitting: Weights) -> None:
    """Load the result of ``fit`` into ``network``; what ``fit`` left out stays as it is."""
    named = {name: fitting.tensors.get(_plain(name)) for name in network.state_dict()}
    network.load_state_dict({name: tensor for name, tensor in named.items() if tensor is not None}, strict=False)


def classes_of(weights: Weights, model: schema.Model) -> int:
    """Return the number of classes, if the weights are of ``model``; 0 if they have no last layer of that name."""
    found, head = under_names_of(_expected(model, _CLASSES), weights.tensors), _head(model).items()
    return next((found[name].shape[axis] for name, axis in head if name in found and axis < found[name].dim()), 0)


def _read_safetensors(file: Path) -> Weights:
    try:
        with safe_open(file, framework="pt") as opened:
            said = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (it is no dict)
    except Exception as error:  # the errors of a reader on a damaged file are not documented
        raise UserError(f"{file} is damaged or cut off ({first_line(error)}); copy or fetch it again") from None
    try:
        about = json.loads(said.get(_KEY, "{}"))
    except (ValueError, RecursionError):
        about = {}
    return Weights(str(file), _plain_names(tensors), about if isinstance(about, dict) else {})


def _read_pickle(file: Path) -> object:
    try:
        with file.open("rb") as opened, warnings.catch_warnings(), torch.serialization.safe_globals([Namespace]):
            warnings.simplefilter("ignore")  # about TorchScript, which is refused
            return torch.load(opened, map_location="cpu", weights_only=True)  # given a path, torch would go by its name
    except Exception as error:  # the errors of a reader on a damaged file are not documented
        if asked := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{file} would have {asked[1]} called when it is read, which may run any code; give a file of the "
                "state dict alone, as torch.save(model.state_dict(), FILE) makes it"
            ) from None
        if "data.pkl: file not found" in str(error):
            raise UserError(
                f"{file} is an archive without a state dict, as a .pt2 is, of which nothing is read; give a "
                ".safetensors file, a .pth of a state dict, or a run"
            ) from None
        reason = "" if isinstance(error, UnpicklingError) else f" ({first_line(error)})"
        raise UserError(f"{file} is damaged, or no state dict{reason}; copy or fetch it again") from None


def _unwrap(file: Path, content: object) -> Weights:
    """Return the state dict in a file's content: all of it, or the only entry that is one."""
    if _is_state_dict(content):
        return Weights(str(file), _plain_names(content))
    entries = content if isinstance(content, dict) else {}
    inside = {str(name): _plain_names(value) for name, value in entries.items() if _is_state_dict(value)}
    if len(inside) != 1:
        among = f"; its entries are {', '.join(map(str, list(entries)[:8]))}" if entries else ""
        found = f"several state dicts, {' and '.join(inside)}" if inside else f"no state dict{among}"
        how = f"checkpoint[{[*inside][-1]!r}]" if inside else "model.state_dict()"
        raise UserError(f"{file} holds {found}; give a file of one alone, as torch.save({how}, FILE) makes it")
    ((name, tensors),) = inside.items()
    return Weights(f"{file} ({name})", tensors)


def _is_state_dict(value: object) -> TypeGuard[dict[str, Tensor]]:
    named = value.items() if isinstance(value, dict) else ()
    return bool(named) and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in named)


def under_names_of(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` by the names of ``expected``, if these differ from theirs in what all of them begin with."""
    if expected.keys() & tensors.keys():
        return dict(tensors)
    common = (os.path.commonprefix([*names]) for names in (expected, tensors))  # noqa: RUF071  (up to a dot)
    own, theirs = (prefix[: prefix.rfind(".") + 1] for prefix in common)
    return {own + name.removeprefix(theirs): tensor for name, tensor in tensors.items()}


def _plain(name: str) -> str:
    """Remove what torch adds to names of compiled modules; pytorch/examples wraps the features of AlexNet and VGG."""
    return name.replace("_orig_mod.", "").replace("features.module.", "features.")


def _plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_plain(name): tensor for name, tensor in tensors.items() if name != "n_averaged"}


def _expected(model: schema.Model, classes: int) -> dict[str, Tensor]:
    """Return the network's tensors by their plain names, without memory where that can be had."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of each tensor that a network of a user's loads while it is made
            network = build_model(model, classes)
    except Exception:  # a network defined elsewhere may compute with values while it is made
        network = build_model(model, classes)
    return _plain_names(network.state_dict(keep_vars=True))


def _head(model: schema.Model) -> dict[str, int]:
    """Return the axis of each tensor of the last layer that has an entry a class, by the tensor's name.

    It is found by a number of classes that divides no other axis, so it need not be linear, nor one layer alone.
    """
    tensors = _expected(model, _CLASSES).items()
    axes = ((name, axis, size) for name, tensor in tensors for axis, size in enumerate(tensor.shape))
    return {name: axis for name, axis, size in axes if size and size % _CLASSES == 0}


def _differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what is wrong with each tensor that does not fit, by name."""
    missing = [n for n in expected if n not in found and not n.endswith(".num_batches_tracked")]
    unknown = [n for n in found if n not in expected]
    other = [n for n in expected if n in found and found[n].shape != expected[n].shape]
    shapes = {n: f"is {list(found[n].shape)} instead of {list(expected[n].shape)}" for n in other}
    return shapes | dict.fromkeys(missing, "is missing") | dict.fromkeys(unknown, "is not known to it")


def _misfit(weights: Weights, model: schema.Model, classes: int, wrong: Mapping[str, str]) -> str:
    """Return the message why weights do not fit, as short as possible."""
    theirs = classes_of(weights, model)
    if theirs not in (0, classes) and not _differences(weights.tensors, _expected(model, theirs)):
        return (
            f"{weights.source} tells {theirs} classes apart, and the data has {classes}; give data of all {theirs} (to "
            "evaluate on some, as ImageNet-A, add an empty folder train/<class> for each), or train with --fresh-head"
        )
    listed = [f"{name} {what}" for name, what in list(wrong.items())[:_LISTED]]
    more = f" and {len(wrong) - _LISTED} more do not fit" if len(wrong) > _LISTED else ""
    what = f"is not of the recipe's model {model.label}: {', '.join(listed)}{more}"
    return f"{weights.source} {what}; give weights of that model, or a recipe with theirs"
