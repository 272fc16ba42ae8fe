"""What all tables of a recipe have in common, and their numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, lt=1)]


class Table(BaseModel):
    """One table of a recipe: unknown keys are errors, values are not coerced across types, and are frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, ser_json_inf_nan="strings")
