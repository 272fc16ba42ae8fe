"""Write JSON that every parser accepts.

RFC 8259 has neither NaN nor infinities, but Python's own writer emits them.
"""

from __future__ import annotations

import json
import math
from numbers import Integral, Real
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as JSON, with null for each non-finite number; numpy's numbers are accepted."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return ``value`` with Python's numbers, and None for those that are not finite."""
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
