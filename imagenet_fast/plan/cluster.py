"""Clusters: nodes, GPUs, NICs, stragglers and input, read from a TOML file. See ``clusters/*.toml``."""

from __future__ import annotations

import math
import re
import subprocess
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from imagenet_fast.cost_model.collectives import RankLayout
from imagenet_fast.errors import UserError
from imagenet_fast.plan.devices import Device, Kind, Pace, device_of, find_device
from imagenet_fast.plan.network import StatedNetwork, expected_max
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.load import find_file, read_toml, shipped, validated

Positive = Annotated[float, Field(ge=1e-6, le=1e6)]
Known = Annotated[Positive | None, BeforeValidator(lambda value: None if value == "unknown" else value)]
"""A number above 0, or "unknown" (None)."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Share = Annotated[float, Field(ge=1e-6, le=1)]
Sigma = Annotated[float, Field(ge=0, le=10)]
Shown = Literal[
    "nodes", "nic.gbit", "nic.count", "nic.efficiency", "nic.latency_us", "inside.gb_per_s", "inside.latency_us",
    "stragglers.sigma", "input.images_per_s", "input.dali", "input.published",
]  # fmt: skip
"""The values that `plan` shows, each with its kind."""


def _ordered(values: tuple[float, float, float]) -> tuple[float, float, float]:
    if not values[0] <= values[1] <= values[2]:
        raise ValueError("its numbers are low, used, high; put them in that order")
    return values


_Rising = AfterValidator(_ordered)


class Nic(Table):
    """The network cards of a node."""

    gbit: Known
    """Line rate of one in Gbit/s."""
    count: Count = 1
    """Cards of a node; all its GPUs share them."""
    efficiency: Annotated[tuple[Share, Share, Share], _Rising] = (0.8, 0.9, 0.95)
    """Share of the line rate that carries payload: low, used, high."""
    latency_us: Positive = 14.0
    """A hop between nodes; on CPUs a whole all-reduce."""

    @property
    def node_gbit(self) -> float | None:
        """Rate of all cards of a node together."""
        return self.gbit and self.gbit * self.count


class Inside(Table):
    """The links between the GPUs of a node."""

    gb_per_s: Known
    """GB/s that a GPU exchanges with the others in one direction."""
    latency_us: Positive = 3.4
    in_switches: bool = False
    """Whether the switches can add up (NVLS)."""


class Stragglers(Table):
    """Spread of the ranks' step times."""

    sigma: Annotated[tuple[Sigma, Sigma, Sigma], _Rising] = (0.005, 0.01, 0.02)
    """Standard deviation of a rank's step over its mean: low, used, high."""


class Input(Table):
    """Images a second that a node's loaders give."""

    images_per_s: Known = None
    """Of any loader, as `bench data` measures it; it counts instead of the others."""
    dali: Known = None
    """Of ``dali``, which reads JPEGs, for one GPU."""
    published: Known = None
    """Of the loaders of published results."""


class Cluster(Table):
    """A cluster of equal nodes."""

    name: str
    """Its name in messages and pictures. Default: that of its file."""
    source: str
    """The source of its figures."""
    nodes: Count
    gpus_per_node: Count
    device: str
    """A device of ``plan/devices.toml``, or the path of a layer profile that `bench profile` wrote."""
    device_batch: Count | None = None
    """Images of a step in that layer profile, if it does not say."""
    memory_gb: Positive | None = None
    """Memory of a GPU, if it is not the device's."""
    usd_per_gpu_hour: Annotated[float, Field(gt=0, le=1e4)] | None = None
    """The price of a GPU for an hour, for `plan fastest`."""
    kinds: dict[Shown, Kind] = Field(default_factory=dict)
    """The kind of each value, by its key."""
    nic: Nic
    inside: Inside = Inside(gb_per_s=None)
    stragglers: Stragglers = Stragglers()
    input: Input = Input()
    pace: Pace = "launched"
    """Whose steps the device takes."""

    @property
    def gpu(self) -> Device:
        """The device. Raises UserError if there is no such device."""
        device = find_device(self.device, self.device_batch, self.pace)
        return device if self.memory_gb is None else device.model_copy(update={"memory_gb": self.memory_gb})

    def images_per_s(self, loader: str, gpus: int) -> float | None:
        """Return the images a second that a ``loader`` gives ``gpus`` of a node; None if that is not known."""
        dali = gpus * self.input.dali if loader == "dali" and self.input.dali else None
        return self.input.images_per_s or (self.input.published if self.pace == "published" else dali)

    def with_nics(self, gbit: float) -> Cluster:
        """Return the cluster with another rate of all NICs of a node together."""
        assumed: dict[Shown, Kind] = {"nic.gbit": "assumed", "nic.count": "assumed"}
        nic = self.nic.model_copy(update={"gbit": gbit, "count": 1})
        return self.model_copy(update={"nic": nic, "kinds": self.kinds | assumed})

    def slowest(self, ranks: int, case: int = 1) -> float:
        """Return how many times as long as one rank alone the slowest of ``ranks`` computes, for which all wait.

        Each rank's time is normal around 1 with the standard deviation sigma, drawn anew in each step. Deferred
        updates hide none of this wait: no rank can begin step n + 2 before the slowest has ended step n.

        Args:
            ranks: Number of ranks.
            case: 0, 1 or 2: with the high, used or low sigma.
        """
        return 1.0 if ranks == 1 else 1 + self.stragglers.sigma[2 - case] * expected_max(ranks)

    def network(self, gpus: int, case: int = 1) -> StatedNetwork:
        """Return the network between ``gpus`` ranks, on whole nodes or on a part of one.

        Args:
            gpus: Number of ranks.
            case: 0, 1 or 2: the low, used or high efficiency of the NICs.

        Raises:
            UserError: They are no whole number of nodes, or a value that is needed is unknown.
        """
        each, gbit, inside = min(gpus, self.gpus_per_node), self.nic.node_gbit, self.inside.gb_per_s
        nodes, rest = divmod(gpus, each)
        if rest:
            raise UserError(
                f"{gpus} GPUs are no whole number of nodes of {each}; take {gpus - rest} or {gpus - rest + each}"
            )
        if nodes > 1 and gbit is None:
            raise UserError(
                f"{self.name}: nic.gbit is unknown, and several nodes exchange gradients; write the rate, or sweep nic="
            )
        if each > 1 and inside is None:
            raise UserError(
                f"{self.name}: inside.gb_per_s is unknown, and {each} GPUs of a node exchange gradients; write it"
            )
        payload = [share * (gbit or math.inf) * 1e9 / 8 for share in self.nic.efficiency]
        return StatedNetwork(
            RankLayout((each,) * nodes, self.gpu.on_gpu), payload[case], (inside or math.inf) * 1e9,
            self.inside.latency_us * 1e-6, self.nic.latency_us * 1e-6, self.inside.in_switches,
            typical_bytes_per_s=payload[1],
        )  # fmt: skip


def load_cluster(name: str, pace: Pace = "launched") -> Cluster:
    """Read a cluster by the name of a shipped one, or from a TOML file, with steps of a ``pace``.

    Raises:
        UserError: There is none, or a value is wrong. The message names the key and a fix.
    """
    path = find_file("cluster", name)
    cluster = validated(Cluster, path.name, {"name": path.stem} | read_toml(path) | {"pace": pace})
    beside = path.parent / cluster.device
    recorded = beside.suffix == ".json" and beside.exists()
    return cluster.model_copy(update={"device": str(beside)}) if recorded else cluster


def this_machine(pace: Pace) -> Cluster:
    """Return this machine's GPUs as a cluster of one node, with links inside as in a shipped cluster of such GPUs.

    Raises:
        UserError: There are none, or of a kind that no shipped cluster has.
    """
    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        gpus = subprocess.run(asked, capture_output=True, encoding="utf-8", timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        gpus = []
    card, _, mib = gpus[0].rpartition(", ") if gpus else ("", "", "")
    device = device_of(card)
    for name in shipped("cluster"):
        like = load_cluster(name, pace)
        if device is not None and like.device == device.name:
            switched = not like.inside.in_switches or re.search("pcie|nvl", card, re.IGNORECASE) is None
            source = f"this machine, {len(gpus)} x {card}; its {'links' if switched else 'steps'} are assumed to be"
            own = {
                "name": "this machine", "source": f"{source} those of {name}", "nodes": 1, "gpus_per_node": len(gpus),
                "memory_gb": float(mib) * 2**20 / 1e9, "nic": Nic(gbit=None), "kinds": {},
                "inside": like.inside if switched else Inside(gb_per_s=None),
            }  # fmt: skip
            return like.model_copy(update=own)
    found = f"nothing is known of its {card}" if gpus else "it has no GPUs that nvidia-smi shows"
    raise UserError(
        f"--cluster is missing, so this machine was asked, and {found}; there are {', '.join(shipped('cluster'))}, or "
        "give a .toml file"
    )
