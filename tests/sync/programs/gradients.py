"""What users do to ``p.grad`` is what the step applies, on every rank."""

from __future__ import annotations

from tests.sync.fuzz_programs import AutogradGrad, Backward, Finished, Locally, Op, Program, program
from tests.sync.programs.common import ADAMW, STEP, skipping, step

NOBODYS = skipping((1, 3), (1, 3))
RANK_1S = skipping((1, 3), (3,))
FIRST_TWO = Backward(how="features", skipped=skipping((2, 3, 4), (2, 3, 4)))
LAST_THREE = Backward(how="features", skipped=skipping((0, 1), (0, 1)))


def partly(name: str, *ops: Op, by_pool: bool = True) -> Program:
    """Of its layers, 1 is used by nobody in even steps, by rank 1 alone in odd ones; 3 is used by nobody."""
    pair = [step(Backward(skipped=skipped), *ops, by_pool=by_pool) for skipped in (NOBODYS, RANK_1S)]
    return program(name, *sum(pair, ()) * 4, optimizers=(ADAMW,))


PROGRAMS = [
    partly("layers that not all ranks use"),
    partly("gradients cancelled after finish()", Finished("none", 1)),
    partly("gradients clipped by norm", Finished("clip norm")),
    partly("gradients clipped by norm, and the optimizer's own step", Finished("clip norm"), by_pool=False),
    partly("gradients replaced", *(Finished(how) for how in ("log", "half", "none to half", "clamp"))),
    partly("gradients changed in place", *(Finished(how) for how in ("halve", "noise", "log"))),
    partly("gradients given another storage", Finished("data")),
    program(
        "gradients changed between micro-steps",
        *step(
            Backward(sync=False), Locally("halve"), Locally("data"), Backward(sync=False), Locally("half", 1),
            Locally("data", 1), Locally("none", 2), Backward(),
        ) * 6,
    ),
    program(
        "backwards of disjoint layers", *step(FIRST_TWO, LAST_THREE) * 6, optimizers=(ADAMW,),
    ),
    program("gradients of torch.autograd.grad", *step(AutogradGrad()) * 7),
    program("a penalty on the gradient of the input", *step(Backward(penalty=True)) * 7),
    program("a generator's backward through a discriminator", *(*STEP, Backward(sync=False)) * 7),
]  # fmt: skip
