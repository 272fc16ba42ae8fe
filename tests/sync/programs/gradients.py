"""What users do to ``p.grad`` is what the step applies, on every rank."""

from __future__ import annotations

from tests.sync.fuzz_programs import (
    AutogradGrad,
    Backward,
    Cancel,
    Change,
    Finished,
    Locally,
    Op,
    Peek,
    Program,
    Step,
    ZeroGrad,
    program,
)
from tests.sync.programs.common import ADAMW, STEP, skipping

NOBODYS = skipping((1, 3), (1, 3))
RANK_1S = skipping((1, 3), (3,))
FIRST_TWO = Backward(how="features", skipped=skipping((2, 3, 4), (2, 3, 4)))
LAST_THREE = Backward(how="features", skipped=skipping((0, 1), (0, 1)))


def partly(name: str, *ops: Op, by_pool: bool = True) -> Program:
    """Of its layers, 1 is used by nobody in even steps, by rank 1 alone in odd ones; 3 is used by nobody."""
    pair = [ZeroGrad(), Backward(skipped=NOBODYS), *ops, Step(by_pool=by_pool)]
    pair += [ZeroGrad(), Backward(skipped=RANK_1S), *ops, Step(by_pool=by_pool)]
    return program(name, *pair * 4, optimizers=(ADAMW,))


def changed(name: str, change: str, which: int = -1, by_pool: bool = True) -> Program:
    return partly(name, Finished(Change(change, which)), by_pool=by_pool)


PROGRAMS = [
    partly("layers that not all ranks use"),
    partly("gradients cancelled before finish()", Cancel(0)),
    partly("gradients zeroed before finish()", Cancel(0, to="zero")),
    changed("gradients cancelled after finish()", "none", 1),
    changed("gradients clipped by norm", "clip norm"),
    changed("gradients clipped by norm, and the optimizer's own step", "clip norm", by_pool=False),
    changed("gradients clipped by value", "clip value"),
    partly("gradients replaced", *(Finished(Change(how)) for how in ("log", "half", "none to half", "clamp"))),
    partly("gradients changed in place", *(Finished(Change(how)) for how in ("halve", "noise", "log"))),
    partly("gradients looked at under way", Peek(writes=False)),
    partly("gradients changed under way", Peek(writes=True)),
    program(
        "gradients changed between micro-steps", *(
            ZeroGrad(), Backward(sync=False), Locally(Change("halve")), Backward(sync=False),
            Locally(Change("half", 1)), Locally(Change("none", 2)), Backward(), Step(),
        ) * 6,
    ),
    program(
        "backwards of disjoint layers, one cancelled between them",
        *(ZeroGrad(), FIRST_TWO, Cancel(0), LAST_THREE, Step()) * 6, optimizers=(ADAMW,),
    ),
    program("gradients of torch.autograd.grad", *(ZeroGrad(), AutogradGrad(), Step()) * 7),
    program("a penalty on the gradient of the input", *(ZeroGrad(), Backward(penalty=True), Step()) * 7),
    program("a generator's backward through a discriminator", *(*STEP, Backward(sync=False)) * 7),
]  # fmt: skip
