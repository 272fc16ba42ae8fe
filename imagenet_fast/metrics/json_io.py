"""Write JSON that every parser accepts: RFC 8259 has neither NaN nor infinities, but Python's own writer emits them."""

from __future__ import annotations

import json
import math
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from imagenet_fast.errors import UserError


def to_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as JSON, with null for each non-finite number; numpy's numbers are accepted."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(value: Any, path: Path) -> None:
    """Write the result of a command to ``path``. Raises UserError if it cannot be written."""
    try:
        path.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written ({error.strerror}); choose another place") from None


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite(inner) for inner in value]
        case bool():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case _:
            return value
