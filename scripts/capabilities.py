"""List what the program can do, a line each: commands, options with their defaults, and keys and values of recipes.

Compare two revisions by `diff` of what it prints in each:

    python scripts/capabilities.py > capabilities.txt
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from imagenet_fast.cli.main import app
from imagenet_fast.recipe.load import recipe_names
from imagenet_fast.recipe.schema import Recipe


def commands(command: Any, name: str) -> Iterator[str]:
    """Yield the command, its options with their defaults, and those of all commands below it."""
    yield name
    for parameter in command.params:
        yield f"{name} {' '.join([*parameter.opts, *parameter.secondary_opts])} = {parameter.default!r}"
    for below, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {below}")


def keys(schema: dict[str, Any], definitions: dict[str, Any], name: str) -> Iterator[str]:
    """Yield each key below ``name`` of a JSON schema with the values that it takes."""
    if reference := schema.get("$ref"):
        yield from keys(definitions[reference.rpartition("/")[2]], definitions, name)
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from keys(inner, definitions, name)
    for value in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())):
        yield f"{name} = {value}"
    if "type" in schema and "properties" not in schema:
        yield f"{name}: {schema['type']}"
    kind = schema.get("properties", {}).get("kind", {}).get("const")
    for key, inner in schema.get("properties", {}).items():
        yield from keys(inner, definitions, f"{name}[{kind}].{key}" if kind else f"{name}.{key}")


def main() -> None:
    """Print all capabilities, sorted."""
    schema = Recipe.model_json_schema()
    found = {f"recipe {name}" for name in recipe_names()}
    found.update(commands(typer.main.get_command(app), "imagenet-fast"))
    found.update(keys(schema, schema.get("$defs", {}), "recipe"))
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main()
