"""Pools that are closed: between steps, or in a step that ranks left half done, each at another place."""

from __future__ import annotations

from tests.sync.fuzz_programs import Do, Fail, ZeroGrad, program
from tests.sync.programs.common import STEP

PROGRAMS = [
    program("another pool now and then", *(*STEP * 2, Do("renew")) * 4, *STEP),
    program("a pool that is closed leaves the model to others", *STEP * 7, Do("leave"), *STEP * 2),
    program("a pool that is closed early", *STEP, Do("leave"), *STEP * 2),
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
