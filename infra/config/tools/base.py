"""What all sections of a configuration share."""

from typing import Self

from pydantic import BaseModel, ConfigDict


class ConfigBase(BaseModel):
    # The sentence under a field is its help text: in the Prefect UI's form and wherever else the schema is shown.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def but(self, **changes: object) -> Self:
        """A validated copy with some fields changed."""
        return type(self).model_validate(dict(self) | changes)
