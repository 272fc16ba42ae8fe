"""Clusters: nodes, GPUs, NICs, stragglers and input, read from a TOML file. See ``clusters/*.toml``."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from imagenet_fast.cost_model.collectives import RankLayout
from imagenet_fast.errors import UserError, did_you_mean
from imagenet_fast.plan.network import StatedNetwork
from imagenet_fast.recipe.base import Table
from imagenet_fast.recipe.load import recipe_folder


def _unknown(value: object) -> object:
    return None if value == "unknown" else value


Known = Annotated[Annotated[float, Field(ge=1e-6, le=1e6)] | None, BeforeValidator(_unknown)]
"""A number above 0, or "unknown" (None)."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Share = Annotated[float, Field(ge=1e-6, le=1)]
Sigma = Annotated[float, Field(ge=0, le=10)]


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
    latency_us: Known = 14.0
    """A hop between nodes; on CPUs a whole all-reduce."""


class Inside(Table):
    """The links between the GPUs of a node."""

    gb_per_s: Known
    """GB/s that a GPU exchanges with the others in one direction."""
    latency_us: Known = 3.4
    in_switches: bool = False
    """Whether the switches can add up (NVLS)."""


class Stragglers(Table):
    """Spread of the ranks' step times."""

    sigma: Annotated[tuple[Sigma, Sigma, Sigma], _Rising] = (0.005, 0.01, 0.02)
    """Standard deviation of a rank's step over its mean: low, used, high."""


class Input(Table):
    """Rates of a node's loaders and storage."""

    images_per_s: Known = None
    gb_per_s: Known = None


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
    kinds: dict[str, Literal["measured", "published", "assumed"]] = Field(default_factory=dict)
    """The kind of each value, by its key."""
    nic: Nic
    inside: Inside = Inside(gb_per_s=None)
    stragglers: Stragglers = Stragglers()
    input: Input = Input()

    @model_validator(mode="after")
    def _kinds_of_keys(self) -> Cluster:
        for key in self.kinds:
            try:
                attrgetter(key)(self)
            except AttributeError:
                message = f'kinds has a key "{key}" that no cluster has; write it as "nodes" or "nic.gbit"'
                raise ValueError(message) from None
        return self

    def layout(self, gpus: int, on_gpu: bool) -> RankLayout:
        """Return ``gpus`` ranks on whole nodes, or on a part of one node.

        Raises:
            UserError: They are no whole number of nodes.
        """
        each = self.gpus_per_node
        if gpus <= each:
            return RankLayout((gpus,), on_gpu)
        if gpus % each:
            below = gpus - gpus % each
            raise UserError(f"{gpus} GPUs are no whole number of nodes of {each}; take {below} or {below + each}")
        return RankLayout((each,) * (gpus // each), on_gpu)

    def network(self, layout: RankLayout, which: int = 1, gbit: float | None = None) -> StatedNetwork:
        """Return the network between the ranks.

        Args:
            layout: The ranks.
            which: 0, 1 or 2: the low, used or high efficiency of the NICs.
            gbit: Rate of all NICs of a node together, instead of the cluster's.

        Raises:
            UserError: A value that is needed is unknown.
        """
        nodes, each = len(layout.nodes), layout.nodes[0]
        total = self.nic.gbit * self.nic.count if gbit is None and self.nic.gbit is not None else gbit
        if nodes > 1 and total is None:
            raise UserError("nic.gbit is unknown, and several nodes exchange gradients; write the rate, or sweep nic=")
        if nodes > 1 and self.nic.latency_us is None:
            raise UserError("nic.latency_us is unknown, and several nodes exchange gradients; write it, NCCL takes 14")
        if each > 1 and self.inside.gb_per_s is None:
            raise UserError(f"inside.gb_per_s is unknown, and {each} GPUs of a node exchange gradients; write it")
        low, used, high = (share * (total or 1.0) * 1e9 / 8 for share in self.nic.efficiency)
        return StatedNetwork(
            layout, (low, used, high)[which], (self.inside.gb_per_s or 1.0) * 1e9 if each > 1 else float("inf"),
            (self.inside.latency_us or 3.4) * 1e-6, (self.nic.latency_us or 14.0) * 1e-6,
            in_switches=self.inside.in_switches, typical_bytes_per_s=used,
        )  # fmt: skip


_TABLES: dict[str, type[Table]] = {"nic": Nic, "inside": Inside, "stragglers": Stragglers, "input": Input}


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
    path = Path(name)
    if path.suffix != ".toml" and len(path.parts) <= 1:
        names = cluster_names()
        if name not in names:
            otherwise = f"there are {', '.join(names)}, or give a .toml file"
            raise UserError(f"there is no cluster '{name}'; {did_you_mean(name, names, otherwise, 2, 0.4)}")
        path = cluster_folder() / f"{name}.toml"
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(cluster_names())
        raise UserError(f"there is no file {path}; correct the path, or take one of {known}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as TOML ({error}); correct it there") from None
    try:
        cluster = Cluster.model_validate_json(json.dumps(tables, default=str))
    except ValidationError as error:
        raise UserError(f"{path.name}: {_explain(error.errors()[0])}") from None
    beside = path.parent / cluster.device
    return (
        cluster.model_copy(update={"device": str(beside)}) if beside.suffix == ".json" and beside.exists() else cluster
    )


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
    words = re.split(r"[^a-z0-9]+", gpus[0].lower()) if gpus else []
    shipped = ((name, load_cluster(name)) for name in cluster_names())
    like = next(((name, one) for name, one in shipped if words and {*one.device.split("-")} <= {*words}), None)
    if like is None:
        found = f"nothing is known of its {gpus[0]}" if gpus else "it has no GPUs that nvidia-smi shows"
        raise UserError(
            f"--cluster is missing, so this machine was asked, and {found}; there are {', '.join(cluster_names())}, or "
            "give a .toml file"
        )
    source = f"this machine, {len(gpus)} x {gpus[0]}; its links are assumed to be those of {like[0]}"
    own = {"source": source, "nodes": 1, "gpus_per_node": len(gpus), "nic": Nic(gbit=None), "kinds": {}}
    return like[1].model_copy(update=own)


def _explain(error: ErrorDetails) -> str:
    """Return one pydantic error as a sentence with the key and a fix."""
    key = ".".join(str(part) if str(part).isprintable() else repr(part) for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            table: type[Table] = _TABLES.get(str(error["loc"][0]), Cluster) if len(error["loc"]) > 1 else Cluster
            return f"unknown key {key}; the keys here are {', '.join(table.model_fields)}"
        case "missing":
            return f'{key} is missing; add it, or write "unknown" where it may be'
        case "value_error":
            return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
        case _:
            found = json.dumps(error["input"], default=str)[:80]
            return f"{key} is {found}: {error['msg'][0].lower()}{error['msg'][1:]}; correct it"
