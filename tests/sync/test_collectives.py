"""All-reduce by any algorithm, over 1 to 8 ranks and any length."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from imagenet_fast.sync.lane import Lane

from imagenet_fast.ranks.roll_call import PeerLost
from imagenet_fast.recipe.engines import Collective
from imagenet_fast.sync.collectives import all_reduce, ring_bytes
from tests.spawning import run

LENGTHS = (0, 1, 3, 7, 4097, 270_001)  # the last one is more than one segment, in 16 bits too
COLLECTIVES = get_args(Collective)
WIRES = {torch.float32: 2e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@cache
def values(rank: int, length: int, world: int, integers: bool) -> torch.Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 * length + rank)
    if integers:  # whose mean over the ranks is an integer that 16 bits hold
        return world * torch.randint(-8, 8, (length,), generator=generator).float()
    return torch.randn(length, generator=generator)


@cache
def mean_of(length: int, world: int, integers: bool) -> torch.Tensor:
    """Over the ranks, in float64."""
    return torch.stack([values(rank, length, world, integers) for rank in range(world)]).double().mean(0)


@pytest.mark.parametrize("world", range(1, 9))
def test_every_rank_ends_with_the_mean_to_the_bit(world: int):
    fingerprints = run(world, _every_collective)
    assert all(f == fingerprints[0] for f in fingerprints)


def _every_collective() -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    lane = Lane(torch.get_default_device(), node=3)  # over 4, 5, 7 and 8 ranks the last node is smaller
    fingerprints = []
    for collective in COLLECTIVES:
        for wire, tolerance in WIRES.items():
            for integers in (True, False) if wire == torch.bfloat16 else (True,):
                tensors = [values(rank, n, world, integers).clone() for n in LENGTHS]
                transfers = [all_reduce(t, wire, collective, lane) for t in tensors]  # all under way at once
                for tensor, transfer, length in zip(tensors, transfers, LENGTHS, strict=True):
                    transfer.wait()
                    mean = mean_of(length, world, integers)
                    case = f"{collective} {wire} {length}"
                    if integers:
                        assert torch.equal(tensor.double(), mean), case
                    else:
                        torch.testing.assert_close(tensor.double(), mean, rtol=tolerance, atol=tolerance, msg=case)
                    fingerprints.append(hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest())
    return fingerprints


def test_bytes_are_as_in_theory():
    for collective, sent in zip(COLLECTIVES, zip(*run(4, _bytes_sent), strict=True), strict=True):
        message = 2 * 600_000
        match collective:
            case "parameter_server":
                assert sent == (3 * message, message, message, message)
            case "hierarchical":  # nodes of 2: member to leader, a ring of 2 leaders, leader to member
                assert sent == (2 * message, message, 2 * message, message)
            case _:
                assert sent == pytest.approx([ring_bytes(message, 4)] * 4, rel=1e-3), collective


def _bytes_sent() -> list[int]:
    lane = Lane(torch.get_default_device(), node=2)
    sent = []
    for collective in COLLECTIVES:
        transfer = all_reduce(torch.ones(600_000), torch.bfloat16, collective, lane)
        transfer.wait()
        sent.append(sum(part.sent_bytes for part in transfer.traffic))
    return sent


def test_butterfly_and_pairwise_add_alike_wherever_an_element_lies():
    """So fusing tensors changes no bit."""
    run(3, _fused_and_apart)


def _fused_and_apart() -> None:
    lane = Lane(torch.get_default_device())
    for collective, wire in (("butterfly", torch.float32), *(("pairwise", wire) for wire in WIRES)):
        fused = values(dist.get_rank(), 90_000, 3, False).clone()
        apart = [t.clone() for t in fused.split([7, 40_000, 1, 49_992])]
        all_reduce(fused, wire, collective, lane).wait()
        for tensor in apart:
            all_reduce(tensor, wire, collective, lane).wait()
        assert torch.equal(fused, torch.cat(apart)), (collective, wire)


def test_pairwise_rounds_once_so_its_error_does_not_grow_with_the_ranks():
    """The error of a 16-bit mean in units of a single rounding of it."""
    two, eight = (run(world, _errors)[0] for world in (2, 8))
    for wire in ("torch.bfloat16", "torch.float16"):
        assert eight[f"pairwise {wire}"] < 1.05
        assert two[f"pairwise {wire}"] < 1.05
        assert eight[f"native {wire}"] > 1.5 * eight[f"pairwise {wire}"]
        assert eight[f"ring {wire}"] < eight[f"native {wire}"]


def _errors() -> dict[str, float]:
    """Root mean square error beside float64, in units of what rounding each input once and the mean once gives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lane = Lane(torch.get_default_device())
    everyone = [values(r, 100_000, world, False) for r in range(world)]
    exact = sum(t.double() for t in everyone) / world
    errors = {}
    for wire in (torch.bfloat16, torch.float16):
        once = sum(t.to(wire).double() for t in everyone) / world
        unavoidable = (once.float().to(wire).double() - exact).square().mean().sqrt()
        for collective in ("native", "ring", "pairwise"):
            tensor = everyone[rank].clone()
            all_reduce(tensor, wire, collective, lane).wait()
            errors[f"{collective} {wire}"] = float((tensor.double() - exact).square().mean().sqrt() / unavoidable)
    return errors


def test_large_fp16_values_do_not_overflow_on_their_way():
    run(4, _large_values)


def _large_values() -> None:
    lane = Lane(torch.get_default_device())
    for collective in COLLECTIVES:
        tensor = torch.full((100,), 60_000.0)
        all_reduce(tensor, torch.float16, collective, lane).wait()
        assert torch.allclose(tensor, torch.tensor(60_000.0), rtol=1e-3), collective


def test_16_bit_gradients_are_added_in_fp32():
    run(4, _short_gradients)


def _short_gradients() -> None:
    rank = dist.get_rank()
    for dtype in (torch.bfloat16, torch.float16):
        for collective in ("ring", "butterfly", "pairwise", "hierarchical", "torus2d", "parameter_server"):
            tensor = values(rank, 500, 4, False).to(dtype)
            mean = sum(values(r, 500, 4, False).to(dtype).double() for r in range(4)) / 4
            all_reduce(tensor, torch.float32, collective, Lane(torch.get_default_device())).wait()
            torch.testing.assert_close(tensor.double(), mean, rtol=0, atol=4 * torch.finfo(dtype).eps, msg=collective)


def test_a_lost_peer_is_named():
    assert str(PeerLost(3, RuntimeError("Connection closed by peer"))).startswith("rank 3 closed its connection")
    assert math.isfinite(PeerLost(3, RuntimeError("Timed out waiting 10ms")).rank)
