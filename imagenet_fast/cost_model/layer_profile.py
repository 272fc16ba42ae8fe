"""Layer profiles, each layer's compute time and gradient size in one JSON file per model; and the times of a step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from imagenet_fast.errors import UserError

SHIPPED = Path(__file__).parent / "profiles"
_LARGEST = 2**48  # elements, far above any network
Milliseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True)
class Layer:
    """A module with parameters, and what follows it up to the next such module."""

    name: str
    kind: str
    """Its class in ``torch.nn``."""
    shapes: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]
    """Shapes of its trainable parameters."""
    forward_ms: Milliseconds
    backward_ms: Milliseconds
    """Time from when the gradients of the layer above were ready until its own were."""

    @property
    def elements(self) -> int:
        """Number of gradient elements."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Profile:
    """One step of a model, with layers in the order of forward."""

    model: str
    source: str
    """Origin of the times."""
    layers: tuple[Layer, ...]
    pixels: Annotated[int, Field(gt=0)] = 224
    """Side of the images."""
    batch: Annotated[int, Field(gt=0)] | None = None
    """Images of the step; None: not known."""
    fixed: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the step that does not grow with the batch."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory of the GPU; None: not known."""

    @property
    def forward_s(self) -> float:
        """Seconds of forward."""
        return sum(layer.forward_ms for layer in self.layers) / 1e3

    @property
    def backward_s(self) -> float:
        """Seconds of backward."""
        return sum(layer.backward_ms for layer in self.layers) / 1e3

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def elements(self) -> int:
        """Number of gradient elements of all layers."""
        return sum(layer.elements for layer in self.layers)

    @property
    def timing(self) -> Timing:
        """The course of a step that nothing delays, by gradient, the last layer's last one first."""
        begins = accumulate((layer.forward_ms / 1e3 for layer in self.layers), initial=0.0)
        ends = accumulate(layer.backward_ms / 1e3 for layer in reversed(self.layers))
        needed = [begin for layer, begin in zip(self.layers, begins, strict=False) for _ in layer.shapes]
        ready = [end for layer, end in zip(reversed(self.layers), ends, strict=True) for _ in layer.shapes]
        return Timing(tuple(reversed(needed)), self.forward_s, tuple(ready), self.backward_s)

    def all_reduce_seconds(
        self, raw_s: float, values_sent: Callable[[Sequence[int]], float] = math.prod
    ) -> list[float]:
        """Return each gradient's share of the seconds of an all-reduce, in the order of ``timing``.

        Args:
            raw_s: Seconds of an all-reduce of all gradients.
            values_sent: Returns how many values are sent for a parameter of a shape; by default all.
        """
        return [raw_s * values_sent(s) / self.elements for layer in self.layers[::-1] for s in layer.shapes[::-1]]

    def scaled_to(self, compute_s: float | None) -> Profile:
        """Return the profile scaled to ``compute_s`` seconds, in proportion; one without any, or for None, stays so."""
        if compute_s is None:
            return self
        factor = compute_s / self.compute_s if self.compute_s else 0.0
        layers = tuple(
            replace(layer, forward_ms=layer.forward_ms * factor, backward_ms=layer.backward_ms * factor)
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def downscaled(self, scale: int) -> Profile:
        """Return the profile with about 1/``scale`` of each gradient's elements.

        The first dimension is divided, and never less than 1.
        """
        layers = tuple(
            replace(layer, shapes=tuple((max(1, shape[0] // scale), *shape[1:]) for shape in layer.shapes))
            for layer in self.layers
        )
        return replace(self, layers=layers)


def shipped_profile(model: str) -> Profile | None:
    """Return the profile of ``model`` that is part of this package, or None if there is none."""
    return load_profile(model) if (SHIPPED / f"{model}.json").exists() else None


def load_profile(name: str) -> Profile:
    """Load a shipped profile by its name, a JSON file by its path, or ``random:SEED``.

    Raises:
        UserError: There is no such profile, the file is no profile, or the seed is no number.
    """
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
        profile = TypeAdapter(Profile).validate_json(path.read_bytes())
        if 0 < profile.elements <= _LARGEST and profile.compute_s > 0:
            return profile
        reason = "it has no parameters or too many, or no layer that takes time"
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
    except OSError as error:
        reason = str(error)
    raise UserError(f"{path} is not a layer profile ({reason}); `imagenet-fast bench profile` writes one")


def random_profile(seed: int) -> Profile:
    """Return a random network that belongs to no family; one seed always gives the same.

    It has 6 to 48 layers, whose sizes and times differ by orders of magnitude. One of them, in any place, is a giant
    with a tenth to two thirds of the gradients.
    """
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
    """Write ``profile`` as JSON, one layer per line."""
    about = {key: value for key, value in vars(profile).items() if key != "layers"}
    head = json.dumps(about, indent=2).removesuffix("\n}")
    layers = ",\n".join(f"    {json.dumps(asdict(layer))}" for layer in profile.layers)
    path.write_text(f'{head},\n  "layers": [\n{layers}\n  ]\n}}\n', encoding="utf-8")


@dataclass(frozen=True)
class Timing:
    """The course of a step by slot, in pool order; seconds, the same on every rank."""

    needed: tuple[float, ...]
    """Time from the beginning of forward until a slot's layer is called."""
    forward_s: float
    ready: tuple[float, ...]
    """Time from the beginning of backward until a slot is pushed."""
    backward_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s
