"""The network of airbench: its size, its formula, its whitening, made from training images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tests
from imagenet_fast.data.build import example_images
from imagenet_fast.models import build_model
from imagenet_fast.models.cifarnet import whitening_filters
from imagenet_fast.recipe.data_config import ImageData, SyntheticData
from imagenet_fast.recipe.schema import CifarNet as Settings
from imagenet_fast.training.trainer import Trainer
from tests.ranks import with_ranks
from tests.sync.given import same_on_ranks
from tests.training.jobs import job_of


def built(*widths: int) -> nn.Module:
    torch.manual_seed(0)
    return build_model(Settings(kind="cifarnet", widths=widths), 10)


def correlated_images(count: int) -> Tensor:
    """Smooth images, whose neighbouring pixels are alike, as in photos."""
    torch.manual_seed(1)
    return F.avg_pool2d(torch.randn(count, 3, 36, 36), 5, stride=1) * 3 + 0.3


def test_logits_are_the_formulas():
    model = built(8, 12, 16).eval()
    for number, norm in enumerate(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.fill_(0.1 * number), norm.running_var.fill_(1.5), nn.init.constant_(norm.bias, 0.2)
    state, images = model.state_dict(), correlated_images(4)

    def normed(x: Tensor, name: str) -> Tensor:
        mean, var, bias = (state[f"{name}.{key}"].view(1, -1, 1, 1) for key in ("running_mean", "running_var", "bias"))
        return F.gelu((x - mean) / var.sqrt() + bias)

    x = F.gelu(F.conv2d(images, state["whiten.weight"], state["whiten.bias"]))
    for group in ("group1", "group2", "group3"):
        pooled = F.max_pool2d(F.conv2d(x, state[f"{group}.conv1.weight"], padding=1), 2)
        x = normed(pooled, f"{group}.norm1")
        x = normed(F.conv2d(x, state[f"{group}.conv2.weight"], padding=1), f"{group}.norm2")
    expected = F.linear(x.amax((2, 3)), state["head.weight"], state["head.bias"]) / 9
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)


def test_convolutions_begin_as_identities_where_they_can():
    model = built(32, 16, 40)
    x = torch.randn(1, 24, 5, 5)
    assert torch.equal(model.group1.conv1(x)[:, :24], x)
    assert not torch.equal(model.group1.conv1.weight[24:], torch.zeros_like(model.group1.conv1.weight[24:]))
    x = torch.randn(1, 32, 5, 5)
    assert torch.equal(model.group2.conv1(x), x[:, :16])


def test_whitened_patches_have_unit_covariance():
    images = correlated_images(40)
    windows = np.lib.stride_tricks.sliding_window_view(images.double().numpy(), (2, 2), axis=(2, 3))
    patches = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    variances = np.linalg.eigvalsh(patches.T @ patches / len(patches))[::-1]
    responses = patches @ whitening_filters(images.split(7)).double().numpy().reshape(12, 12).T
    expected = np.diag(variances / (variances + 5e-4))
    np.testing.assert_allclose(responses.T @ responses / len(responses), expected, atol=2e-3)
    assert variances[0] > 100 * variances[-1], "or there is nothing to whiten"


def test_the_first_layer_has_each_filter_in_both_signs_and_stays_as_it_is():
    model = built(8, 8, 8)
    images = correlated_images(20)
    model.set_whitening(images.split(5))
    filters = whitening_filters([images])
    torch.testing.assert_close(model.whiten.weight, torch.cat([filters, -filters]), rtol=1e-3, atol=1e-3)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    frozen = {f"group{g}.norm{n}.weight" for g in (1, 2, 3) for n in (1, 2)} | {"whiten.weight"}
    assert {name for name, _ in model.named_parameters()} - trained == frozen


DATA = {"dataset": "cifar10", "loader": "threads", "image_size": 32, "resize": 32, "workers": 1}


@with_ranks(3)
def test_ranks_begin_with_rank_zeros_whitening(image_dir: Path):
    """Only rank 0 reads images for it."""
    trainer = Trainer(job_of(images=image_dir, global_batch=24, data=DATA), tests.world())
    trainer.open_data()
    trainer.build()
    same_on_ranks(*trainer.model.state_dict().values())
    filters = whitening_filters(list(example_images(ImageData(**DATA), image_dir, seed=1)))
    torch.testing.assert_close(trainer.model.get_parameter("whiten.weight"), torch.cat([filters, -filters]))
    trainer.state.sync.close()


@pytest.mark.parametrize("loader", ["dali", "threads"])
def test_examples_are_whole_images_chosen_by_the_seed(image_dir: Path, loader: str):
    data = ImageData(**DATA)
    same = [torch.cat(list(example_images(data, image_dir, seed))) for seed in (1, 1, 2)]
    assert same[0].shape == (40, 3, 32, 32)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])
    other = data.model_copy(update={"loader": loader, "flip": True, "crop": "resized", "workers": 2})
    assert torch.equal(torch.cat(list(example_images(other, image_dir, 1))), same[0])
    many = SyntheticData(loader="synthetic", image_size=8, train_images=10**6, val_images=1, classes=3)
    assert sum(len(images) for images in example_images(many, None, 1)) == 5000
