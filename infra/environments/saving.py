"""What a game that declares restore = "snapshot" saves after each turn: its own state, the conversation and the rewards."""

import base64
import json
from typing import Any

MAX_SNAPSHOT_BYTES = 1 << 20
"""Of an environment's own state, as bytes or as JSON."""


def packed(state: object) -> dict[str, Any]:
    """Return what an environment's snapshot() returned as JSON.

    Raises:
        ValueError: for a state that is neither bytes nor JSON, or too long.
    """
    found: dict[str, Any]
    if isinstance(state, bytes):
        size, found = len(state), {"bytes": base64.b64encode(state).decode()}
    else:
        try:
            size, found = len(json.dumps(state, allow_nan=False).encode()), {"json": state}
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"snapshot() must return bytes or JSON: {error}") from None
    if size > MAX_SNAPSHOT_BYTES:
        raise ValueError(f"snapshot() returned {size} bytes, {MAX_SNAPSHOT_BYTES} are allowed")
    return found


def unpacked(found: dict[str, Any]) -> Any:  # Any: bytes or JSON
    return base64.b64decode(found["bytes"]) if "bytes" in found else found["json"]
