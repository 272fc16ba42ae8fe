"""Training loops as plain data: what users do between ``zero_grad`` and ``step``, and what goes wrong there.

All ranks run the same program, on data of their own; which layers they use differs. Programs are written by hand
(:func:`program`, in ``tests/sync/programs``) or drawn (:func:`program_of`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from tests.sync.fuzz_models import LAYERS, Model, Place, Written, operation, random_model

Skipped = tuple[frozenset[int], ...]
"""By rank: the blocks that its forward does not use; (): none on any."""


@operation
class ZeroGrad(Written):
    also: bool = False
    """Whether optimizers fill gradients with zeros first."""


@operation
class Backward(Written):
    data: int = 0
    skipped: Skipped = ()
    sync: bool = True
    penalty: bool = False
    """Whether the loss has the gradient of the input in it."""
    overflows: int | None = None
    """The rank whose loss is infinite."""
    how: Literal["call", "forward", "features", "block first", "jvp"] = "call"
    """By which way the model is entered; ``features``: by that method alone, which leaves out the head."""
    decay: Literal["", "before", "after", "unasked"] = ""
    """Whether the loss has all weights in it: read before the forward or after it, or without asking the model."""
    between: tuple[Op, ...] = ()
    """What happens between forward and backward."""


@operation
class AutogradGrad(Written):
    """Gradients from ``torch.autograd.grad``, which the user assigns."""

    data: int = 0
    skipped: Skipped = ()


@operation
class Fail(Written):
    """A forward or backward that an exception ends, on some ranks; the step is nobody's."""

    places: tuple[Place | None, ...]
    """By rank."""
    data: int = 0
    skipped: Skipped = ()


CHANGES = ("halve", "half", "none", "clamp", "noise", "clip norm", "clip value", "log", "none to half", "data")


@operation
class Locally(Written):
    """After a micro-step, in ``no_sync``: the gradients are the user's own, who changes them. ``which`` picks
    parameters by remainder of their number; -1: all."""

    how: str
    which: int = -1


@operation
class Finished(Written):
    """``finish()``, and then gradients are the user's, who may change them."""

    how: str = ""
    which: int = -1


@operation
class Step(Written):
    optimizers: tuple[int, ...] = ()
    """(): all."""
    by_pool: bool = True
    clips: bool = False
    """Whether gradients are clipped, when the scaler of the program has unscaled them."""


@operation
class Look(Written):
    """Reads weights, without changing them: as :data:`LOOKS` say, or as named programs alone can bear."""

    how: str
    alone: bool = False
    """Whether rank 0 does it, and no other."""
    data: int = 0


LOOKS = (
    "state_dict", "parameters", "named_parameters", "deepcopy", "pickle", "vector", "optimizer state",
    "optimizer deepcopy", "eval forward", "train forward", "part", "functional_call", "toggle", "settle", "kept",
    "around", "recorded", "recorded in eval",
)  # fmt: skip


@operation
class Do(Written):
    """What needs no details."""

    what: str
    which: int = 0


@operation
class Refused(Written):
    """What a pool refuses with a sentence that has this pattern in it; by hand it is left out."""

    op: Op
    words: str


Op = ZeroGrad | Backward | AutogradGrad | Fail | Locally | Finished | Step | Look | Do | Refused


@operation
class Line(Written):
    """An operation."""

    op: Op
    traceless: bool = False
    """Whether weights are the same, under any engine, without it."""


@operation
class Optimizer(Written):
    kind: Literal["sgd", "adam", "adamw", "rmsprop", "own", "hooked", "wrapped", "our sgd", "our lars"]
    settings: tuple[tuple[str, Any], ...]
    groups: int = 1


SGD = Optimizer("sgd", (("lr", 0.05), ("momentum", 0.9), ("weight_decay", 0.05)))
OUR_SGD = replace(SGD, kind="our sgd")
"""Which knows what to do where only a part of a gradient has come."""


@operation
class Program(Written):
    """A model, what trains it, and how."""

    name: str
    seed: int
    ranks: int
    model: Model
    optimizers: tuple[Optimizer, ...]
    schedule: Literal["", "step", "exponential", "one cycle"]
    lines: tuple[Line, ...]
    scaled: bool = False
    guarded: bool = False
    autocast: bool = False
    averaged: bool = False
    pools: int = 1
    """Pools that share the model."""
    nearly: bool = False
    """Whether weights are nearly those by hand, as sums are rounded in another order."""

    def __str__(self) -> str:
        return "\n".join([repr(replace(self, lines=())), *(f"{n:3}  {line.op}" for n, line in enumerate(self.lines))])

    @property
    def named(self) -> bool:
        """Whether somebody has written it."""
        return not self.name.startswith("seed")

    @property
    def abandons(self) -> bool:
        """Whether a pool is closed in a step of which some ranks have sent something: that never ends."""
        ops = [line.op for line in self.lines]
        return any(isinstance(op, Fail) and after == Do("renew") for op, after in pairwise(ops))

    def without(self, left_out: Callable[[Line], bool]) -> Program:
        return replace(self, lines=tuple(line for line in self.lines if not left_out(line)))

    def core(self, residual: bool) -> Program | None:
        """Without all that leaves no trace, where there is such, and the rest knows nothing of it.

        Dropped steps leave one in a ``residual``, to which looks leave none.
        """
        core = self.without(lambda line: line.traceless and (isinstance(line.op, Look) or not residual))
        return None if self.model.remembers or core == self else core

    def leaving_gradients(self, corrected: bool) -> Program:
        """As engines need it that keep back a part of gradients: one optimizer, of ours, and nobody changes gradients.

        ``corrected``: gradients have their momentum in them.
        """
        lines = []
        for line in self.lines:
            match line.op:
                case Locally():
                    continue
                case Finished(how) if how not in ("", "log"):
                    line = replace(line, op=Finished())
                case Step():
                    line = replace(line, op=Step())
            lines.append(line)
        settings = (*OUR_SGD.settings, ("corrected", corrected))
        optimizers = (replace(OUR_SGD, settings=settings),) if self.optimizers else ()
        return replace(self, lines=tuple(lines), optimizers=optimizers, scaled=False)


def program(
    name: str,
    *ops: Op | Line,
    model: Model = LAYERS,
    optimizers: Sequence[Optimizer] = (SGD,),
    schedule: Literal["", "step", "exponential", "one cycle"] = "",
    ranks: int = 2,
    **more: Any,
) -> Program:
    """Of operations, those that :func:`unseen` has marked leaving no trace."""
    lines = []
    for number, op in enumerate(ops):
        line = op if isinstance(op, Line) else Line(op, traceless=isinstance(op, Look))
        lines.append(replace(line, op=_numbered(line.op, number + 1)))
    return Program(name, 0, ranks, model, tuple(optimizers), schedule, tuple(lines), **more)


def unseen(*ops: Op) -> list[Line]:
    """Operations after which weights are as without them, under any engine."""
    return [Line(op, traceless=True) for op in ops]


def _numbered(op: Op, number: int) -> Op:
    """With data of its own."""
    if isinstance(op, Refused):
        return replace(op, op=_numbered(op.op, number))
    return replace(op, data=number) if getattr(op, "data", None) == 0 else op


def program_of(seed: int, ranks: int) -> Program:
    """The program of a seed, the same for ever as long as this file is."""
    return _Writer(seed, ranks).program()


@dataclass
class _Writer:
    seed: int
    ranks: int
    lines: list[Line] = field(default_factory=list)
    unit: int = 0
    data: int = 0

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(1009 * self.seed + self.ranks)
        self.model = random_model(draw)
        self.scaled = draw.random() < 0.15
        self.guarded = not self.scaled and draw.random() < 0.25
        self.autocast = draw.random() < 0.08
        self.averaged = draw.random() < 0.25
        self.penalties = draw.random() < 0.12 and not self.model.has("attention") and not self.autocast
        self.schedule = draw.choice(("", "step", "exponential", "one cycle"))
        self.conditional = frozenset(n for n in range(len(self.model.blocks)) if draw.random() < 0.4)
        if self.model.tied_head and draw.random() < 0.5:
            self.conditional -= {n for n, block in enumerate(self.model.blocks) if block.kind == "embedding"}
        if draw.random() < 0.25:
            self.conditional = frozenset()
        two = not self.scaled and draw.random() < 0.2
        self.optimizers = tuple(self.optimizer() for _ in range(2 if two else 1))
        self.frozen = False
        self.clean = True  # whether the last step was taken, if there was one

    def program(self) -> Program:
        draw = self.draw
        for number in range(draw.randint(5, 8)):
            self.unit = number
            self.between()
            chance = draw.random()
            if chance < 0.1:
                self.dropped()
            elif chance < 0.24:
                self.failing()
            else:
                self.step()
        self.unit += 1
        self.step()
        return Program(
            f"seed {self.seed}", self.seed, self.ranks, self.model, self.optimizers, self.schedule, tuple(self.lines),
            self.scaled, self.guarded, self.autocast, self.averaged,
        )  # fmt: skip

    def optimizer(self) -> Optimizer:
        draw = self.draw
        kind = draw.choice(("sgd", "sgd", "sgd", "adam", "adamw", "rmsprop", "own", "hooked"))
        decay = draw.choice((0.0, 0.05))
        # On three ranks sums are rounded in another order, which a small eps would blow up.
        eps = draw.choice((1e-8, 1e-2)) if self.ranks <= 2 else 1e-2
        settings: dict[str, Any] = {"lr": 0.05, "weight_decay": decay}
        if kind in ("sgd", "own", "hooked"):
            settings["momentum"] = draw.choice((0.0, 0.9, 0.9))
            settings["nesterov"] = settings["momentum"] > 0 and draw.random() < 0.3
        else:
            settings |= {"lr": 0.005, "eps": eps}
        if kind in ("adam", "adamw"):
            settings["amsgrad"] = draw.random() < 0.3
        fast = draw.choice(("", "", "foreach", "fused"))
        # torch's fused SGD cannot do without a momentum that some parameters have yet to get.
        if fast and (fast == "foreach" or kind in ("adam", "adamw")):
            settings[fast] = True
        return Optimizer(kind, tuple(settings.items()), draw.choice((1, 1, 2, 3)))

    def add(self, op: Op, traceless: bool = False) -> None:
        self.lines.append(Line(op, traceless))

    def maybe(self, chance: float) -> bool:
        return self.draw.random() < chance

    def next_data(self) -> int:
        self.data += 1
        return self.data

    def skipped(self) -> Skipped:
        """Of a step, or a part of one."""
        draw = self.draw
        return tuple(frozenset(n for n in self.conditional if draw.random() < 0.5) for _ in range(self.ranks))

    def backward(self, sync: bool, traceless: bool = False) -> None:
        overflows = self.draw.randrange(self.ranks) if self.scaled and sync and self.maybe(0.15) else None
        penalty = self.penalties and self.maybe(0.5)
        op = Backward(self.next_data(), self.skipped(), sync, penalty, overflows)
        self.add(op, traceless=traceless)

    def zero_grad(self, traceless: bool = False) -> None:
        """Of gradients that are under way, nobody may fill any with zeros."""
        self.add(ZeroGrad(self.maybe(0.1) and self.clean), traceless=traceless)
        self.clean = False

    def look(self, chance: float) -> None:
        if not self.maybe(chance):
            return
        hows = [*LOOKS, "eval forward"]
        if self.model.has("conv", "transposed"):
            hows.remove("vector")  # which torch makes of rows alone
        how = self.draw.choice(hows)
        alone = how not in ("settle", "optimizer state") and self.maybe(0.2) and not self.model.remembers
        self.add(Look(how, alone, self.next_data()), traceless=True)

    def between(self) -> None:
        """Of two steps."""
        self.look(0.3)
        ways = ("parameters", "kept", "around", "by data", "by groups", "by modules")
        writes = [(f"shrink {way}", 0.02) for way in ways]
        for what, chance in (("save", 0.1), ("restore", 0.1), ("vector", 0.04), *writes):
            if what == "vector" and self.model.has("conv", "transposed"):
                continue  # it lays them out anew
            if self.unit and self.clean and self.maybe(chance):
                self.add(Do(what, self.draw.randrange(100)))
        if self.unit and self.clean and not self.frozen and self.maybe(0.05):
            self.add(Do("renew"))
        if self.frozen and self.maybe(0.5):
            self.frozen = False
            self.add(Do("unfreeze"))
        elif not self.frozen and self.maybe(0.08):
            self.frozen = True
            self.add(Do("freeze", self.draw.randrange(3)))

    def step(self) -> None:
        self.zero_grad()
        if self.maybe(0.07):
            self.backward(sync=False, traceless=True)
            self.zero_grad(traceless=True)
        for _ in range(self.draw.choice((0, 0, 0, 1, 2))):
            self.backward(sync=False)
            if self.maybe(0.12):
                how = self.draw.choice(("halve", "half", "none", "clamp"))
                self.add(Locally(how, self.draw.choice((-1, 0, 1, 2))))
            self.look(0.05)
        if self.maybe(0.07) and not self.scaled:
            self.add(AutogradGrad(self.next_data(), self.skipped()))
        else:
            self.backward(sync=True)
        self.look(0.1)
        if self.maybe(0.4):
            self.after_finish()
        self.look(0.08)
        self.take()
        self.clean = True
        self.after_step()

    def after_finish(self) -> None:
        if self.maybe(0.3):
            self.add(Finished())
        for _ in range(self.draw.choice((1, 1, 2))):
            if self.scaled:  # what is not unscaled yet
                self.add(Finished("log"))
                continue
            how = self.draw.choice([*CHANGES, "clip norm"])
            which = -1 if how in ("clip norm", "clip value", "log") else self.draw.choice((-1, 0, 1, 2))
            self.add(Finished(how, max(which, 0) if how == "none" else which))

    def take(self) -> None:
        if self.scaled:
            self.add(Step(by_pool=self.maybe(0.6), clips=self.maybe(0.3)))
            return
        numbers: Sequence[int] = range(len(self.optimizers))
        if len(numbers) > 1 and self.maybe(0.25):
            numbers = [self.draw.choice(numbers)]
        self.add(Step(tuple(numbers), by_pool=self.maybe(0.8)))

    def after_step(self) -> None:
        self.look(0.1)
        if self.schedule and self.maybe(0.8):
            self.add(Do("schedule"))
        if self.averaged and self.maybe(0.6):
            self.add(Do(self.draw.choice(("average", "average and look"))))
        if self.averaged and self.maybe(0.15):
            self.add(Do("swap average"))
        if self.maybe(0.08):  # as a generator's, through the discriminator
            self.backward(sync=False, traceless=True)
            self.look(0.1)

    def dropped(self) -> None:
        """Begun and not taken."""
        self.zero_grad()
        for _ in range(self.draw.choice((0, 1))):
            self.backward(sync=False)
        self.backward(sync=True)
        self.look(0.1)
        self.add(Finished() if self.maybe(0.3) else Do("drop"))
        self.look(0.2)

    def failing(self) -> None:
        self.zero_grad()
        if self.maybe(0.2):
            self.backward(sync=False)
        places = [self.place() if self.maybe(0.7) else None for _ in range(self.ranks)]
        if not any(places):
            places[self.draw.randrange(self.ranks)] = self.place()
        self.add(Fail(tuple(places), self.next_data(), self.skipped()))
        self.look(0.1)
        self.add(Do("drop"))
        self.look(0.2)

    def place(self) -> Place:
        return self.draw.choice(("forward", "backward", "backward")), self.draw.randrange(len(self.model.blocks))
