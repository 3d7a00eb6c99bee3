"""How the servers of `environment.mcp` are written: a command, or an address with the name of its token's variable."""

import re
import shlex
from typing import NamedTuple, Self
from urllib.parse import urlsplit

TOKEN = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
FIELD = "environment.mcp"


class McpServerSpec(NamedTuple):
    """One of the servers."""

    text: str
    command: tuple[str, ...] = ()
    url: str = ""
    token_variable: str = ""
    """Name of the environment variable whose value is sent as bearer token; empty: none is sent."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `python3 server.py --fast`, `https://host/mcp` or `https://host/mcp $TOKEN_VARIABLE`.

        Raises:
            ValueError: in one line, which shows no value that may be a secret.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"{FIELD} {text!r} is no command: {error}") from None
        if not words:
            raise ValueError(f"{FIELD} holds an empty text: give a command, such as 'python3 server.py', or an address")
        if "://" not in words[0]:
            return cls(text, tuple(words))
        url, *rest = words
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query:
            raise ValueError(
                f"{FIELD} holds an address with a user, a password or a query, and it is written to files: take it out, and name the variable "
                "that has the token behind the address, as $NAME"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{FIELD} {url!r} is no address: give one such as http://127.0.0.1:8000/mcp")
        if len(rest) > 1 or not all(map(TOKEN.fullmatch, rest)):
            raise ValueError(
                f"{FIELD} {url!r}: behind the address may only be the name of the variable that has the token, such as $MY_TOKEN"
            )
        return cls(text, (), url, rest[0][1:] if rest else "")
