"""`imagenet-fast export`: write the weights of a run, or of any file, to a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from imagenet_fast.cli import options as opt
from imagenet_fast.errors import UserError


def export(
    weights: opt.Weights[Path],
    out: opt.NewFile[Path],
    recipe: opt.Recipe[str | None] = None,
    keys: opt.Keys = opt.NO_KEYS,
    kind: Annotated[Literal["safetensors", "pt2"], typer.Option("--format")] = "safetensors",
) -> None:
    """Write weights to a file for use in other programs.

    `safetensors` holds them under torchvision's names. `pt2` is the whole
    network for evaluation, in fp32 and for any number of images;
    torch.export.load runs it without this program. Both include the classes and
    how to prepare images, as far as that is known.

    Args:
        recipe: Recipe that the weights were trained by. Default: the run's.
        out: New file, ending in .safetensors or .pt2.
        kind: The weights, or a program of torch.export.
    """
    from safetensors import SafetensorError

    from imagenet_fast.launch.job_setup import recipe_of
    from imagenet_fast.models import build_model
    from imagenet_fast.models.export import export_program
    from imagenet_fast.models.weights import classes_of, describe, fill, fit, write_weights
    from imagenet_fast.training.init_weights import given_weights, warn_of_blurpool

    if out.suffix != f".{kind}":
        other = f"; add --format {out.suffix[1:]}" if out.suffix in (".safetensors", ".pt2") else "; name it so"
        raise UserError(f"--out {out} does not end in .{kind}, which --format {kind} is read by{other}")
    if out.exists():
        raise UserError(f"{out} already exists; give another --out, or remove it")
    given = given_weights(weights)
    name, trained, _ = recipe_of(weights, recipe, keys)
    warn_of_blurpool(given, trained.model)
    classes = len(given.class_names) or classes_of(given, trained.model)
    given = fit(given, trained.model, max(1, classes))
    about = describe(name, trained, given.class_names)
    try:
        if kind == "safetensors":
            write_weights(given.tensors, out, about)
        else:
            model = build_model(trained.model, classes)
            fill(model, given)
            export_program(model, trained.data.evaluated_size, out, about)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written ({error}); choose another --out") from None
    print(f"written to {out}")
