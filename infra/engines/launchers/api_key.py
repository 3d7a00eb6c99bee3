"""How an engine's launcher gives its server the API key: `sglang_server.py` and `vllm_server.py` load this file by its path.

Runs in the engines' own environments and imports nothing of ours. An engine's own flag would show the key to everyone who can list
processes, an environment variable is inherited by every process of the server, and both engines log their arguments.
"""

import os
from pathlib import Path

KEY_FILE = "RATCHET_API_KEY_FILE"


class ApiKey(str):
    """A key that no log line shows. The server's other processes, and requests for its arguments, get none at all."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'**********'"

    def __reduce_ex__(self, protocol: object) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def key() -> ApiKey:
    """Of this launch."""
    return ApiKey(Path(os.environ[KEY_FILE]).read_text().strip())
