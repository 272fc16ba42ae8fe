"""All-reduce by any algorithm, over 1 to 8 ranks in nodes of any size."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from imagenet_fast.cost_model.collectives import usual_collective
from imagenet_fast.distributed.watchdog import PeerLost
from imagenet_fast.recipe.sync_table import Collective
from imagenet_fast.sync.all_reduce import all_reduce, format_of, wire_for
from imagenet_fast.sync.butterfly import SHORT_BYTES
from imagenet_fast.sync.comm_stream import CommOp, launch
from imagenet_fast.sync.topology import Topology
from tests.conftest import tiers
from tests.ranks import lending, run, with_ranks
from tests.sync.given import process_groups

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
BY_NODE: tuple[Collective, ...] = ("hierarchical", "ring", "butterfly")
WIRES = {torch.float32: 2e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def reduced(
    values: torch.Tensor, wire: torch.dtype, collective: Collective, topology: Topology, servers: int = 1
) -> list[CommOp]:
    """What has all-reduced ``values`` by now."""
    ops = all_reduce(values, wire, collective, topology, servers)
    for wait in launch(ops):
        wait()
    return ops


def topologies(world: int) -> list[tuple[Topology, Sequence[Collective]]]:
    """Every number of ranks a node up to 3 that comes out even, and the collectives that it makes a difference to."""
    return [(lending(n), COLLECTIVES if n == 1 else BY_NODE) for n in (1, 2, 3) if world % n == 0]


@cache
def values(rank: int, length: int, world: int, integers: bool) -> torch.Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 * length + rank)
    if integers:  # whose mean over the ranks, and over those of a node, is an integer that 16 bits hold
        return world * torch.randint(-8, 8, (length,), generator=generator).float()
    return torch.randn(length, generator=generator)


@cache
def mean_of(length: int, world: int, integers: bool) -> torch.Tensor:
    """Over the ranks, in float64."""
    return torch.stack([values(rank, length, world, integers) for rank in range(world)]).double().mean(0)


PLACES = [
    (world, per_node, collective)
    for world, per_node in product(range(1, 9), (1, 2, 3))
    for collective in (COLLECTIVES if per_node == 1 else BY_NODE)
    if world % per_node == 0
]
QUICK = [place for place in PLACES if place[:2] in ((4, 1), (4, 2))]


@pytest.mark.parametrize(("world", "per_node", "collective"), tiers(QUICK, PLACES))
def test_every_rank_ends_with_the_mean_to_the_bit(world: int, per_node: int, collective: Collective):
    first, *others = run(world, ends_with_the_mean, collective, per_node)
    assert all(digests == first for digests in others)


@pytest.mark.ci
@pytest.mark.parametrize("servers", [2, 3, 5, 9])
def test_any_number_of_parameter_servers_answers_everybody_alike(servers: int):
    first, *others = run(5, ends_with_the_mean, "parameter_server", 1, servers)
    assert all(digests == first for digests in others)


def ends_with_the_mean(collective: Collective, per_node: int, servers: int = 1) -> list[str]:
    topology, world = lending(per_node), dist.get_world_size()
    fingerprints = []
    for wire, tolerance in WIRES.items():
        short = SHORT_BYTES // wire.itemsize // world * world  # from there on a butterfly takes another way
        lengths = [0, world, 4097 * world, *([short, short + world] if collective == "butterfly" else [])]
        if wire == torch.bfloat16:
            lengths.append(270_000 // world * world)
        for integers in (True, False) if wire == torch.bfloat16 else (True,):
            tensors = [values(topology.rank, n, world, integers).clone() for n in lengths]
            launched = [launch(all_reduce(t, wire, collective, topology, servers)) for t in tensors]  # all at once
            for tensor, waits, length in zip(tensors, launched, lengths, strict=True):
                for wait in waits:
                    wait()
                near = 0.0 if integers else tolerance
                mean = mean_of(length, world, integers)
                torch.testing.assert_close(tensor.double(), mean, rtol=near, atol=near, msg=f"{wire} {length}")
                fingerprints.append(hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest())
    return fingerprints


def test_bytes_are_as_in_theory():
    """Of four ranks, in two nodes."""
    message = 2 * 600_000
    own, half, whole = message // 4, message // 2, message
    by_rank = run(4, _bytes_sent)
    for rank, phases in enumerate(by_rank):
        assert phases["hierarchical"] == [half, own, own, half], "a node's link carries a node's share"
        assert phases["ring"] == phases["hierarchical 32"] == [half, half, half]
        assert phases["butterfly"] == [half, half, half]
        assert phases["pairwise"] == [3 * own, 3 * own]
        assert phases["native"] == [6 * own]
        assert phases["parameter_server"] == ([3 * whole] if rank == 0 else [whole])
        assert phases["2 servers"] == ([half, 3 * half] if rank in (0, 2) else [whole])
        third = whole // 3
        assert phases["3 servers"] == ([2 * third, 3 * third] if rank < 3 else [whole])
    for name in by_rank[0]:
        assert sum(sum(phases[name]) for phases in by_rank) == 6 * message, f"{name}: no byte more than the least"


def _bytes_sent() -> dict[str, list[int]]:
    topology = lending(2)
    sent = {}
    for name, wire, collective, servers in (
        *((collective, torch.bfloat16, collective, 1) for collective in COLLECTIVES),
        ("hierarchical 32", torch.float32, "hierarchical", 1),
        ("2 servers", torch.bfloat16, "parameter_server", 2),
        ("3 servers", torch.bfloat16, "parameter_server", 3),
    ):
        tensor = torch.ones(600_000 * 2 // wire.itemsize)
        ops = reduced(tensor, wire, collective, topology, servers)
        sent[name] = [op.sent_bytes for op in ops if op.sent_bytes]
    return sent


@pytest.mark.parametrize("world", [4])
@with_ranks()
def test_wherever_an_element_lies_it_is_added_alike(world: int) -> None:
    """So fusing tensors changes no bit."""
    topology = lending(2)
    exact: list[Collective] = ["pairwise", "parameter_server"]
    cases = [("butterfly", torch.float32), *((c, wire) for c in exact for wire in WIRES)]
    for collective, wire in [*cases, ("hierarchical", torch.bfloat16), ("hierarchical", torch.float16)]:
        fused = values(topology.rank, 90_000, world, False).clone()
        apart = [t.clone() for t in fused.split([8, 40_000, 4, 49_988])]
        reduced(fused, wire, collective, topology)
        for tensor in apart:
            reduced(tensor, wire, collective, topology)
        assert torch.equal(fused, torch.cat(apart)), (collective, wire)


@pytest.mark.parametrize("world", [4])
@with_ranks()
def test_large_fp16_values_do_not_overflow_on_their_way(world: int) -> None:
    for topology, collectives in topologies(world):
        for collective in collectives:
            tensor = torch.full((100,), 60_000.0)
            reduced(tensor, torch.float16, collective, topology)
            assert torch.allclose(tensor, torch.tensor(60_000.0), rtol=1e-3), collective


@pytest.mark.parametrize("world", tiers([4], [8]))
@with_ranks()
def test_what_is_of_16_bits_is_added_in_fp32_and_rounded_once_a_level(world: int) -> None:
    """Gradients of 16 bits, and those of fp32 that travel so: errors do not grow with ranks. But by the backend, whose
    ``native`` and ``ring`` add in their own dtype."""
    for (topology, collectives), wire, as_values in product(
        topologies(world), (torch.bfloat16, torch.float16), (True, False)
    ):
        everyone = torch.stack([values(r, 480, world, False) for r in range(world)])
        own, rounded = everyone[topology.rank], everyone.to(wire)
        for collective in collectives:
            tensor = own.to(wire) if as_values else own.clone()
            reduced(tensor, torch.float32 if as_values else wire, collective, topology)
            inner = topology.layout.row if collective == "hierarchical" else 1
            mean = rounded.view(-1, inner, 480).float().mean(1).to(wire).float().mean(0).to(wire).to(tensor.dtype)
            if collective in ("native", "ring", "butterfly"):
                near = world * torch.finfo(wire).eps
                torch.testing.assert_close(tensor, mean, rtol=0, atol=near, msg=collective)
            else:
                assert torch.equal(tensor, mean), (collective, wire, topology.nodes)


@with_ranks(4)
def test_16_bit_values_are_summed_in_fp32_between_nodes() -> None:
    fp32, bf16 = torch.float32, torch.bfloat16
    nodes = [lending(n) for n in (4, 2, 1)]
    for values_as, wire in ((fp32, bf16), (bf16, bf16), (bf16, fp32)):
        usual = [usual_collective(node.layout, format_of(wire_for(values_as, wire, node))) for node in nodes]
        assert usual == ["native", "hierarchical", "pairwise"]
    usual = [usual_collective(node.layout, format_of(fp32)) for node in nodes]
    assert usual == ["native", "hierarchical", "native"]


@with_ranks(3)
def test_uneven_nodes_refuse_levels_only() -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="3 ranks are no whole number of nodes of 2; give another number"):
        lending(2)
    with patch.dict(os.environ, GROUP_RANK=str(rank // 2)):  # as torchrun says it
        topology = Topology(torch.get_default_device())
    assert topology.nodes == ((0, 1), (2,))
    for collective in COLLECTIVES:
        tensor = values(rank, 300, 3, True).clone()
        if collective == "hierarchical":
            with pytest.raises(ValueError, match="nodes of 2, 1 ranks have no equal places; start equally many ranks"):
                all_reduce(tensor, torch.bfloat16, collective, topology)
        else:
            reduced(tensor, torch.bfloat16, collective, topology)
            assert torch.equal(tensor.double(), mean_of(300, 3, True)), collective
    topology.close()


def test_a_lost_peer_is_named():
    assert str(PeerLost(3, RuntimeError("Connection closed by peer"))).startswith("rank 3 closed its connection")


@with_ranks(4)
def test_ranks_may_be_placed_on_nodes_in_any_order() -> None:
    """As by `srun --distribution=arbitrary` or a rankfile; a group of torch has its ranks in rising order."""
    rank, mean = dist.get_rank(), mean_of(8192, 4, integers=False)
    with process_groups((2, 0, 3, 1), sort_ranks=False) as groups:
        for group in (None, *groups):
            with patch.dict(os.environ, GROUP_RANK="0110"[rank]):
                topology = Topology(torch.get_default_device(), group)
            assert topology.nodes == ((0, 3), (1, 2))
            for collective in COLLECTIVES:
                for wire, allowed in {torch.float32: 1e-6, torch.bfloat16: 4e-2, torch.int8: 1e-1}.items():
                    if wire != torch.int8 or collective != "native":
                        tensor = values(rank, 8192, 4, integers=False).clone()
                        reduced(tensor, wire, collective, topology)
                        assert (tensor.double() - mean).abs().max() <= allowed, (collective, wire, group)
            topology.close()
