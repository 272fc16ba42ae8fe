"""Models with all that a pool has to bear."""

from __future__ import annotations

from dataclasses import replace

from tests.sync.fuzz_models import Block, Kind, Model, Rare, model
from tests.sync.fuzz_programs import OUR_SGD, SGD, Backward, Finished, Look, Optimizer, Program, ZeroGrad, program
from tests.sync.programs.common import ADAMW, LARS, STEP, WITH_ALL, skipping, step

IDLE = [((), ()), ((1,), (1,)), ((1,), (1,)), ((1,), ()), ((1,), (1,)), ((), ()), ((1,), (1,)), ((), (1,))]
"""On which ranks layer 1 has nothing to do, step for step."""
DENSE = Optimizer("sgd", (("lr", 0.05), ("momentum", 0.9)))


def trained(name: str, model: Model, optimizer: Optimizer = SGD, **more: object) -> Program:
    return program(name, *(*STEP * 3, Look("eval forward")) * 3, model=model, optimizers=(optimizer,), **more)


def idle(name: str, optimizer: Optimizer) -> Program:
    """A parameter that no rank uses is not decayed, nor moved on by its momentum, and used again it goes on."""
    steps = [op for by_rank in IDLE for op in step(Backward(skipped=skipping(*by_rank)))]
    return program(name, *steps, model=model("linear", "linear", "linear"), optimizers=(optimizer,))


HOOKED: tuple[Kind | Rare, ...] = ("pruned", "hooked weight norm", "hooked spectral norm", "weight norm", "target",
    "orthogonal", "lstm", "reentrant",
)  # fmt: skip
CHECKPOINTED = Block("mlp", checkpointed=True)

PROGRAMS = [
    *(trained(f"a {kind} layer", model("linear", kind, "linear")) for kind in HOOKED),
    trained(
        "parameters read by other modules", model("embedding", "attention", "scalar", "unused", "linear", tied=True),
    ),
    trained("blocks that read and merge weights by themselves", WITH_ALL),
    trained(
        "a convolution, norms and a checkpointed block", model("conv", "batch norm", "group norm", CHECKPOINTED),
    ),
    trained("an optimizer in a wrapper", model("linear", "linear"), Optimizer("wrapped", ADAMW.settings)),
    trained("two parameters in the same memory", model("linear", "shared memory"), DENSE, nearly=True),
    trained("parameters that are parts of larger tensors", model("linear", "transposed", "cuts"), DENSE),
    program(
        "gradients of parameters that lie oddly in memory", *(ZeroGrad(), Backward(), Finished("log")) * 4,
        model=model("linear", "doubled", "transposed"), optimizers=(),
    ),
    idle("a layer that is idle, under SGD", SGD),
    idle("a layer that is idle, under AdamW", ADAMW),
    idle("a layer that is idle, under SGD of ours", OUR_SGD),
    idle("a layer that is idle, under an optimizer with a hook", replace(SGD, kind="hooked")),
    idle("a layer that is idle, under LARS", LARS),
    trained("a block read in C++, where nobody sees it", model("linear", "scripted", "linear"), nearly=True),
]  # fmt: skip
