"""What a client of the Model Context Protocol says and understands: JSON-RPC 2.0, of the revision 2025-06-18 of the specification.

Source: modelcontextprotocol/modelcontextprotocol, docs/specification/2025-06-18 (basic/lifecycle, basic/transports, server/tools).
"""

import json
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]
VERSION = "2025-06-18"
MAX_ANSWER_BYTES = 8 << 20
"""Longest message of a server."""
MAX_PAGES = 100
"""Of a list of tools."""
SHOWN = 120
NO_METHOD = -32601


class McpFailed(Exception):
    """A server cannot be used. One line, which names it."""


class ListedTool(NamedTuple):
    """A tool as its server describes it."""

    name: str
    description: str
    schema: Message
    is_idempotent: bool
    """By its annotations: it only reads, or a second equal call has no second effect."""


class Transport(Protocol):
    """The way to one server."""

    def request(self, message: Message, timeout_s: float) -> Message:
        """Send a request; return the message with its id. Raises McpFailed."""

    def notify(self, message: Message, timeout_s: float) -> None:
        """Send a message that has no answer. Raises McpFailed."""

    def close(self) -> None: ...


class McpConnection:
    """A session with one server. Raises McpFailed for all that it does wrongly."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        """timeout_s: Longest time of an answer, in seconds."""
        self.transport, self.timeout_s = transport, timeout_s
        self._num_requests = 0
        about = {"name": "ratchet", "version": "1"}
        begun = self._asked("initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": about})
        if not isinstance(begun.get("protocolVersion"), str):
            raise McpFailed(f"answers initialize with {_short(begun)}, which has no protocolVersion")
        transport.notify({"jsonrpc": "2.0", "method": "notifications/initialized"}, timeout_s)

    def tools(self) -> list[ListedTool]:
        """Return its tools, one at least."""
        found: list[ListedTool] = []
        cursor: object = None
        for _ in range(MAX_PAGES):
            page = self._asked("tools/list", {"cursor": cursor} if cursor else {})
            if not isinstance(page.get("tools"), list):
                raise McpFailed(f"answers tools/list with {_short(page)}, which has no list of tools")
            found += map(_listed, page["tools"])
            if not (cursor := page.get("nextCursor")):
                break
        else:
            raise McpFailed(f"lists its tools on more than {MAX_PAGES} pages")
        if not found:
            raise McpFailed("lists no tools")
        return found

    def call(self, name: str, arguments: Message, key: str, timeout_s: float) -> tuple[str, bool]:
        """Call a tool. Returns the text of its result, and whether it says that it is an error.

        key: The same when the call is repeated after a crash; in the request's _meta as "ratchet/idempotency-key".
        """
        fields: Message = {"name": name, "arguments": arguments}
        if key:
            fields["_meta"] = {"ratchet/idempotency-key": key}
        result = self._asked("tools/call", fields, timeout_s)
        content = result.get("content")
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise McpFailed(f"answers tools/call with {_short(result)}, which has no content")
        return "\n".join(map(_text_of, content)), result.get("isError") is True

    def _asked(self, method: str, params: Message, timeout_s: float | None = None) -> Message:
        self._num_requests += 1
        request = {"jsonrpc": "2.0", "id": self._num_requests, "method": method, "params": params}
        answer = self.transport.request(request, timeout_s or self.timeout_s)
        if (error := answer.get("error")) is not None:
            raise McpFailed(f"refuses {method}: {_short(error.get('message') if isinstance(error, dict) else error)}")
        if not isinstance(result := answer.get("result"), dict):
            raise McpFailed(f"answers {method} with {_short(answer)}, which has no result")
        return result


def message_of(data: bytes) -> Message:
    """Read one message. Raises McpFailed for what is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise McpFailed(f"answers with {_short(data.decode(errors='replace'))}, which is no JSON") from None
    if not isinstance(found, dict):
        raise McpFailed(f"answers with {_short(found)}, which is no message of JSON-RPC")
    return found


def answer_to_server(message: Message) -> Message | None:
    """The answer to a server's own request; None where the message is none."""
    if "method" not in message or "id" not in message:
        return None
    if message["method"] == "ping":
        return {"jsonrpc": "2.0", "id": message["id"], "result": {}}
    error = {"code": NO_METHOD, "message": "this client serves no requests"}
    return {"jsonrpc": "2.0", "id": message["id"], "error": error}


def _listed(tool: object) -> ListedTool:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not isinstance(tool.get("inputSchema"), dict):
        raise McpFailed(f"lists {_short(tool)}, which is no tool: name and inputSchema are needed")
    about = tool.get("annotations")
    hints = about if isinstance(about, dict) else {}
    is_idempotent = hints.get("readOnlyHint") is True or hints.get("idempotentHint") is True
    return ListedTool(tool["name"], str(tool.get("description") or ""), tool["inputSchema"], is_idempotent)


def _text_of(part: Message) -> str:
    """The text of a part of a result; of an image or a file what it is."""
    if part.get("type") == "text":
        return str(part.get("text", ""))
    resource = part.get("resource")
    if isinstance(resource, dict) and isinstance(resource.get("text"), str):
        return str(resource["text"])
    return f"[{part.get('type')} {part.get('mimeType') or part.get('uri') or ''}]"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(" ".join(text.split())[:SHOWN])
