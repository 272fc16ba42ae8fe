"""Random small models with all that a pool has to bear: tied, conditional, empty, scalar, frozen, normalised, nested.

A model is described by plain data, so that a failing one can be printed and made again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 8
KINDS = 5
"""Tokens, and what a tied head tells apart."""

Kind = Literal[
    "linear", "mlp", "layer norm", "batch norm", "group norm", "conv", "embedding", "tied", "tied transposed", "scalar",
    "empty", "frozen", "unused", "reader", "reader in eval", "reader in train", "lora", "weight norm", "spectral norm",
    "attention", "gru", "transposed",
]  # fmt: skip
Rare = Literal[
    "pruned", "hooked weight norm", "hooked spectral norm", "reads early", "target", "shared memory", "cuts", "doubled",
    "orthogonal", "lstm", "reentrant", "scripted",
]  # fmt: skip
"""Of named programs alone, as not every operation can be done to them."""
Place = tuple[Literal["forward", "backward"], int]
"""In front of which block a forward fails, or behind which one a backward does."""


operation = dataclass(frozen=True, repr=False)


class Written:
    """Its ``repr`` is what one writes to make it."""

    def __repr__(self) -> str:
        given = [(field.name, value) for field in fields(self) if (value := getattr(self, field.name)) != field.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


@operation
class Block(Written):
    """One part of a model."""

    kind: Kind | Rare
    twice: bool = False
    checkpointed: bool = False
    biased: bool = True


@operation
class Model(Written):
    """What :func:`build` makes a model of."""

    seed: int
    blocks: tuple[Block, ...]
    registered: tuple[int, ...]
    """The order in which the blocks are registered."""
    tied_head: bool
    called: tuple[int, ...] = ()
    """The order in which the blocks are called, where it is not their own."""
    offset: bool = False
    """Whether the model has a parameter of its own, which it reads before it calls the first block."""

    def has(self, *kinds: Kind | Rare) -> bool:
        """Whether a block is one of these."""
        return any(block.kind in kinds for block in self.blocks)

    @property
    def remembers(self) -> bool:
        """Whether a forward changes what later steps compute, if only in the last digit."""
        return self.has("lora", "spectral norm", "hooked spectral norm", "target")


def model(*kinds: Kind | Rare | Block, registered: Sequence[int] = (), tied: bool = False, **more: Any) -> Model:
    """Of blocks of these kinds, in which nothing is random but the weights."""
    blocks = tuple(kind if isinstance(kind, Block) else Block(kind) for kind in kinds)
    return Model(0, blocks, tuple(registered or range(len(blocks))), tied, **more)


LAYERS = model("linear", *[Block("linear", biased=False)] * 4)


def random_model(draw: random.Random) -> Model:
    """Of three to seven blocks."""
    blocks = []
    for _ in range(draw.randint(3, 7)):
        kind: Kind = draw.choice(get_args(Kind)) if draw.random() < 0.75 else "linear"
        twice, checkpointed = draw.random() < 0.12, draw.random() < 0.1
        blocks.append(Block(kind, twice, checkpointed, draw.random() < 0.8))
    registered = list(range(len(blocks)))
    if draw.random() < 0.4:
        draw.shuffle(registered)
    seed, tied = draw.randrange(2**16), draw.random() < 0.5
    return Model(seed, tuple(blocks), tuple(registered), tied and any(b.kind == "embedding" for b in blocks))


@dataclass(frozen=True)
class Batch:
    """What a rank computes a loss of."""

    features: Tensor
    tokens: Tensor


def batch_of(seed: int, number: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(7919 * seed + 101 * number + rank)
    features = torch.randn(4, WIDTH, generator=generator, dtype=torch.float32)
    return Batch(features, torch.randint(0, KINDS, (4,), generator=generator))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError("as if there were no memory left")


class Net(nn.Module):
    """The blocks one after the other, and a head."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        torch.manual_seed(model.seed)
        made: list[nn.Module] = []
        for block in model.blocks:
            made.append(_part(block, made))
        for number in model.registered:
            self.add_module(f"block{number}", made[number])
        self._plan = [(n, model.blocks[n]) for n in model.called or range(len(model.blocks))]
        self._tied = [block.kind for block in model.blocks].index("embedding") if model.tied_head else -1
        if not model.tied_head:
            self.head = nn.Linear(WIDTH, KINDS)
        if model.offset:
            self.offset = nn.Parameter(torch.ones(WIDTH))

    def forward(self, batch: Batch, skipped: frozenset[int] = frozenset(), fails: Place | None = None) -> Tensor:
        x = self.features(batch, skipped, fails)
        return F.linear(x, self.get_submodule(f"block{self._tied}").weight) if self._tied >= 0 else self.head(x)

    def features(self, batch: Batch, skipped: frozenset[int] = frozenset(), fails: Place | None = None) -> Tensor:
        """What comes out of the blocks."""
        x = batch.features
        if hasattr(self, "offset"):
            x = x + self.offset  # a sum keeps nothing for backward that autograd could check
        for number, block in self._plan:
            if fails == ("forward", number):
                raise MemoryError("as if there were no memory left")
            if number not in skipped and block.kind != "unused":
                x = self._through(block, self.get_submodule(f"block{number}"), x, batch)
            if fails == ("backward", number):
                x = Fails.apply(x)
        return x

    def _through(self, block: Block, part: nn.Module, x: Tensor, batch: Batch) -> Tensor:
        for _ in range(2 if block.twice else 1):
            inputs = (x, batch.tokens) if block.kind == "embedding" else (x,)
            again = self.training and (block.checkpointed or block.kind == "reentrant")
            x = checkpoint(part, *inputs, use_reentrant=block.kind == "reentrant") if again else part(*inputs)
        return x if block.kind in ("scalar", "empty") else x.float().tanh()


def _part(block: Block, before: list[nn.Module]) -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH, bias=block.biased)
    weights = [part.weight for part in before if type(part) is nn.Linear and part.weight.requires_grad]
    tied = weights[-1] if weights else linear.weight
    made: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: nn.Sequential(linear, nn.ReLU(), nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH))),
        "layer norm": lambda: nn.LayerNorm(WIDTH),
        "batch norm": lambda: nn.BatchNorm1d(WIDTH),
        "group norm": lambda: nn.GroupNorm(2, WIDTH),
        "conv": lambda: _Conv(block.biased),
        "embedding": _Embedding,
        "tied": lambda: _Linear(tied, transposed=False),
        "tied transposed": lambda: _Linear(tied, transposed=True),
        "scalar": _Scalar,
        "empty": _Empty,
        "frozen": lambda: linear.requires_grad_(False),
        "reader": lambda: _Reader(linear, "always"),
        "reader in eval": lambda: _Reader(linear, "eval"),
        "reader in train": lambda: _Reader(linear, "train"),
        "lora": _Lora,
        "weight norm": lambda: parametrizations.weight_norm(linear),
        "spectral norm": lambda: parametrizations.spectral_norm(linear),
        "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False)),
        "attention": _Attention,
        "gru": lambda: nn.GRUCell(WIDTH, WIDTH),
        "lstm": lambda: _Lstm(WIDTH, WIDTH),
        "transposed": lambda: _Linear(nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 3), transposed=False),
        "pruned": lambda: prune.l1_unstructured(linear, "weight", 0.3),
        "hooked weight norm": lambda: weight_norm(linear),
        "hooked spectral norm": lambda: spectral_norm(linear),
        "reads early": _ReadsEarly,
        "target": lambda: _Target(linear),
        "shared memory": _SharedMemory,
        "cuts": lambda: _Cuts(doubled=False),
        "doubled": lambda: _Cuts(doubled=True),
        "scripted": lambda: torch.jit.script(nn.Sequential(linear, nn.Tanh(), nn.Linear(WIDTH, WIDTH))),
    }
    return made.get(block.kind, lambda: linear)()


class _Conv(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1, bias=bias).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last))
        return out.flatten(1)


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(KINDS, WIDTH))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + F.embedding(tokens, self.weight)


class _Linear(nn.Module):
    """Its weight is another's, or does not lie in memory row by row."""

    def __init__(self, weight: nn.Parameter, transposed: bool) -> None:
        super().__init__()
        self.weight, self._transposed = weight, transposed

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t() if self._transposed else self.weight)


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Empty(nn.Module):
    """Its parameter has no elements, but a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.rows])


class _Reader(nn.Module):
    """Reads its child's weights instead of calling it."""

    def __init__(self, child: nn.Linear, when: str) -> None:
        super().__init__()
        self.child, self._when = child, when

    def forward(self, x: Tensor) -> Tensor:
        if self._when in ("always", "train" if self.training else "eval"):
            return F.linear(x, self.child.weight, self.child.bias)
        return self.child(x)


class _Lora(nn.Module):
    """Merges its factors into the weight in ``eval()``, and takes them out again in ``train()``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, 2) / 3), nn.Parameter(torch.randn(2, WIDTH) / 3)
        self._merged = False

    def train(self, mode: bool = True) -> _Lora:
        super().train(mode)
        if self._merged == mode:
            with torch.no_grad():
                self.weight.add_(self.up @ self.down, alpha=-1 if mode else 1)
            self._merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        return out if self._merged else out + F.linear(F.linear(x, self.down), self.up)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x[None], x[None], x[None], need_weights=False)[0]
        return out[0]


class _Lstm(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class _ReadsEarly(nn.Module):
    """Reads weights before it calls the layers that own them: for data, for activations, and unrecorded."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = (F.linear(x, self.body.weight) + self.body(x)).tanh()
        with torch.no_grad():
            guess = F.linear(h, self.head.weight)
        return self.head(h) + guess + F.linear(h, self.head.weight)


class _Target(nn.Module):
    """Every third forward copies its weights to a target."""

    def __init__(self, online: nn.Linear) -> None:
        super().__init__()
        self.online, self.target = online, copy.deepcopy(online).requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            with torch.no_grad():
                for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    target.copy_(online)
        return self.online(x) - self.target(x).sin()


class _SharedMemory(nn.Module):
    """The weights of two layers are one tensor in memory, but two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.between, self.dec = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dec.weight.data = self.enc.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(self.between(self.enc(x)).tanh())


class _Cuts(nn.Module):
    """Its parameters are parts of larger tensors; or (doubled) there is one whose elements share memory."""

    def __init__(self, doubled: bool) -> None:
        super().__init__()
        self.register_buffer("whole", torch.randn(WIDTH, 12) / 3)
        self.register_buffer("series", torch.randn(2 * WIDTH))
        self.square = nn.Parameter(self.whole[:, 2 : 2 + WIDTH].t())
        self.every_other = nn.Parameter(self.series[::2])
        if doubled:
            self.doubled = nn.Parameter(torch.randn(1, 1).expand(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.square, self.every_other)
        return out * self.doubled if hasattr(self, "doubled") else out
