"""Steps that do not go as the pool expects, and steps that are dropped."""

from __future__ import annotations

from tests.sync.fuzz_models import model
from tests.sync.fuzz_programs import Backward, Do, Finished, Look, Refused, Step, ZeroGrad, program, unseen
from tests.sync.programs.common import LARS, STEP, TWO, skipping, step

EVALUATE = Look("inference forward")
SCALED, OVERFLOWN = ((ZeroGrad(), Backward(overflows=rank), Step()) for rank in (None, 0))
OWN = (ZeroGrad(), Backward(), Step(by_pool=False), ZeroGrad(), Backward(overflows=1), Step(by_pool=False))
EVAL = Look("part in eval")
WITHOUT_1 = skipping((1,), (1,))

PROGRAMS = [
    program(
        "no zero_grad by the pool", *(
            *STEP * 4, Refused(Backward(), r"begin each step with pool\.zero_grad\(\)"),
            Refused(Step(), r"this step is over; begin .*pool\.zero_grad\(\), .* every optimizer in one call"),
        ) * 2, *STEP,
    ),
    program("zero_grad by the optimizer as well, to zeros", *(ZeroGrad(also=True), Backward(), Step()) * 6),
    program(
        "an evaluation after everything",
        *(EVALUATE, ZeroGrad(), EVALUATE, Backward(between=(EVALUATE,)), EVALUATE, Finished(), EVALUATE, Step()) * 7,
    ),
    program(
        "blocks alone after everything",
        *(Look("part in train"), ZeroGrad(), Backward(between=(Look("part"),)), Look("part"), Finished()) * 3,
        *(*STEP, ZeroGrad(), Backward(), Look("part"), Finished(), Look("part in train"), Step(), EVAL) * 4,
    ),
    program("two optimizers", *STEP * 7, optimizers=TWO),
    program(
        "one of two optimizers in turn", *(*step(Backward(), optimizers=(0,)), *step(Backward(), optimizers=(1,))) * 4,
        optimizers=TWO,
    ),
    program("accumulation", *step(Backward(sync=False), Backward(sync=False), Backward()) * 7),
    program("a rate that rises and falls", *(*STEP, Do("schedule")) * 8, schedule="one cycle"),
    program(
        "a finished step that nobody takes", *STEP * 6, ZeroGrad(), Backward(), Finished(), *STEP * 2, ZeroGrad(),
        Backward(), Finished(), *STEP,
    ),
    program("micro-steps that nobody takes", *(*STEP * 3, *unseen(ZeroGrad(), Backward(sync=False))) * 2, *STEP * 2),
    program("a loss scale", *(*SCALED * 2, *OVERFLOWN, *SCALED) * 2, scaled=True),
    program(
        "a loss scale, and clipping", *(
            ZeroGrad(), Backward(), Step(clips=True), ZeroGrad(), Backward(overflows=0), Step(clips=True),
            ZeroGrad(), Backward(), Step(by_pool=False, clips=True),
        ) * 3, scaled=True,
    ),
    program(
        "a loss scale for two optimizers stepped by hand, and a layer that nobody uses", *OWN * 3,
        model=model("linear", "unused", "linear"), optimizers=TWO, scaled=True,
    ),
    program(
        "updates at once on three ranks", *(*STEP, Do("schedule"), Look("settle")) * 8, ranks=3,
        schedule="exponential", model=model("conv", "batch norm", "linear", "linear"),
        optimizers=(LARS,),
    ),
    program("two pools of a model", *STEP * 8, pools=2),
    program(
        "a layer first used in a later micro-step", *STEP * 2, *(
            ZeroGrad(), Backward(skipped=WITHOUT_1), Step(), ZeroGrad(), Backward(sync=False, skipped=WITHOUT_1),
            Backward(sync=False, skipped=skipping((1,), ())), Backward(skipped=WITHOUT_1), Step(),
        ) * 8,
    ),
    program("another default dtype", *STEP, *unseen(Do("float64")), *STEP * 7),
]  # fmt: skip
