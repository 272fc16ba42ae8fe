"""What engines do on a GPU is ordered: seen on a CPU, by a detector that follows streams, events and memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any, get_args
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imagenet_fast import sync
from imagenet_fast.checkpoint import tree
from imagenet_fast.checkpoint.tree import HostCopy
from imagenet_fast.distributed import device_timer
from imagenet_fast.recipe.optim_config import Lars
from imagenet_fast.recipe.sync_table import Cast, Wire
from imagenet_fast.sync import EngineSettings, GradientPool, comm_stream, factory, network_benchmark, sparse
from imagenet_fast.sync.gradient_buffer import GradientBuffer
from imagenet_fast.sync.gradient_step import GradientStep
from imagenet_fast.sync.param_slot import ParamSlot
from imagenet_fast.sync.topology import Topology
from imagenet_fast.training.optimizers import LARS, build_optimizer
from tests.gpu_semantics.pretended_gpu import CPU, CUDA, OnGpu, PretendedGpu
from tests.ranks import run, with_ranks
from tests.sync.loops import unmeasured

WIRES: tuple[Wire, ...] = get_args(Wire)
FUSED = 0.01  # MiB: some of the model's tensors together


def engines(wire: Wire) -> dict[str, EngineSettings]:
    """By name; those that keep chunks or factors have no codes."""
    coding: dict[str, EngineSettings] = {
        "allreduce": sync.AllReduceSync(wire=wire),
        "ring": sync.RingSync(wire=wire, bucket_mb=FUSED),
        "lazy": sync.LazySync(wire=wire, threshold_mb=0),
        "lazy butterfly": sync.LazySync(wire=wire, threshold_mb=FUSED, collective="butterfly"),
        "hybrid": sync.HybridSync(wire=wire, fuse_mb=FUSED),
        "dear": sync.DearSync(wire=wire, bucket_mb=FUSED),
    }
    if wire not in get_args(Cast):
        return coding
    chunks = sync.SparseSync(wire=wire, sparsity=0.5, chunk=256, ramp_epochs=0, threshold_mb=FUSED / 4)
    factors = sync.PowerSgdSync(wire=wire, rank=2, bucket_mb=FUSED)
    return coding | {
        "sparse": chunks, "sparse hybrid": chunks.model_copy(update={"timing": "hybrid"}),
        "powersgd": factors, "powersgd dear": factors.model_copy(update={"timing": "dear"}),
    }  # fmt: skip


OPTIM = Lars(kind="lars", lr=0.1, momentum=0.9, weight_decay=1e-3, trust_coefficient=0.01)
PAGEABLE = "aten::_to_copy between pageable memory and the GPU"
MAY_WAIT = frozenset({
    "aten::_to_copy in of_first_rank", f"{PAGEABLE} in of_first_rank",  # on the order of the first step
    f"{PAGEABLE} in lay_out", f"{PAGEABLE} in __init__",  # of the pool in that order, and of its messages
    "aten::_local_scalar_dense in _counted_apart", f"{PAGEABLE} in _counted_apart",  # sparse makes its first streams
    "Event.synchronize in start",  # of sparse's ids, which came during forward
    "Event.synchronize in seconds_between", f"{PAGEABLE} in timing", "aten::_to_copy in timing",  # of watched steps
})  # fmt: skip
"""Where the host may wait inside a step."""
HARMLESS = frozenset({"_measure"})
"""It takes the norms of chunks on their way as well, in whose place ``_put_means`` puts those of their means."""


class Model(nn.Module):
    """For images of any size. Convolutions, norms and matrices: small, but with blocks of codes and ranks to take
    away."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.wide = nn.Linear(16, 320)
        self.head = nn.Linear(320, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.head(nn.functional.dropout(self.wide(x).relu(), self.dropout, self.training))


def faults(settings: EngineSettings, topology: Topology, gpu: PretendedGpu, steps: int = 3) -> list[str]:
    """What the detector finds in some steps, with a checkpoint after the second; fp16 is guarded."""
    gpu.detector.found.clear()
    model = gpu.move(Model())
    pool = GradientPool(model, settings, topology=topology)
    if settings.wire == "fp16":
        pool.guard(torch.finfo(torch.float16).max)
    optimizer, copy = build_optimizer(OPTIM, model), HostCopy()
    for step in range(steps):
        images = gpu.take(torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(step)))
        with gpu.step():
            pool.zero_grad()
            model(images).square().sum().backward()
            pool.end_backward()
            optimizer.found_inf = pool.found_inf
            pool.step(optimizer)
        if step == 1:
            with patch.object(tree, "Tensor", OnGpu):  # which takes no subclass of tensors
                pieces = copy.take({"pool": pool.state_dict(), "model": dict(model.state_dict())})
    with ThreadPoolExecutor(1) as writer:
        writer.submit(list, pieces).result()
    pool.settle()
    for values in model.state_dict().values():
        values.cpu()
    pool.close()
    return list(gpu.detector.found)


def _found(
    some: Sequence[EngineSettings], ranks_per_node: int | None = None, without: str = "", orders: int = 0,
    steps: int = 3,
) -> tuple[dict[str, list[str]], set[str]]:  # fmt: skip
    """By engine, and in so many other orders; and what was met of that which is allowed."""
    with unmeasured(), PretendedGpu(MAY_WAIT, HARMLESS, without, records=orders > 0) as gpu:
        topology = Topology(CUDA, ranks_per_node=ranks_per_node)
        found = {repr(settings): told for settings in some if (told := faults(settings, topology, gpu, steps))}
        for seed in range(orders):
            if wrong := gpu.recording.repeat(seed):
                found[f"order {seed}"] = [wrong]
        topology.close()
        return found, gpu.met | gpu.detector.met


def _in_order(world: int, *arguments: Any) -> None:
    for found, _ in run(world, _found, *arguments):
        assert found == {}


TWO_TIERS = [pytest.param(w, marks=pytest.mark.ci if w in ("bf16", "int8") else pytest.mark.weekly) for w in WIRES]


@pytest.mark.parametrize("engine", engines("bf16"))
def test_an_engine_is_ordered_on_a_gpu(engine: str):
    _in_order(2, [engines("bf16")[engine]])


def test_an_engine_is_ordered_on_nodes_of_two_gpus():
    _in_order(4, [engines("bf16")["hybrid"]], 2)


@pytest.mark.parametrize("wire", TWO_TIERS)
def test_engines_end_with_the_same_bits_in_any_order_that_waits_allow(wire: Wire):
    _in_order(2, list(engines(wire).values()), None, "", 3)


@pytest.mark.parametrize("wire", TWO_TIERS)
def test_engines_end_with_the_same_bits_in_any_order_on_nodes_of_two_gpus(wire: Wire):
    """Every other engine; its neighbours are met in the next wire."""
    _in_order(4, list(engines(wire).values())[WIRES.index(wire) % 2 :: 2], 2, "", 2)


AUTO = [sync.AutoSync(inexact=inexact) for inexact in (False, True)]
LEARNING = [sync.HybridSync(wire="bf16"), sync.DearSync(wire="int8"), sync.LazySync(), *AUTO]


@pytest.mark.ci
def test_all_that_is_allowed_is_met_by_an_engine():
    """Of all engines and wires, before their plan and after it. What nothing meets hides what a later change does."""
    calls: list[tuple[Any, ...]] = [([*engines(wire).values()],) for wire in WIRES]
    met: set[str] = set()
    for arguments in [*calls, (LEARNING, None, "", 0, 11)]:
        for found, allowed in run(2, _found, *arguments):
            assert found == {}
            met |= allowed
    assert met == MAY_WAIT | HARMLESS


@pytest.mark.parametrize("engine", ["lazy", "hybrid", "dear"])
@with_ranks(2)
@unmeasured()
def test_weights_are_read_on_a_second_stream_too(engine: str) -> None:
    """Evaluated there, before the next forward and beside it."""
    with PretendedGpu(harmless=HARMLESS) as gpu:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        # Its statistics stay, which a forward in training would write beside the evaluation.
        model, images = gpu.move(Model()).eval(), [gpu.take(torch.randn(4, 3, 4, 4)) for _ in range(4)]
        pool = GradientPool(model, engines("bf16")[engine])
        optimizer = build_optimizer(OPTIM, model)
        for some in images:
            pool.zero_grad()
            loss = model(some).square().sum()
            main.wait_stream(side)  # before weights are written
            loss.backward()
            pool.step(optimizer)
            side.wait_stream(main)
            with torch.cuda.stream(side), torch.no_grad():
                model(some)
        pool.close()
        assert gpu.detector.found == {}


@pytest.mark.parametrize("engine", ["ring", "hybrid", "sparse"])
@with_ranks(2)
def test_gradients_of_two_streams_are_copied_before_they_are_sent(engine: str) -> None:
    """Autograd calls a parameter's hook on the stream of its forward: here another one for biases and norms."""
    hook, made = GradientStep.on_gradient, list[Any]()

    def there(step: GradientStep, slot: ParamSlot) -> None:
        made[:] = made or [torch.cuda.Stream()]
        main, side = torch.cuda.current_stream(), made[0]
        torch.autograd.Variable._execution_engine.queue_callback(lambda: main.wait_stream(side))
        if slot.param.dim() > 1:
            return hook(step, slot)
        side.wait_stream(main)
        slot.param.grad.record_stream(side)  # type: ignore[union-attr]
        with torch.cuda.stream(side):
            return hook(step, slot)

    with patch.object(GradientStep, "on_gradient", there):
        found, _ = _found([engines("bf16")[engine]])
    assert found == {}


LAZY, SPARSE = sync.LazySync(wire="bf16", threshold_mb=FUSED), engines("bf16")["sparse"]


@pytest.mark.parametrize("left_out", ["wait_event", "wait_stream"])
@with_ranks(2)
def test_a_wait_left_out_is_found(left_out: str) -> None:
    found, _ = _found([LAZY], None, left_out, 1)
    assert "which has written the same memory" in "".join(found[repr(LAZY)])
    assert "reads other values" in found["order 0"][0]


@with_ranks(2)
def test_memory_let_go_of_too_early_is_found() -> None:
    """As ``sparse`` once did: of what its messages travel in it kept the gradients alone."""
    kept = sparse._Message

    def forgetting(begin: int, end: int, phases: object, *rest: Any) -> sparse._Message:
        return kept(begin, end, (), *rest)

    with patch.object(sparse, "_Message", forgetting):
        found, _ = _found([SPARSE])
    assert "was freed while all_reduce" in "".join(found[repr(SPARSE)])


@with_ranks(2)
def test_a_host_that_waits_inside_a_step_is_found() -> None:
    ratios = LARS._trust_ratios

    def asking(self: LARS, group: dict[str, Any], weight: Tensor, grad: Tensor) -> Tensor:
        return ratios(self, group if grad.isfinite().all() else {**group, "lr": 0.0}, weight, grad)

    with patch.object(LARS, "_trust_ratios", asking):
        found, _ = _found([LAZY])
    assert "the host waits for the GPU inside a step: aten::_local_scalar_dense" in "".join(found[repr(LAZY)])


def test_collectives_in_different_orders_are_found():
    with pytest.raises(AssertionError, match="ranks call other collectives than all_reduce"):
        run(2, _unlike)


def _unlike() -> None:
    mine = sync.LazySync(wire="fp32", threshold_mb=0 if dist.get_rank() else FUSED)
    with patch("imagenet_fast.sync.pool.compare_ranks", lambda *_: None):
        _found([mine])


@with_ranks(2)
@patch.object(network_benchmark, "_SHORT_AND_LONG", {"cuda": (2**14, 2**15)})
def test_links_are_timed_by_the_clock_of_the_gpu() -> None:
    """Between any two events a millisecond passes there."""
    with PretendedGpu() as gpu:
        topology = Topology(CUDA)
        link = network_benchmark.measure_link("butterfly", torch.bfloat16, topology)
        assert not gpu.detector.found
        topology.close()
    assert astuple(link) == (1e-3, 0.0, 0.0)


@pytest.mark.parametrize(("wire", "place"), [("bf16", CUDA), ("fp16", CUDA), ("fp32", CUDA), ("bf16", CPU)])
def test_auto_considers_nccls_own_all_reduce_where_sums_are_of_16_bits(wire: Wire, place: torch.device):
    names = [candidate.name for candidate in factory._candidates(sync.AutoSync(wire=wire), place)]
    assert ("lazy native" in names) is (wire != "fp32" and place == CUDA)
    assert len(set(names)) == len(names)


class Partial(Model):
    """One layer is used by the first rank alone, and one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.idle = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return self.alone(x) if dist.get_rank() == 0 else x


UNUSED = frozenset({"aten::_to_copy in used"})
"""Where the host waits to know of parameters that its rank has not used whether another has."""


@pytest.mark.parametrize("engine", ["lazy", "hybrid", "sparse"])
@with_ranks(2)
def test_a_host_waits_for_what_others_say_of_unused_parameters_and_for_nothing_else(engine: str) -> None:
    with patch.dict(globals(), Model=Partial, MAY_WAIT=MAY_WAIT | UNUSED):
        found, met = _found([engines("bf16")[engine]], orders=2)
    assert found == {}
    assert met >= UNUSED


@pytest.mark.parametrize("engine", ["lazy", "hybrid", "sparse"])
@with_ranks(2)
def test_waits_are_timed_together_and_those_of_layers_in_one_step_of_seven(engine: str) -> None:
    stamps, stamp = list[int](), Mock(side_effect=device_timer.record_timestamp)
    noted = (patch.object(module, "record_timestamp", stamp) for module in (device_timer, comm_stream))
    with unmeasured(), PretendedGpu() as gpu, next(noted), next(noted):
        pool = GradientPool(model := gpu.move(Model()), engines("bf16")[engine])
        for _ in range(12):
            pool.zero_grad()
            model(gpu.take(torch.ones(4, 3, 4, 4))).square().sum().backward()
            pool.update(lambda *_: None)
            stamps.append(stamp.call_count)
            stamp.reset_mock()
        pool.close()
    assert (
        stamps[6:] == [2] * 6 if engine != "hybrid" else [n > 2 for n in stamps[6:]] == [n == 10 for n in range(6, 12)]
    )


@pytest.mark.parametrize("settings", [sync.LazySync(), sync.AutoSync()])
def test_steps_are_timed_with_long_messages_as_each_launch_takes_time(settings: EngineSettings):
    with PretendedGpu() as gpu:
        pool = GradientPool(gpu.move(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))), settings)
        pool.zero_grad()
        assert pool.end_backward().launches == 1
        pool.close()


@with_ranks(2)
@unmeasured()
def test_nccl_takes_as_many_thread_blocks_for_a_group_as_it_may() -> None:
    """As training attaches an engine; and of one that ``auto`` builds in its place."""
    chooser = sync.AutoSync(inexact=True, max_ctas=4)

    def elected(gradients: GradientBuffer) -> sync.SyncEngine:
        return factory.build_engine(chooser, gradients).go_on_as("sparse")

    dear = sync.DearSync(wire="bf16", bucket_mb=0)
    for settings, limit in ((dear.model_copy(update={"max_ctas": 4}), 4), (dear, None), (elected, 4)):
        with PretendedGpu() as gpu:
            pool = GradientPool(gpu.move(Model()), settings)
            assert set(gpu.group_limits) == {limit}
            pool.close()


def test_an_unordered_read_is_told_by_its_bytes():
    """Streams may work on parts of one block side by side, and not on the same one."""
    with PretendedGpu() as gpu:
        values = torch.zeros(8, device=CUDA)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        values[:4].fill_(1.0)
        with torch.cuda.stream(side):
            values[4:].fill_(2.0)
            values.view(4, 2)[:, 1][2:].mul_(3.0)
        assert not gpu.detector.found
        with torch.cuda.stream(side):
            values[3:].mul_(2.0)
        (found,) = gpu.detector.found
        assert "mul_" in found.partition("does not wait for aten::fill_")[0]
