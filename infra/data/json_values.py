"""Values of a data set's columns as JSON has them, so that a row can be written to a file and handed to a reward as it is."""

import base64
import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TypeAlias

JSON: TypeAlias = "str | int | float | bool | list[JSON] | dict[str, JSON] | None"


def as_json(value: object) -> JSON:
    """Return text, numbers, bools, lists and dicts as they are. Dates become ISO text, decimals text, bytes base64, and a float without
    a finite value None.

    Raises:
        ValueError: for any other kind of value.
    """
    match value:
        case None | str() | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(name): as_json(item) for name, item in value.items()}
        case bytes():
            return base64.b64encode(value).decode()
        case date() | datetime() | time():
            return value.isoformat()
        case Decimal() | timedelta():
            return str(value)
        case Sequence():
            return [as_json(item) for item in value]
    raise ValueError(f"a value of kind {type(value).__name__} has no form in JSON: write it as text or a number")
