"""JSON that every reader takes: RFC 8259 knows neither NaN nor infinities, which Python's own writer lets through."""

from __future__ import annotations

import json
import math
from numbers import Integral, Real
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """``value`` as JSON, with null for every number that is not finite; numpy's numbers are numbers too."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


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
