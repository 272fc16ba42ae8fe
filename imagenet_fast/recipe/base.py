"""The base class of all recipe tables, and common number types."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A float in [0, 1)."""


class Table(BaseModel):
    """One table of a recipe.

    Unknown keys are errors. Values are not coerced from one type to another, and infinities and NaN are refused. An
    instance is frozen.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, ser_json_inf_nan="strings")
