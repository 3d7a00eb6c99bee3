"""The tools of an episode's MCP servers, to be used like Python tools.

    from infra.environments.mcp.servers import mcp_tools
    answers_of(mcp_tools(), message)

A program is started for an episode when its first tool is called, and ends with it. What goes wrong in a call is its result: an error. A server
that failed gives errors up to the end of the episode.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from infra.environments.mcp.protocol import ListedTool, McpConnection, McpFailed, Message, Transport
from infra.environments.mcp.transports import ServerAddress, ServerProgram
from infra.environments.tools import Tool, ToolFailed, ToolLimits, call_key

T = TypeVar("T")


class ServerSpec(NamedTuple):
    """How to reach a server: one of `environment.mcp`."""

    text: str
    """As it is configured."""
    command: tuple[str, ...] = ()
    url: str = ""
    token_variable: str = ""


class McpTool(Tool):
    """A tool of a server."""

    def __init__(self, server: "McpServer", listed: ListedTool) -> None:
        self.server, self.listed = server, listed
        self.name, self.is_idempotent, self.__doc__ = listed.name, listed.is_idempotent, listed.description
        self.function = self.plain

    @property
    def schema(self) -> Message:
        about = {"name": self.name, "description": self.listed.description, "parameters": self.listed.schema}
        return {"type": "function", "function": about}

    def check(self, arguments: Mapping[str, Any]) -> None:
        if not isinstance(arguments, dict):
            raise TypeError("must be an object")
        if missing := [name for name in self.listed.schema.get("required") or () if name not in arguments]:
            raise TypeError(f"missing a required argument: {missing[0]!r}")

    def bound(self, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        if positional:
            raise TypeError(f"the arguments of MCP tool {self.name!r} have names")
        return dict(named)

    def plain(self, /, **arguments: Any) -> str:
        """Call it outside of an episode's record."""
        return self.server.call(self.name, arguments, self.server.timeout_s)

    def called(self, arguments: dict[str, Any], limits: ToolLimits) -> str:
        return self.server.call(self.name, arguments, limits.timeout_s)


class McpServer:
    """One server in an episode."""

    def __init__(self, spec: ServerSpec, timeout_s: float) -> None:
        self.spec, self.timeout_s = spec, timeout_s
        self._transport: Transport | None = None
        self._connection: McpConnection | None = None
        self._failure = ""

    def tools(self) -> list[McpTool]:
        """Raises McpFailed."""
        if self.spec not in _LISTED:
            _LISTED[self.spec] = self._used(lambda connection: connection.tools())
        return [McpTool(self, each) for each in _LISTED[self.spec]]

    def call(self, name: str, arguments: Message, timeout_s: float) -> str:
        """Raises ToolFailed for a result that is an error."""
        try:
            text, is_error = self._used(lambda connection: connection.call(name, arguments, call_key(), timeout_s))
        except McpFailed as error:
            raise ToolFailed(str(error)) from None
        if is_error:
            raise ToolFailed(text)
        return text

    def _used(self, use: Callable[[McpConnection], T]) -> T:
        if self._failure:
            raise McpFailed(f"{self._failure} before")
        try:
            if self._connection is None:
                self._transport = self._opened()
                self._connection = McpConnection(self._transport, self.timeout_s)
            return use(self._connection)
        except McpFailed as error:
            message = f"MCP server {self.spec.text!r} {error}"
            if not str(error).startswith("refuses "):  # it answered, and may answer another call
                self._failure = message
                self.close()
            raise McpFailed(message) from None

    def _opened(self) -> Transport:
        if not self.spec.url:
            return ServerProgram(self.spec.command)
        token = os.environ.get(self.spec.token_variable, "") if self.spec.token_variable else ""
        return ServerAddress(self.spec.url, token)

    def close(self) -> None:
        transport, self._transport, self._connection = self._transport, None, None
        if transport is not None:
            transport.close()


class McpServers:
    """Those of an episode."""

    def __init__(self, specs: Sequence[Sequence[Any]], timeout_s: float) -> None:
        """specs: Fields of ServerSpec, as JSON has them. timeout_s: Longest time of a server's answer, in seconds."""
        fields = [ServerSpec(each[0], tuple(each[1]), *each[2:]) for each in specs]
        self.servers = [McpServer(spec, timeout_s) for spec in fields]

    def tools(self) -> list[McpTool]:
        """Raises McpFailed for a server that cannot be used, and for a name that two tools have."""
        found = [tool for server in self.servers for tool in server.tools()]
        by_name: dict[str, McpTool] = {}
        for each in found:
            if (other := by_name.setdefault(each.name, each)) is not each:
                raise McpFailed(
                    f"MCP server {each.server.spec.text!r} has a tool {each.name!r}, and so has {other.server.spec.text!r}: leave one out"
                )
        return found

    def check(self) -> None:
        """Raises ValueError, in one line, if they cannot be used."""
        try:
            self.tools()
        except McpFailed as error:
            raise ValueError(str(error)) from None
        finally:
            self.close()

    @contextmanager
    def for_episode(self) -> Iterator[None]:
        """Have mcp_tools return their tools in the block; end them after it."""
        _EPISODE.append(self)
        try:
            yield
        finally:
            _EPISODE.remove(self)
            self.close()

    def close(self) -> None:
        for server in self.servers:
            server.close()


_LISTED: dict[ServerSpec, list[ListedTool]] = {}
"""What servers listed in this process: they are not started again for it."""
_EPISODE: list[McpServers] = []
"""Of the episode that this process plays: one, or none outside of episodes."""


def mcp_tools() -> list[McpTool]:
    """Return the tools of the servers of `environment.mcp`; none where it is empty.

    Raises:
        McpFailed: for a server that cannot be used. The episode has failed then.
    """
    return [tool for servers in _EPISODE for tool in servers.tools()]
