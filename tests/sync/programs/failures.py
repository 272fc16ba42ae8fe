"""Exceptions in forward and backward, on one rank or on all, after which all drop the step; pools that are closed:
between steps, or in a step that ranks left half done, each at another place."""

from __future__ import annotations

from tests.sync.fuzz_models import Place
from tests.sync.fuzz_programs import Backward, Do, Fail, Look, Op, Refused, ZeroGrad, program
from tests.sync.programs.common import ODDLY, STEP

DROP = Do("drop")


def failing(*places: Place | None) -> tuple[Op, ...]:
    """A step, of which nothing is left."""
    return ZeroGrad(), Fail(places), DROP


PROGRAMS = [
    program(
        "an exception in the first backward, with a guard", *failing(("backward", 3), ("backward", 1)), *STEP * 6,
        model=ODDLY, guarded=True,
    ),
    program(
        "exceptions at other places on each rank", *failing(("forward", 2), ("backward", 1)), *STEP * 3,
        *failing(("forward", 4), ("forward", 0)), *STEP * 4, *failing(("backward", 0), ("backward", 4)),
        Look("state_dict"), *STEP * 2,
    ),
    program(
        "an exception on one rank, which all drop", *failing(("backward", 2), None), *STEP * 3,
        *failing(None, ("backward", 2)), *STEP * 4, *failing(("forward", 0), None), *STEP * 2, model=ODDLY,
    ),
    program("steps dropped before their forward", *(*STEP * 3, ZeroGrad(), DROP) * 3),
    program(
        "steps that are neither taken nor dropped", *(
            *STEP * 3, ZeroGrad(), Backward(),
            Refused(ZeroGrad(), r"on their way .*; end it by pool\.step\(optimizer\) .* pool\.drop\(\)"),
            Refused(Backward(), r"a second backward reached .*no_sync\(\)"), DROP, *STEP,
        ) * 2,
    ),
    program("another pool now and then", *(*STEP * 2, Do("renew")) * 4, *STEP),
    program("a pool that is closed leaves the model to others", *STEP * 7, Do("leave"), *STEP * 2),
    program(
        "a pool closed while one rank's gradients have left, and the other's never come", *STEP * 3, ZeroGrad(),
        Fail((("forward", 0), None)), Do("renew"), *STEP * 7, ZeroGrad(), Fail((None, ("forward", 0))), Do("renew"),
        *STEP * 2,
    ),
    program(
        "a pool closed after a backward that failed", *STEP * 6, ZeroGrad(), Fail((("backward", 3), ("backward", 1))),
        Do("renew"), *STEP * 2,
    ),
]  # fmt: skip
