"""Export the weights of a run, or of any file, to a file for other programs."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from imagenet_fast.errors import UserError
from imagenet_fast.launch.job_setup import recipe_of
from imagenet_fast.metrics.run_dir import run_of
from imagenet_fast.models import build_model
from imagenet_fast.models.export import export_program
from imagenet_fast.models.weights import classes_of, describe, fill, fit, recognise, write_weights
from imagenet_fast.training.init_weights import given_weights, warn_of_blurpool


def export_weights(given: Path, named: str | None, kind: str, out: Path) -> Path:
    """Write the weights of ``given`` to ``out``, and return ``out``.

    Args:
        given: File of weights, run directory or checkpoint.
        named: Recipe whose model the weights are for; None for that of the run. Without a run, safetensors are written
            for whichever of our models the weights fit.
        kind: "safetensors" or "pt2".
        out: New file, with the suffix of its ``kind``.

    Raises:
        UserError: If the weights cannot be exported, or ``out`` exists.
    """
    if kind not in ("safetensors", "pt2"):
        raise UserError(f"--format {kind} is not known; there are safetensors and pt2")
    if out.suffix in (".pt2", ".safetensors") and out.suffix != f".{kind}":
        raise UserError(f"--out {out} and --format {kind} differ; add --format {out.suffix[1:]}, or name it *.{kind}")
    if out.suffix != f".{kind}":
        raise UserError(f"--out {out} does not end in .{kind}, which --format {kind} is read by; name it so")
    if out.exists():
        raise UserError(f"{out} already exists; give another --out, or remove it")
    try:
        _write(given, named, kind, out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written ({error}); choose another --out") from None
    return out


def _write(given: Path, named: str | None, kind: str, out: Path) -> None:
    weights = given_weights(given)
    out.parent.mkdir(parents=True, exist_ok=True)
    if kind == "safetensors" and named is None and not run_of(given).job.is_file():
        recognised = recognise(weights)
        if recognised is None:
            raise UserError(f"{weights.source} fits none of our models; say with --recipe NAME which it should fit")
        write_weights(fit(weights, *recognised).tensors, out, weights.about)
        return
    name, recipe, _ = recipe_of(given, named)
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
