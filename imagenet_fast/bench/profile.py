"""Layer profiles: how long each layer of a model computes, and how large its gradients are. One JSON file each."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from imagenet_fast.errors import UserError

SHIPPED = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Layer:
    """A module with parameters, and what follows it up to the next such module."""

    name: str
    kind: str
    """Its class in torch.nn."""
    shapes: tuple[tuple[int, ...], ...]
    """Of its trainable parameters."""
    forward_ms: float
    backward_ms: float
    """From the moment that gradients of the layer above were ready until its own were."""

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Profile:
    """One step of a model, layers in the order of forward."""

    model: str
    source: str
    """Where the times come from."""
    layers: tuple[Layer, ...]

    @property
    def forward_s(self) -> float:
        return sum(layer.forward_ms for layer in self.layers) / 1e3

    @property
    def backward_s(self) -> float:
        return sum(layer.backward_ms for layer in self.layers) / 1e3

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def elements(self) -> int:
        return sum(layer.elements for layer in self.layers)

    def lasting(self, compute_s: float) -> Profile:
        """The same proportions in another time."""
        factor = compute_s / self.compute_s
        return replace(
            self,
            layers=tuple(
                replace(layer, forward_ms=layer.forward_ms * factor, backward_ms=layer.backward_ms * factor)
                for layer in self.layers
            ),
        )

    def shrunk(self, scale: int) -> Profile:
        """A ``scale``-th of each gradient's elements: the first dimension is divided, and never less than 1."""
        layers = tuple(
            replace(layer, shapes=tuple((max(1, shape[0] // scale), *shape[1:]) for shape in layer.shapes))
            for layer in self.layers
        )
        return replace(self, layers=layers)


def load_profile(name: str) -> Profile:
    """A shipped profile by its name, or a JSON file by its path. Raises UserError."""
    path = Path(name) if name.endswith(".json") else SHIPPED / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
        raise UserError(f"no layer profile {name!r}; there are {known}, or give a .json file")
    try:
        raw = json.loads(path.read_text())
        layers = tuple(
            Layer(
                layer["name"], layer["kind"], tuple(tuple(shape) for shape in layer["shapes"]),
                float(layer["forward_ms"]), float(layer["backward_ms"]),
            )
            for layer in raw["layers"]
        )  # fmt: skip
        return Profile(raw["model"], raw["source"], layers)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a layer profile ({error}); `imagenet-fast bench profile` writes one") from None


def save_profile(profile: Profile, path: Path) -> None:
    """Write it as JSON, one layer a line."""
    head = json.dumps({"model": profile.model, "source": profile.source}, indent=2).removesuffix("\n}")
    layers = ",\n".join(f"    {json.dumps(asdict(layer))}" for layer in profile.layers)
    path.write_text(f'{head},\n  "layers": [\n{layers}\n  ]\n}}\n')
