"""Pass the API key from an engine's launcher to its server: `sglang_server.py` and `vllm_server.py` load this file by its path.

Runs in the engines' own environments and imports nothing of ours. An engine's own flag would show the key to everyone who can list
processes. An environment variable is inherited by every process of the server. Both engines log their arguments.
"""

import os
from pathlib import Path

KEY_FILE = "RATCHET_API_KEY_FILE"


class ApiKey(str):
    """A key that is not shown in logs. The server's other processes, and requests for its arguments, do not get it at all."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'**********'"

    def __reduce_ex__(self, protocol: object) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def key() -> ApiKey:
    """Return the key of this launch."""
    return ApiKey(Path(os.environ[KEY_FILE]).read_text().strip())
