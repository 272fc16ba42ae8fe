"""`imagenet-fast export`: write the weights of a run, or of any file, to a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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
        Path, typer.Option(metavar="FILE", callback=in_a_directory, help="New file, ending in .safetensors or .pt2.")
    ],
    recipe: WeightsRecipeOption = None,
    keys: KeysArgument = NO_KEYS,
    overrides: SetOption = NO_KEYS,
    kind: Annotated[
        Literal["safetensors", "pt2"], typer.Option("--format", help="The weights, or a program of torch.export.")
    ] = "safetensors",
) -> None:
    """Write weights to a file for use in other programs.

    `safetensors` holds them under torchvision's names. `pt2` is the whole
    network for evaluation, in fp32 and for any number of images;
    torch.export.load runs it without this program. Both include the classes and
    how to prepare images, as far as that is known.
    """
    from safetensors import SafetensorError

    if out.suffix != f".{kind}":
        other = f"; add --format {out.suffix[1:]}" if out.suffix in (".safetensors", ".pt2") else "; name it so"
        raise UserError(f"--out {out} does not end in .{kind}, which --format {kind} is read by{other}")
    if out.exists():
        raise UserError(f"{out} already exists; give another --out, or remove it")
    try:
        write_weights_for_others(weights, recipe, [*overrides, *keys], kind, out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written ({error}); choose another --out") from None
    print(f"written to {out}")


def write_weights_for_others(given: Path, named: str | None, overrides: list[str], kind: str, out: Path) -> None:
    """Write the weights of ``given``, a file, run directory or checkpoint, to ``out``.

    Args:
        given: The weights.
        named: Recipe whose model they are for; None for that of the run.
        overrides: Changes of that recipe.
        kind: "safetensors" or "pt2".
        out: New file.

    Raises:
        UserError: The weights cannot be read, or do not fit the model.
    """
    from imagenet_fast.launch.job_setup import recipe_of
    from imagenet_fast.models import build_model
    from imagenet_fast.models.export import export_program
    from imagenet_fast.models.weights import classes_of, describe, fill, fit, write_weights
    from imagenet_fast.training.init_weights import given_weights, warn_of_blurpool

    weights = given_weights(given)
    name, recipe, _ = recipe_of(given, named, overrides)
    warn_of_blurpool(weights, recipe.model)
    classes = len(weights.class_names) or classes_of(weights, recipe.model)
    weights = fit(weights, recipe.model, max(1, classes))
    about = describe(name, recipe, weights.class_names)
    if kind == "safetensors":
        write_weights(weights.tensors, out, about)
    else:
        model = build_model(recipe.model, classes)
        fill(model, weights)
        export_program(model, recipe.data.evaluated_size, out, about)
