"""What all sections of a configuration share."""

import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class ConfigBase(BaseModel):
    # The sentence under a field is its help text: in the Prefect UI's form and wherever else the schema is shown.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def but(self, **changes: object) -> Self:
        """A validated copy with some fields changed."""
        return type(self).model_validate(dict(self) | changes)


def json_or_text(text: str) -> Any:  # Any: JSON
    """Return the value that a word of a command line gives: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
