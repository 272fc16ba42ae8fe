"""Clusters: nodes, GPUs, NICs, stragglers and input, read from a TOML file. See ``clusters/*.toml``."""

from __future__ import annotations

import json
import math
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails

from imagenet_fast.cost_model.collectives import RankLayout
from imagenet_fast.errors import UserError, did_you_mean
from imagenet_fast.plan.devices import Device, find_device
from imagenet_fast.plan.network import StatedNetwork
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.load import recipe_folder

Positive = Annotated[float, Field(ge=1e-6, le=1e6)]
Known = Annotated[Positive | None, BeforeValidator(lambda value: None if value == "unknown" else value)]
"""A number above 0, or "unknown" (None)."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Share = Annotated[float, Field(ge=1e-6, le=1)]
Sigma = Annotated[float, Field(ge=0, le=10)]
Shown = Literal[
    "nodes", "nic.gbit", "nic.count", "nic.efficiency", "nic.latency_us", "inside.gb_per_s", "inside.latency_us",
    "stragglers.sigma", "input.images_per_s",
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
    """Rate of a node's loaders."""

    images_per_s: Known = None


class Cluster(Table):
    """A cluster of equal nodes."""

    source: str
    """The source of its figures."""
    nodes: Count
    gpus_per_node: Count
    device: str
    """A device of ``plan/devices.toml``, or the path of a layer profile that `bench profile` wrote."""
    device_batch: Count | None = None
    """Images of a step in that layer profile."""
    usd_per_gpu_hour: Annotated[float, Field(gt=0, le=1e4)] | None = None
    """The price of a GPU for an hour, for `plan --fastest`."""
    kinds: dict[Shown, Literal["measured", "published", "assumed"]] = Field(default_factory=dict)
    """The kind of each value, by its key."""
    nic: Nic
    inside: Inside = Inside(gb_per_s=None)
    stragglers: Stragglers = Stragglers()
    input: Input = Input()

    @property
    def gpu(self) -> Device:
        """The device. Raises UserError if there is no such device."""
        return find_device(self.device, self.device_batch)

    def with_nics(self, gbit: float) -> Cluster:
        """Return the cluster with another rate of all NICs of a node together."""
        return self.model_copy(update={"nic": self.nic.model_copy(update={"gbit": gbit, "count": 1})})

    def network(self, gpus: int, case: int = 1) -> StatedNetwork:
        """Return the network between ``gpus`` ranks, on whole nodes or on a part of one.

        Args:
            gpus: Number of ranks.
            case: 0, 1 or 2: the low, used or high efficiency of the NICs, with the high, used or low sigma.

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
            raise UserError("nic.gbit is unknown, and several nodes exchange gradients; write the rate, or sweep nic=")
        if each > 1 and inside is None:
            raise UserError(f"inside.gb_per_s is unknown, and {each} GPUs of a node exchange gradients; write it")
        payload = [share * (gbit or math.inf) * 1e9 / 8 for share in self.nic.efficiency]
        return StatedNetwork(
            RankLayout((each,) * nodes, self.gpu.on_gpu), payload[case], (inside or math.inf) * 1e9,
            self.inside.latency_us * 1e-6, self.nic.latency_us * 1e-6, self.inside.in_switches,
            typical_bytes_per_s=payload[1], sigma=self.stragglers.sigma[2 - case],
        )  # fmt: skip


def cluster_folder() -> Path:
    """Return the directory of the shipped clusters, beside that of the recipes."""
    return recipe_folder().with_name("clusters")


def cluster_names() -> list[str]:
    """Return the names of the shipped clusters."""
    return sorted(path.stem for path in cluster_folder().glob("*.toml") if path.stem != "published")


def load_cluster(name: str) -> Cluster:
    """Read a cluster by the name of a shipped one, or from a TOML file.

    Raises:
        UserError: There is none, or a value is wrong. The message names the key and a fix.
    """
    path, names = Path(name), cluster_names()
    if path.suffix != ".toml" and len(path.parts) <= 1:
        if name not in names:
            otherwise = f"there are {', '.join(names)}, or give a .toml file"
            raise UserError(f"there is no cluster '{name}'; {did_you_mean(name, names, otherwise, 2, 0.4)}")
        path = cluster_folder() / f"{name}.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        cluster = Cluster.model_validate_json(json.dumps(tables, default=str))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; correct the path, or take one of {', '.join(names)}") from None
    except ValidationError as error:
        raise UserError(f"{path.name}: {_explain(error.errors()[0])}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as TOML ({error}); correct it there") from None
    beside = path.parent / cluster.device
    recorded = beside.suffix == ".json" and beside.exists()
    return cluster.model_copy(update={"device": str(beside)}) if recorded else cluster


def this_machine() -> Cluster:
    """Return this machine's GPUs as a cluster of one node, with links inside as in a shipped cluster of such GPUs.

    Raises:
        UserError: There are none, or of a kind that no shipped cluster has.
    """
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(asked, capture_output=True, encoding="utf-8", timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        gpus = []
    words = set(re.split(r"[^a-z0-9]+", gpus[0].lower())) if gpus else set()
    for name in cluster_names():
        like = load_cluster(name)
        if words >= set(like.device.split("-")):
            source = f"this machine, {len(gpus)} x {gpus[0]}; its links are assumed to be those of {name}"
            own = {"source": source, "nodes": 1, "gpus_per_node": len(gpus), "nic": Nic(gbit=None), "kinds": {}}
            return like.model_copy(update=own)
    found = f"nothing is known of its {gpus[0]}" if gpus else "it has no GPUs that nvidia-smi shows"
    raise UserError(
        f"--cluster is missing, so this machine was asked, and {found}; there are {', '.join(cluster_names())}, or "
        "give a .toml file"
    )


def _explain(error: ErrorDetails) -> str:
    """Return one pydantic error as a sentence with the key and a fix."""
    key = ".".join(str(part) if str(part).isprintable() else repr(part) for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            table, *inside = error["loc"]
            known: Any = Cluster.model_fields[str(table)].annotation if inside else Cluster
            return f"unknown key {key}; the keys here are {', '.join(known.model_fields)}"
        case "missing":
            return f'{key} is missing; add it, or write "unknown" where it may be'
        case "value_error":
            return f"{key}: {error['ctx']['error']}"
        case _:
            found = json.dumps(error["input"], default=str)[:80]
            return f"{key} is {found}: {error['msg'][0].lower()}{error['msg'][1:]}; correct it"
