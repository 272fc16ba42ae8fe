"""Networks of torchvision, timm and functions: built as there, and refused in a sentence."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.models
from torch import nn

import tests
from imagenet_fast.data.device import Normalizer
from imagenet_fast.distributed.reductions import RunningMeans
from imagenet_fast.models import build_model
from imagenet_fast.models.blurpool import BlurConv2d
from imagenet_fast.models.export import export_program
from imagenet_fast.models.external import check_network, to_channels_last
from imagenet_fast.models.weights import Weights, classes_of, fill, fit, read_weights, write_weights
from imagenet_fast.recipe.load import load_recipe, parse_recipe
from imagenet_fast.recipe.network import ExternalModel
from imagenet_fast.recipe.schema import Model, Recipe
from imagenet_fast.training.ema import ModelEma
from imagenet_fast.training.init_weights import build_initial_model
from imagenet_fast.training.training_step import seed_step
from tests.conftest import refuses, tables
from tests.models import own as networks
from tests.ranks import with_ranks

OWN = "tests.models.own"
ALONE = tests.world(0, 1)


def own(function: str, **options: Any) -> ExternalModel:
    return ExternalModel(kind="python", name=f"{OWN}:{function}", options=options)


def of_torchvision(name: str, **options: Any) -> ExternalModel:
    return ExternalModel(kind="torchvision", name=name, options=options)


def of_timm(name: str, **options: Any) -> ExternalModel:
    return ExternalModel(kind="timm", name=name, options=options)


def flawed(flaw: str) -> ExternalModel:
    return own("flawed", flaw=flaw)


def recipe_of(model: Model | dict[str, Any], **changes: Any) -> Recipe:
    return parse_recipe("test", tables(model=model if isinstance(model, dict) else model.model_dump(), **changes))


def check(model: Model) -> nn.Module:
    """The network, with which nothing is wrong."""
    network = build_model(model, 10)
    check_network(network, model, 10, [32], 32)
    return network


def test_networks_of_torchvision_timm_and_functions_are_their_own_to_the_bit():
    import timm

    for named, make in (
        (of_torchvision("mobilenet_v3_small", dropout=0.1),
         lambda: torchvision.models.mobilenet_v3_small(num_classes=7, dropout=0.1)),
        (of_timm("test_vit", img_size=32, drop_path_rate=0.1),
         lambda: timm.create_model("test_vit", num_classes=7, img_size=32, drop_path_rate=0.1)),
        (own("build", width=5), lambda: networks.build(7, width=5)),
    ):  # fmt: skip
        torch.manual_seed(3)
        ours = build_model(named, 7)
        torch.manual_seed(3)
        theirs = make()
        assert type(ours) is type(theirs)
        pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_keys_for_any_model_hold_for_them():
    both = {"blurpool": "conv", "init": ("linear_log_constant_bias",)}
    model = build_model(of_torchvision("resnet18").model_copy(update=both), 7)
    assert sum(isinstance(module, BlurConv2d) for module in model.modules()) == 6
    assert len(set(model.get_parameter("fc.bias").tolist())) == 1


MODELS: dict[str, Model] = {
    "a convolution is last": of_torchvision("squeezenet1_1"),
    "two heads": of_timm("deit_tiny_distilled_patch16_224", depth=1),
    "own": own("build"),
    "computes with values": own("Counting"),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_fit_and_tell_their_classes_wherever_the_last_layer_is(name: str):
    model = MODELS[name]
    weights = Weights("there", dict(build_model(model, 6).state_dict()))
    assert classes_of(weights, model) == 6
    assert fit(weights, model, 6).tensors.keys() == weights.tensors.keys()
    kept = fit(weights, model, 9, fresh_head=True).tensors
    assert len(kept) < len(weights.tensors)
    refuses("there tells 6 classes apart, and the data has 9", fit, weights, model, 9)


REFUSED: dict[str, tuple[Model | dict[str, Any], str]] = {
    "mistaken name": (of_torchvision("resnet5"), "torchvision has no classifier 'resnet5'; did you mean resnet50"),
    "no classifier": (of_torchvision("fcn_resnet50"), "torchvision has no classifier 'fcn_resnet50'"),
    "no such option": (of_torchvision("resnet18", dropout=0.1), r"built with \{'dropout': 0.1\}: TypeError in"),
    "mistaken timm": (of_timm("vit_smal"), "timm has no model 'vit_smal'; did you mean"),
    "mistaken option": (of_timm("test_vit", dropuot=0.1), "built with .*dropuot.*; correct it, or model.options"),
    "size": (of_timm("vit_tiny_patch16_224"), r"cannot take images of 32 pixels \(.*model.options"),
    "blurs nothing": (of_timm("test_vit").model_dump() | {"blurpool": "conv"}, "blurpool 'conv' blurs nothing"),
    "no linear layer": (
        of_torchvision("squeezenet1_1").model_dump() | {"init": ["linear_log_constant_bias"]}, "linear last layer"
    ),
    "no name": ({"kind": "timm"}, r"model.*name is missing; add it"),
    "no function": ({"kind": "python", "name": "build"}, "names no function; write it as package.module:function"),
    "no module": ({"kind": "python", "name": "no_such.module:build"}, "no_such.module cannot be imported .*install it"),
    "mistaken function": (own("biuld"), f"{OWN} has no function biuld"),
    "a list": (own("no_module"), "returned a list; let it return a torch.nn.Module"),
    "its own option": (own("build", wide=5), "cannot be built with {'wide': 5}: TypeError in .*unexpected"),
    "outside options": (own("build").model_dump() | {"dropout": 0.5}, "unknown key model.dropout; .*options"),
    "seven classes": (own("of_seven_classes"), r"shape \[2, 7\] for 2 images, and the data has 10 classes"),
    "view": (own("LeNet"), "write reshape or flatten instead of view .*, or set channels_last to false"),
}  # fmt: skip
FLAWS = {
    "pair": "returns a tuple for images; it must return a tensor",
    "parallel": "is wrapped in DataParallel; let it return the network itself",
    "lazy": "has no shape for more.weight; call it on an image",
    "complex": "has more of torch.complex64 beside others of torch.float32; convert it",
    "part": "has more as a part of a larger tensor.* a clone",
    "frozen": "has no parameter that is trained",
    "extra": "keeps _extra_state as a dict, and only tensors are saved; make it a buffer",
    "detached": "gives logits without a gradient",
    "double": r"of torch.float64 beside others of torch.float32; convert it, as by .to\(torch.float32\)",
    "mistyped": r"cannot be built with .*: TypeError in .*own.py, line \d+ \(",
    "raises": r"RuntimeError in .*own.py, line \d+ \(no luck\); correct it",
    "kept": "cannot be copied .*parametrizations",
    "late": "makes the buffer grid when it is called",
    "squeezed": r"shape \[10\] for 1 image, and the data has 10 classes",  # as an evaluation's last batch may be
}
REFUSED |= {flaw: (flawed(flaw), said) for flaw, said in FLAWS.items()}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(case: str):
    model, said = REFUSED[case]
    refused(said, model)


def refused(said: str, model: Model | dict[str, Any], **changes: Any) -> None:
    changes["reference_ranks"] = 1
    assert "\n" not in refuses(said, lambda: build_initial_model(recipe_of(model, **changes), 10, ALONE))


def test_a_network_that_views_its_maps_takes_contiguous_images():
    """In channels_last memory ``view`` fails, and not before the first step."""
    recipe, network = recipe_of(own("LeNet"), reference_ranks=1, channels_last=False), check(own("LeNet"))
    images = torch.zeros(4, 32, 32, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    for channels_last in (True, False):
        normalised = Normalizer(recipe.data, torch.device("cpu"), torch.float32, channels_last)(images)
        assert normalised.is_contiguous() != channels_last
    assert network(normalised).shape == (4, 10)


ASKED: dict[str, tuple[Model, str, dict[str, Any]]] = {
    "batches of one image": (flawed("norm of one"), "cannot take a single image of 32 pixels .*; choose a larger micro",
                             {"micro_batch": 1}),
    "unused under ddp": (flawed("unused"), "does not use more, and torch's DDP waits .* another engine than sync.kind",
                         {"sync": {"kind": "ddp"}}),
    "compiled": (of_timm("test_vit"), "compile true compiles known blocks, and model.kind 'timm' has none",
                 {"compile": True}),
    "tensor": (of_timm("test_vit"), "parallel.tensor 2 .* model.kind 'timm' has no such layers",
               {"parallel": {"tensor": 2}}),
}  # fmt: skip


@pytest.mark.parametrize("case", ASKED)
def test_what_a_recipe_may_not_ask_of_a_network_is_refused(case: str):
    model, said, changes = ASKED[case]
    refused(said, model, **changes)
    check(model)


def test_weights_may_have_masks_of_infinities(tmp_path: Path):
    """A run's own weights must be read again, and an average of masks must be the mask."""
    named = flawed("mask")
    network = build_model(named, 10)
    write_weights(network.state_dict(), tmp_path / "w.safetensors", {})
    fill(build_model(named, 10), fit(read_weights(tmp_path / "w.safetensors"), named, 10))
    average, means, mask = ModelEma(network, 0.9), RunningMeans(), network.get_buffer("more")
    others = {"third": torch.tensor([1 / 3, 0.1]), "rotary": torch.polar(torch.ones(4), torch.arange(4.0))}
    for _ in range(3):
        average.update(network.parameters())
        average.update_buffers()
        for name, tensor in (others | {"mask": mask}).items():
            means.add(name, tensor)
    assert torch.equal(average.module.get_buffer("more"), mask)
    assert all(torch.equal(means.values[name], tensor) for name, tensor in (others | {"mask": mask}).items())


@with_ranks(2)
def test_the_seed_decides_what_networks_draw_from_python_and_numpy():
    drawn, here = [], tests.world()
    for _ in range(2):
        network = build_initial_model(recipe_of(flawed("drawn")), 10, here)
        seed_step(1, 5, here)
        drawn.append(network.state_dict()["head.bias"] + random.random() + float(np.random.random()))
    assert torch.equal(*drawn)


def test_every_size_of_training_images_is_tried():
    model = "model={kind='timm', name='vit_tiny_patch16_224', options={img_size=32, depth=2}}"
    changes = ("data.image_size=32", "data.eval_size=32", "data.resize=48", model)
    recipe = load_recipe("cifar10-resnet18", overrides=changes)
    refuses(r"cannot take images of 4\d pixels .*data.sizes", build_initial_model, recipe, 10, ALONE)


@pytest.mark.parametrize("kind", ["index", "small integers", "five dimensions"])
@with_ranks(2)
def test_unusual_tensors_are_taken_beside_the_others(kind: str):
    network = build_initial_model(recipe_of(flawed(kind)), 10, tests.world())
    more = network.state_dict()["more"]
    assert int(more.sum()) == more.numel()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\nsys.exit('no GPU')", r"cannot be imported: SystemExit in .*broken.py, line 2 \(no GPU"),
        ("def build(n) return 1", r"cannot be imported: SyntaxError in .*broken.py, line 1 \("),
    ],
)
def test_a_broken_module_is_told_with_its_line(code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert "\n" not in refuses(said, build_model, ExternalModel(kind="python", name="broken:build"), 10)


def test_a_network_that_torch_cannot_trace_is_not_exported(tmp_path: Path):
    network = build_model(flawed("untraceable"), 10)
    told = r"torch.export cannot trace the network .*--format safetensors"
    refuses(told, export_program, network, 32, tmp_path / "network.pt2", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by", ["module", "_orig_mod"])
def test_weights_of_wrapped_networks_are_read_back(by: str, tmp_path: Path):
    model = own("wrapped", by=by)
    trained, other = build_model(model, 10), build_model(model, 10)
    write_weights(trained.state_dict(), tmp_path / "wrapped.safetensors", {})
    weights = read_weights(tmp_path / "wrapped.safetensors")
    fill(other, fit(weights, model, 10))
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), other.parameters(), strict=True))
    assert classes_of(weights, model) == 10
    assert f"{by}.head.weight" not in fit(weights, model, 7, fresh_head=True).tensors
    inner = replace(weights, tensors={n.removeprefix(f"{by}."): t for n, t in weights.tensors.items()})
    assert fit(inner, model, 10).tensors.keys() == fit(weights, model, 10).tensors.keys()


def test_weights_of_one_pixel_have_the_strides_of_their_gradients():
    """Where they differ, though the memory is the same, torch's DDP warns."""
    layer, images = nn.Conv2d(64, 128, 1, stride=2), torch.ones(16, 64, 16, 16)  # too large for torch's own kernels
    to_channels_last(layer)
    layer(images.contiguous(memory_format=torch.channels_last)).square().sum().backward()
    assert layer.weight.stride() == layer.weight.grad.stride()


def test_tied_weights_are_written_under_both_names(tmp_path: Path):
    network = build_model(own("tied"), 10)
    write_weights(network.state_dict(), tmp_path / "tied.safetensors", {})
    read = read_weights(tmp_path / "tied.safetensors").tensors
    assert all(torch.equal(read[name], tensor) for name, tensor in network.state_dict().items())


def test_a_missing_timm_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    refuses(r"pip install timm", build_model, of_timm("test_vit"), 10)


@with_ranks(2)
def test_a_check_leaves_norms_and_random_numbers_as_they_are():
    checked = build_initial_model(recipe_of(own("build", dropout=0.5)), 10, tests.world())
    drawn = torch.rand(3)
    torch.manual_seed(1)
    plain = build_model(own("build", dropout=0.5), 10)
    assert torch.equal(torch.rand(3), drawn)
    for one, other in zip(checked.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert any(isinstance(module, nn.BatchNorm2d) for module in checked.modules())


def test_a_network_in_evaluation_mode_trains_and_frozen_layers_stay_so():
    whole = build_model(own("from_elsewhere"), 10)
    assert all(module.training for module in whole.modules()), "else there would be no dropout and no statistics"
    for part in (build_model(own("frozen"), 10), build_model(own("Freezing"), 10)):
        assert [name for name, module in part.named_modules() if not module.training] == ["stem.1"]
