"""Whoever reads, copies or saves a model between steps finds weights that are up to date, and changes none."""

from __future__ import annotations

from tests.sync.fuzz_models import LAYERS, model
from tests.sync.fuzz_programs import Backward, Do, Look, Program, Step, ZeroGrad, program
from tests.sync.programs.common import ADAMW, STEP, WITH_ALL, skipping, step

ENCODER = model("linear", "linear", offset=True)
FEATURES = step(Backward(how="features"))


def looking(name: str, *looks: str, **more: object) -> Program:
    """Steps with these looks after each, once all together and once in turn."""
    each = [op for look in looks for op in (*STEP, Look(look))]
    return program(name, *STEP, *each, *STEP * 4, *each, *map(Look, looks), **{"model": WITH_ALL, **more})


def entered_otherwise(how: str) -> Program:
    """A model that the first steps call, and others enter in another way."""
    return program(
        f"a model that is entered by {how} at last", *STEP * 7, *step(Backward(how=how)) * 2, *STEP, model=ENCODER
    )


PROGRAMS = [
    looking("evaluations", "eval forward", "train forward", "inference forward"),
    looking(
        "updates under autocast and in inference mode", "autocast forward", "inference forward", "optimizer state",
        optimizers=(ADAMW,), model=LAYERS,
    ),
    looking("blocks called alone", "part", "part in train", "part in eval"),
    looking("parameters and states", "state_dict", "parameters", "named_parameters", "functional_call"),
    looking("parameters that were kept, and those of a module around", "kept", "around"),
    looking("forwards with gradients that no backward follows", "recorded", "recorded in eval"),
    *(
        program(
            f"rank 0 looks alone, {how}", *STEP * 4, *(
                ZeroGrad(), Look(how, alone=True), ZeroGrad(), Backward(), Look(how, alone=True), Step(),
                Look(how, alone=True),
            ) * 3,
        )
        for how in ("recorded", "recorded in eval", "deepcopy", "state_dict")
    ),
    looking("states and copies of parts", "states of parts"),
    looking("copies of the model", "deepcopy", "pickle", "save"),
    looking(
        "copies of the optimizer", "optimizer state", "optimizer deepcopy", "optimizer pickle", optimizers=(ADAMW,),
    ),
    program("a model in another dtype for a while", *(*STEP, ZeroGrad(), Look("to")) * 8, model=WITH_ALL),
    program("a model in another dtype for a while, with gradients", *(*STEP, Look("to")) * 8),
    looking("copies that train by themselves", "twin", model=LAYERS),
    looking(
        "copies of a model in two pools", "deepcopy", "pickle", "state_dict", "optimizer state", optimizers=(ADAMW,),
        model=LAYERS, pools=2,
    ),
    program(
        "averaged weights", *(*STEP, Do("average and look")) * 4, *(*STEP, Do("swap average"), Do("average")) * 4,
        averaged=True,
    ),
    program("weights read before their layers are called", *STEP * 9, model=model("linear", "reads early", "linear")),
    program(
        "a block called from the third step on, which reads a later layer's weight",
        *step(Backward(skipped=skipping((1,), (1,)))) * 2, *STEP * 7,
        model=model("linear", "tied transposed", "linear", called=(1, 2, 0)),
    ),
    program("a term of all weights after the forward", *step(Backward(decay="after")) * 8),
    program("a term of all weights before the forward", *step(Backward(decay="before")) * 8),
    program(
        "a term of weights of which the model was not asked", *STEP * 7, *step(Backward(decay="unasked")) * 2, *STEP,
    ),
    program("a model entered by a method", *FEATURES * 8, model=ENCODER),
    program("a model entered by a method, and evaluated at first", Look("eval forward"), *FEATURES * 8, model=ENCODER),
    program("a model entered by forward", *step(Backward(how="forward")) * 8, model=ENCODER),
    program("a model entered by a block and by a call", *step(Backward(how="block first")) * 8, model=ENCODER),
    entered_otherwise("features"),
    entered_otherwise("forward"),
    program("torch.func.jvp", *(Do("settle"), *step(Backward(how="jvp"))) * 8),
]  # fmt: skip
