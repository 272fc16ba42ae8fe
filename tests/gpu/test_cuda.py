"""The same promises on a GPU with NCCL. Run with `pytest tests/gpu` where there is one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.autograd import DeviceType
from torch.nn.functional import dropout
from torch.profiler import ProfilerActivity, profile
from torchvision.models import resnet18

import tests
from imagenet_fast.data.build import build_loaders
from imagenet_fast.data.prepare.run import prepare
from imagenet_fast.data.prepare.write import Settings
from imagenet_fast.distributed.device_timer import record_timestamp, seconds_between
from imagenet_fast.distributed.init import DistContext
from imagenet_fast.errors import UserError
from imagenet_fast.launch.job_setup import plan_evaluation
from imagenet_fast.recipe.batching import Batching, split_batch
from imagenet_fast.recipe.data_config import ImageData
from imagenet_fast.recipe.load import parse_recipe
from imagenet_fast.training.evaluation import evaluate_weights
from imagenet_fast.training.init_weights import build_initial_model, load_initial_weights
from imagenet_fast.training.optimizers import LARS, build_optimizer
from imagenet_fast.training.training_step import build_step, seed_step
from tests.conftest import tables
from tests.data.small import image_data


@pytest.fixture
def world() -> Iterator[DistContext]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1, device_id=device)
    yield tests.world(0, 1, device=device)
    dist.destroy_process_group()


ENGINES = ("lazy", "allreduce", "ring", "hybrid", "dear", "auto", "ddp", "sparse", "powersgd")
TRAINED = [
    (sync, precision, ("sgd", "lars")[(one + other) % 2])
    for one, sync in enumerate(ENGINES)
    for other, precision in enumerate(("fp32", "bf16", "fp16"))
    if precision != "fp16" or sync not in ("sparse", "powersgd")  # which a recipe may not combine
]
"""Each engine in each precision, and both optimizers with each of them."""


@pytest.mark.parametrize(("sync", "precision", "optim"), TRAINED)
def test_a_step_trains_and_reports(world: DistContext, sync: str, precision: str, optim: str):
    recipe = parse_recipe(
        "test",
        tables(
            reference_ranks=1, sync={"kind": sync}, precision={"kind": precision},
            optim={"kind": optim, "lr": 0.05 if optim == "sgd" else 2.0, "weight_decay": 5e-5},
        ),
    )  # fmt: skip
    model = build_initial_model(recipe, 10, world)
    take_step = build_step(recipe, split_batch(recipe, 1), model, world, steps_per_epoch=4)
    generator = torch.Generator("cuda").manual_seed(0)
    images = torch.randn(16, 3, 64, 64, device=world.device, generator=generator)
    labels = torch.arange(16, device=world.device) % 10

    def loss() -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(images), labels))

    before = loss()
    for _ in range(20):
        take_step(iter([(images, labels)]), recipe.optim.lr)
    assert loss() < 0.7 * before
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("precision", "exact"), [("fp32", True), ("tf32", False)])
def test_fp32_is_fp32_unless_tf32_is_asked_for(world: DistContext, precision: str, exact: bool):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    recipe = parse_recipe("test", tables(reference_ranks=1, precision={"kind": precision}))
    build_step(recipe, split_batch(recipe, 1), build_initial_model(recipe, 10, world), world, steps_per_epoch=4)
    images = torch.randn(8, 64, 32, 32, device=world.device)
    weights = torch.randn(64, 64, 3, 3, device=world.device)
    left, right = torch.randn(2, 512, 512, device=world.device)
    for product, operands in ((torch.matmul, (left, right)), (torch.conv2d, (images, weights))):
        reference = product(*(operand.double() for operand in operands))
        error = float((product(*operands) - reference).abs().max() / reference.abs().max())
        assert (error < 3e-5) == exact, f"{product.__name__} errs by {error}: cuDNN's fp32 by 1e-5, TF32 by 3e-4"


@pytest.mark.parametrize("sync", ["lazy", "hybrid", "dear"])
def test_a_timeline_begins_at_its_first_event(world: DistContext, sync: str, tmp_path: Path):
    recipe = parse_recipe("test", tables(reference_ranks=1, sync={"kind": sync}))
    model = build_initial_model(recipe, 10, world)
    take_step = build_step(recipe, split_batch(recipe, 1), model, world, 4, tmp_path / "trace.json")
    images = torch.randn(16, 3, 64, 64, device=world.device)
    labels = torch.arange(16, device=world.device) % 10
    for _ in range(15):
        take_step(iter([(images, labels)]), 0.01)
    slots = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert min(e["ts"] for e in slots) == 0
    assert all(e["dur"] >= 0 for e in slots)


def test_a_mark_is_told_from_a_later_one_whichever_is_given_first(world: DistContext):
    first = record_timestamp(world.device)
    torch.ones(2**28, device=world.device).sum()
    second = record_timestamp(world.device)
    assert seconds_between(second, first) < 0 < seconds_between(first, second)


def test_weights_from_a_file_are_judged_and_started_from(world: DistContext, tmp_path: Path):
    file = tmp_path / "w.pth"
    theirs = resnet18(num_classes=10)
    torch.save(theirs.state_dict(), file)
    recipe = parse_recipe("test", tables(reference_ranks=1))
    model = build_initial_model(recipe, 10, world, load_initial_weights(file, recipe.model, 10, world))
    assert all(torch.equal(t.cpu(), theirs.state_dict()[name]) for name, t in model.state_dict().items())
    verdict = evaluate_weights(plan_evaluation(file, "smoke", ["precision.kind=fp32"], 1), world)
    assert (verdict.images, verdict.world_size) == (63, 1)
    with pytest.raises(UserError, match="10 classes apart, and the data has 3"):
        load_initial_weights(file, recipe.model, 3, world)


@pytest.mark.parametrize("augment", [False, True])
def test_dali_decodes_on_the_gpu_what_it_decodes_on_the_cpu(
    world: DistContext, image_dir: Path, augment: bool, capfd: pytest.CaptureFixture[str]
):
    """Without a word of windows that it leaves to the CPU: torchvision's nvJPEG is loaded, and cannot cut them."""
    pytest.importorskip("nvidia.dali", reason="DALI is too large to travel to a lent GPU")
    table = {"dataset": "digits", "loader": "dali", "image_size": 48, "resize": 56, "augment": augment, "workers": 1}
    table["resident"] = False
    data = parse_recipe("test", tables(data=table)).data
    assert isinstance(data, ImageData)
    batches = []
    for device in (world.device, torch.device("cpu")):
        batches.append(list(islice(build_loaders(data, image_dir, Batching(1, 8, 1), 0, 2, device, seed=1).train, 5)))
    for (ours, labels), (reference, reference_labels) in zip(*batches, strict=True):
        assert ours.device == labels.device == world.device
        assert torch.equal(labels.cpu(), reference_labels)
        assert (ours.cpu() - reference).abs().mean() < 0.08
    assert "WARNING" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("resident", [False, True])
def test_a_gpu_resizes_stored_pixels_as_the_cpu_does(
    world: DistContext, image_dir: Path, tmp_path: Path, resident: bool
):
    """Within two grey levels, of which one is 0.02 when normalised."""
    settings = Settings(format="pixels", resize=None, quality=None, shard_size=10**9)
    prepare(image_dir, tmp_path / "pixels", settings, subset=True)
    batches = []
    for device, lives_there in ((world.device, resident), (torch.device("cpu"), False)):
        data = image_data(resident=lives_there)
        loaders = build_loaders(data, tmp_path / "pixels", Batching(1, 8, 1), 0, 2, device, seed=1)
        batches.append([*islice(loaders.train, 9), *loaders.next_evaluation()])
    for (ours, labels), (reference, reference_labels) in zip(*batches, strict=True):
        assert torch.equal(labels.cpu(), reference_labels)
        assert (ours.cpu() - reference).abs().max() < 0.04


def replayed(ones: Tensor) -> Callable[[Tensor], Tensor]:
    """Dropout of these as a CUDA graph."""
    dropout(ones)  # before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dropout(ones)
    return lambda _: graph.replay() or captured


def test_lars_takes_the_same_step_of_the_same_pieces_every_time():
    """As every rank must: where a part is sent, norms are over many pieces of a tensor."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(64, 1024, device="cuda")) for _ in range(8)]
    gradients = [torch.randn_like(param) for param in params]
    optimizer = LARS(params, 0.1, momentum=0.0)
    optimizer.elements = {param: [slice(1024 * n, 1024 * n + 1000) for n in range(64)] for param in params}
    begun, ends = [param.detach().clone() for param in params], set()
    for _ in range(200):
        with torch.no_grad():
            torch._foreach_copy_(params, begun)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
        ends.add(torch.cat([param.detach().flatten() for param in params]).cpu().numpy().tobytes())
    assert len(ends) == 1


@pytest.mark.parametrize("optim", ["sgd", "lars"])
def test_an_update_launches_fewer_kernels_than_there_are_tensors(optim: str):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(80))).cuda()
    recipe = parse_recipe("test", tables(optim={"kind": optim, "lr": 0.1, "weight_decay": 5e-5}))
    optimizer = build_optimizer(recipe.optim, model)
    for _ in range(3):  # the first makes the momentum
        for param in optimizer.params:
            param.grad = torch.full_like(param, 1e-3)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
            optimizer.step()
            torch.cuda.synchronize()
    kernels = [event.name for event in watched.events() if event.device_type == DeviceType.CUDA]
    assert 0 < len(kernels) < len(optimizer.params) == 160, kernels
    assert not any("DtoH" in name for name in kernels), "the host waits for none"


HOW: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "called": lambda _: dropout, "replayed": replayed, "compiled": lambda _: torch.compile(dropout),
}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_random_numbers_are_what_seed_and_step_say(world: DistContext, how: str):
    ones = torch.ones(4096, device=world.device)
    drop, masks = HOW[how](ones), []
    for step in (7, 8, 7):
        seed_step(1, step, world)
        masks.append(drop(ones).clone())
    first, second, again = masks
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
