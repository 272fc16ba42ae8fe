"""Networks cut into stages: what lies together, under which names, and how even stages are."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from imagenet_fast.cost_model.layer_profile import Layer, Profile, load_profile
from imagenet_fast.models.split_points import segments_of
from imagenet_fast.models.stages import LocalStages, recorded_times, split_model
from tests.conftest import refuses, tiers
from tests.models.narrow import narrow_model
from tests.models.own import LeNet, Residual
from tests.models.test_models import NETWORKS

PIXELS = {"resnet18": 32, "resnet50": 32, "alexnet": 63, "alexnet_bn": 67, "cifarnet": 32}


def built(name: str) -> tuple[nn.Module, Tensor]:
    """A model in channels_last memory, and two images."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, PIXELS[name], PIXELS[name]).contiguous(memory_format=torch.channels_last)
    return narrow_model(NETWORKS[name], 10), images


def parts_of(model: nn.Module, images: Tensor, ranks: int, chunks: int = 1) -> list[LocalStages]:
    return [split_model(model, images, rank, ranks, chunks) for rank in range(ranks)]


def through(parts: list[LocalStages], values: Tensor) -> Tensor:
    """Stage by stage, each from a leaf, as it arrives from another rank."""
    for index in range(parts[0].count):
        part, number = parts[index % len(parts)], index // len(parts)
        if (arriving := part.stages[number].arriving) is not None:
            values = values.detach().requires_grad_()
            assert values.is_contiguous()
            assert (arriving.meta_tensor.shape, arriving.meta_tensor.dtype) == (values.shape, values.dtype)
        values = part(values, number)
    return values


@pytest.mark.parametrize("name", tiers([name for name in NETWORKS if name != "resnet50"], ["resnet50"]))
def test_stages_together_are_the_model_whatever_the_number_of_cuts(name: str):
    model, images = built(name)
    torch.manual_seed(1)  # of dropout
    expected = model(images)
    for ranks, chunks in ((3, 1), (2, 2)):
        parts = parts_of(model, images, ranks, chunks)
        states = [part.state_dict() for part in parts]
        assert sorted(name for state in states for name in state) == sorted(model.state_dict())
        assert all(torch.equal(value, model.state_dict()[name]) for state in states for name, value in state.items())
        torch.manual_seed(1)
        assert torch.equal(through(parts, images), expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_pieces_have_parameters_no_inplace_start_and_the_number_that_recipes_know(name: str):
    pieces = segments_of(built(name)[0])
    assert NETWORKS[name].most_stages == len(pieces)
    for piece in pieces:
        assert not getattr(next(iter(piece.values())), "inplace", False)
        assert any(p.requires_grad for layer in piece.values() for p in layer.parameters())


def test_piece_names_are_torchvisions():
    model, _ = built("resnet18")
    assert [list(piece) for piece in segments_of(model)] == [
        ["conv1"], ["bn1", "maxpool"], *([f"layer{n}.{block}"] for n in (1, 2, 3) for block in (0, 1)),
        ["layer4.0"], ["layer4.1", "avgpool", "flatten"], ["fc"],
    ]  # fmt: skip


def test_split_model_has_no_side_effects():
    model, images = built("resnet18")
    model.get_submodule("layer1").eval()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    state = torch.get_rng_state()
    split_model(model, torch.empty_like(images, device="meta"), 0, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_activations_between_stages_dtype_and_layout():
    for memory_format in (torch.contiguous_format, torch.channels_last):
        for cast, dtype in ((nullcontext(), torch.float32), (torch.autocast("cpu", torch.bfloat16), torch.bfloat16)):
            model, images = built("cifarnet")
            model = model.to(memory_format=memory_format)
            with cast:
                (stage,) = split_model(model, images.contiguous(memory_format=memory_format), 0, 2).stages
            assert stage.leaving.meta_tensor.dtype == dtype
            assert stage.leaving.axes == ((0, 2, 3, 1) if memory_format == torch.channels_last else (0, 1, 2, 3))


def test_stages_are_as_even_as_a_layer_profile_allows_and_without_one_work_is_counted():
    model, images = built("alexnet")
    profile = load_profile("alexnet")
    times = recorded_times(segments_of(model), profile)
    assert sum(times) == pytest.approx(1e3 * profile.compute_s)
    slowest = {}
    for ranks in (2, 4):
        parts = [split_model(model, images, rank, ranks, profile=profile) for rank in range(ranks)]
        slowest[ranks] = max(sum(recorded_times([part.stages[0].layers], _only(profile, part))) for part in parts)
    assert sum(times) / 2 / slowest[2] > 0.9
    assert sum(times) / 4 / slowest[4] > 0.7
    first, last = parts_of(*built("resnet18"), 2)
    assert len(first.stages[0].layers) < len(last.stages[0].layers) + 6
    assert sum(p.numel() for p in first.parameters()) < sum(p.numel() for p in last.parameters()) / 3


def _only(profile: Profile, part: LocalStages) -> Profile:
    """The layers of one part."""
    own = tuple(layer for layer in profile.layers if any(n.startswith(f"{layer.name}.") for n in part.state_dict()))
    return Profile(profile.model, profile.source, own)


def test_a_block_with_a_shortcut_is_one_piece():
    """A class of one's own may call a Sequential's layers and add to them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Residual(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2))
    assert len(segments_of(model)) == 3
    images = torch.randn(5, 4)
    assert torch.equal(through(parts_of(model, images, 3, 1), images), model(images))


@pytest.mark.usefixtures("subprocesses")
def test_what_cannot_be_cut_is_refused_in_a_sentence():
    model, images = built("alexnet")
    refuses("AlexNet makes 8 stages, not 9; lower", split_model, model, images, 0, 9)
    refuses("8 stages, not 10", split_model, model, images, 0, 5, chunks=2)
    refuses("order LeNet calls its layers is not known", segments_of, LeNet(10))
    refuses("order Residual calls its layers is not known", segments_of, Residual(nn.Linear(4, 4), nn.Linear(4, 4)))
    shared = nn.Linear(4, 4)
    refuses("Sequential reads a weight in several layers", segments_of, nn.Sequential(shared, nn.ReLU(), shared))


def test_layers_without_parameters_stay_with_the_one_before():
    relu = nn.ReLU(inplace=True)
    block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    model = nn.Sequential(relu, nn.Linear(4, 4), relu, block, nn.Linear(4, 2))
    assert [list(piece) for piece in segments_of(model)] == [["0", "1", "2", "3.0"], ["3.1"], ["4"]]
    nested = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Sequential(relu, nn.Linear(4, 4))))
    assert [list(piece) for piece in segments_of(nested)] == [["0", "1.0"]], "it would begin with the ReLU inside"
    profile = Profile("own", "by hand", (Layer("3.1", "Linear", ((4, 4),), 1.0, 2.0),))
    assert recorded_times(segments_of(model), profile) == [0.0, 3.0, 0.0]
