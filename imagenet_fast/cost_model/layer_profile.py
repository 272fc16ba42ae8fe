"""Layer profiles: how long each layer of a model computes, and how large its gradients are. One JSON file each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random

from imagenet_fast.cost_model.timing import Timing
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

    @property
    def timing(self) -> Timing:
        """Its course, the last layer's gradients first, with nothing in the way."""
        needed = list(accumulate((layer.forward_ms / 1e3 for layer in self.layers), initial=0.0))[:-1]
        ready = accumulate(layer.backward_ms / 1e3 for layer in reversed(self.layers))
        return Timing(tuple(reversed(needed)), self.forward_s, tuple(ready), self.backward_s)

    def sending(self, raw_s: float, travelling: Callable[[Sequence[int]], float] = math.prod) -> list[float]:
        """Each layer's part of an all-reduce of ``raw_s`` seconds, the last layer's first, where so many values are
        ``travelling`` for a parameter of some shape."""
        return [raw_s * sum(map(travelling, layer.shapes)) / self.elements for layer in reversed(self.layers)]

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


def shipped_profile(model: str) -> Profile | None:
    """The profile that comes with this package, if there is one of ``model``."""
    return load_profile(model) if (SHIPPED / f"{model}.json").exists() else None


def load_profile(name: str) -> Profile:
    """A shipped profile by its name, a JSON file by its path, or ``random:SEED``. Raises UserError."""
    if name.startswith("random:"):
        seed = name.removeprefix("random:")
        if not (seed.isascii() and seed.isdigit()):
            raise UserError(f"{name!r} is no random profile; give its seed, as random:7")
        return random_profile(int(seed))
    path = Path(name) if name.endswith(".json") else SHIPPED / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
        raise UserError(f"no layer profile {name!r}; there are {known}, or give a .json file or random:SEED")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
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


def random_profile(seed: int) -> Profile:
    """A network of no family: 6 to 48 layers of sizes and times that differ by orders of magnitude, one of them, in any
    place, a giant with a tenth to two thirds of the gradients. The same at every call."""
    random = Random(seed)
    count = random.randint(6, 48)
    giant = random.randrange(count)
    widths = [round(math.exp(random.uniform(math.log(32), math.log(2048)))) for _ in range(count)]
    others = sum(width * width for place, width in enumerate(widths) if place != giant)
    share = random.uniform(0.1, 2 / 3)
    layers = []
    for place, width in enumerate(widths):
        shape: tuple[int, ...] = (width, width)
        if place == giant:
            shape = (max(1, round(others * share / (1 - share) / 1024)), 1024)
        elif random.random() < 0.5:
            shape = (width, max(1, width // 9), 3, 3)
        forward_ms = math.exp(random.gauss(1, 1))
        backward_ms = forward_ms * random.uniform(1.2, 2.8)
        kind = "Conv2d" if len(shape) == 4 else "Linear"
        layers.append(Layer(f"layers.{place}", kind, (shape, shape[:1]), forward_ms, backward_ms))
    return Profile(f"random:{seed}", f"drawn with the seed {seed}", tuple(layers))


def save_profile(profile: Profile, path: Path) -> None:
    """Write it as JSON, one layer a line."""
    head = json.dumps({"model": profile.model, "source": profile.source}, indent=2).removesuffix("\n}")
    layers = ",\n".join(f"    {json.dumps(asdict(layer))}" for layer in profile.layers)
    path.write_text(f'{head},\n  "layers": [\n{layers}\n  ]\n}}\n', encoding="utf-8")
