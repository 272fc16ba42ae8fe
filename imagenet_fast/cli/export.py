"""`imagenet-fast export`: write the weights of a run, or of any file, to a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagenet_fast.cli.options import (
    NO_KEYS,
    KeysArgument,
    SetOption,
    WeightsOption,
    WeightsRecipeOption,
    in_a_directory,
)
from imagenet_fast.errors import UserError


def export(
    weights: WeightsOption,
    out: Annotated[
        Path, typer.Option(metavar="FILE", callback=in_a_directory, help="New file, ending in .safetensors.")
    ],
    recipe: WeightsRecipeOption = None,
    keys: KeysArgument = NO_KEYS,
    overrides: SetOption = NO_KEYS,
) -> None:
    """Write weights to a file for use in other programs.

    It holds them under torchvision's names, with the classes and how to prepare
    images, as far as that is known.
    """
    from safetensors import SafetensorError

    from imagenet_fast.launch.job_setup import recipe_of
    from imagenet_fast.models.weights import classes_of, describe, fit, write_weights
    from imagenet_fast.training.init_weights import given_weights, warn_of_blurpool

    if out.suffix != ".safetensors":
        raise UserError(f"--out {out} does not end in .safetensors, by which other programs read it; name it so")
    if out.exists():
        raise UserError(f"{out} already exists; give another --out, or remove it")
    given = given_weights(weights)
    name, named, _ = recipe_of(weights, recipe, [*overrides, *keys])
    warn_of_blurpool(given, named.model)
    fitting = fit(given, named.model, max(1, len(given.class_names) or classes_of(given, named.model)))
    try:
        write_weights(fitting.tensors, out, describe(name, named, fitting.class_names))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written ({error}); choose another --out") from None
    print(f"written to {out}")
