"""Weights that users write between steps, and models that are converted."""

from __future__ import annotations

from tests.sync.fuzz_models import model
from tests.sync.fuzz_programs import Backward, Do, Look, Refused, Step, ZeroGrad, program
from tests.sync.programs.common import STEP

CONVOLUTIONS = model("conv", "conv", "linear")
WAYS = ("parameters", "by apply", "by groups", "by modules", "kept", "around") * 2

PROGRAMS = [
    program(
        "weights written between steps, in every way", *(op for way in WAYS for op in (*STEP, Do(f"shrink {way}"))),
        *STEP * 2,
    ),
    program("weights written by data before each forward", *(ZeroGrad(), Do("shrink by data"), Backward(), Step()) * 8),
    program("weights drawn anew", *(*STEP * 3, Do("reset")) * 3, *STEP),
    program("a vector of all parameters written back", *(*STEP * 2, Do("vector")) * 4),
    program(
        "a part that is loaded", *STEP * 7, Do("load part", 1), Look("eval forward"), *STEP * 2, Do("load part", 3),
        *STEP,
    ),
    program("save and restore", *STEP * 3, Do("save"), *STEP * 4, Do("restore"), *STEP * 3),
    program("parameters frozen for a while", *STEP * 6, Do("freeze", 1), *STEP * 3, Do("unfreeze"), *STEP * 3),
    program(
        "another memory format after the pool", *STEP * 3, ZeroGrad(), Do("contiguous"),
        Refused(Backward(), r"was converted after its gradient pool was made: .*; close\(\) the pool first"),
        Do("drop"),
        model=CONVOLUTIONS,
    ),
]  # fmt: skip
