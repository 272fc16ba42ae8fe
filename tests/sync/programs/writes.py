"""Weights that users write between steps: by asking the model, or refused; and models that are converted."""

from __future__ import annotations

from dataclasses import replace

from tests.sync.fuzz_models import model
from tests.sync.fuzz_programs import SETTLE, Backward, Do, Look, Program, Refused, Step, ZeroGrad, program
from tests.sync.programs.common import ADAMW, STEP

CONVOLUTIONS = model("conv", "conv", "linear")
FUSED = replace(ADAMW, settings=(*ADAMW.settings, ("fused", True)))
"""Which would mix up elements that lie in another order than the gradient's."""


def written_unasked(how: str) -> Program:
    """An update that is pending would come on top of what is written."""
    refused = Refused(Backward(), r"was written to while its update was pending; call pool.settle\(\) before", True)
    return program(f"weights written by {how}, pending", *STEP * 7, Do(f"shrink by {how}"), ZeroGrad(), refused, Step())


PROGRAMS = [
    program("weights written by parameters() and apply()", *(*STEP, Do("shrink"), *STEP, Do("shrink by apply")) * 5),
    program(
        "weights written without asking, settled before", *(*STEP, SETTLE, Do("shrink by groups"), *STEP, SETTLE,
        Do("shrink by modules")) * 4,
    ),
    *map(written_unasked, ("groups", "modules")),
    program("a vector of all parameters written back", *(*STEP * 2, Do("vector")) * 4),
    program(
        "a part that is loaded", *STEP * 7, Do("load part", 1), Look("eval forward"), *STEP * 2, Do("load part", 3),
        *STEP,
    ),
    program("save and restore", *STEP * 3, Do("save"), *STEP * 4, Do("restore"), *STEP * 3),
    program("parameters frozen for a while", *STEP * 6, Do("freeze", 1), *STEP * 3, Do("unfreeze"), *STEP * 3),
    program("another memory format", *STEP * 3, Do("contiguous"), *STEP * 6, model=CONVOLUTIONS),
    program("another memory format at first", Do("contiguous"), *STEP * 8, model=CONVOLUTIONS, optimizers=(FUSED,)),
    program(
        "a model converted after the pool, and back", *STEP * 6, ZeroGrad(by_pool=False), Do("double"),
        Refused(ZeroGrad(), r"head\.bias is now torch\.float64 .* was made for torch\.float32"), Do("float"),
        *STEP * 2,
    ),
]  # fmt: skip
