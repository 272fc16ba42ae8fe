"""The base class of all recipe tables, and the number types of their values."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A float in [0, 1)."""


_Infinity = BeforeValidator(lambda value: math.inf if value == "Infinity" else value)  # JSON has none, but this text

Bytes = Annotated[float, Field(ge=0, allow_inf_nan=True), _Infinity]
"""MiB on the wire, at least 0; ``inf``: no limit."""


class Table(BaseModel):
    """One table of a recipe.

    Unknown keys are errors. Values are not coerced from one type to another, and infinities and NaN are refused. An
    instance is frozen.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, ser_json_inf_nan="strings",
        use_attribute_docstrings=True,
    )  # fmt: skip
