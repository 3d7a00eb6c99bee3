"""An MCP server of the tests, without a library: `mcp_server.py [--http PORT] [--fault FAULT] [--token TOKEN]`.

Its tool `book` writes a line to booked.txt beside --notes, and `look` only reads. A fault is committed at a call, or `at start`.
"""

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SEAT = {"type": "object", "properties": {"seat": {"type": "integer"}}, "required": ["seat"]}
TOOLS = [
    {"name": "book", "description": "Book a seat.", "inputSchema": SEAT},
    {"name": "look", "description": "Look at a seat.", "inputSchema": SEAT, "annotations": {"readOnlyHint": True}},
]
GARBAGE = b"what?\n"


class Server:
    def __init__(self, options: argparse.Namespace) -> None:
        self.fault, self.notes = options.fault, Path(options.notes) if options.notes else None

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | bytes | None:
        """None: no answer. bytes: no JSON."""
        method, params = message.get("method"), message.get("params", {})
        if "id" not in message or method is None:
            return None
        if method == "initialize":
            self._strike(" at start")
            return GARBAGE if self.fault == "garbage at start" else self._result(message, {"protocolVersion": "2025-06-18"})
        if method == "tools/list":
            page = int(params.get("cursor") or 0)
            listed: list[object] = [] if self.fault == "no tools" else TOOLS[page : page + 1]
            following = {"nextCursor": "1"} if page == 0 and listed else {}
            return self._result(message, {"tools": listed} | following)
        if method != "tools/call":
            return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": f"no method {method}"}}
        return self._called(message, params)

    def _called(self, message: dict[str, Any], params: dict[str, Any]) -> dict[str, Any] | bytes:
        name, seat = params["name"], params["arguments"].get("seat")
        key = params.get("_meta", {}).get("ratchet/idempotency-key", "")
        if self.notes:
            with self.notes.open("a") as stream:
                stream.write(f"{name} {seat} {key}\n")
        self._strike("")
        if self.fault == "garbage":
            return GARBAGE
        if self.fault == "refuses":
            return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32602, "message": "no such seat"}}
        content = [{"type": "text", "text": f"{name}ed {seat}"}, {"type": "image", "data": "", "mimeType": "image/png"}]
        if seat == 13:
            return self._result(message, {"content": [{"type": "text", "text": "there is no seat 13"}], "isError": True})
        return self._result(message, {"content": content[: 2 if seat == 2 else 1]})

    def _strike(self, when: str) -> None:
        if self.fault == f"dies{when}":
            print("no office today", file=sys.stderr, flush=True)
            os._exit(3)
        if self.fault == f"hangs{when}":
            time.sleep(60)

    def _result(self, message: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def serve_lines(server: Server) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        # What a client must take: a notification, and a request of the server's own.
        for before in ({"method": "notifications/message", "params": {}}, {"id": "p", "method": "ping"}):
            print(json.dumps({"jsonrpc": "2.0", **before}), flush=True)
        if (found := server.answer(message)) is not None:
            sys.stdout.buffer.write(found if isinstance(found, bytes) else json.dumps(found).encode() + b"\n")
            sys.stdout.buffer.flush()


def handler_of(server: Server, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if token and self.headers.get("Authorization") != f"Bearer {token}":
                return self._give(401, b"", "text/plain")
            if message.get("method") != "initialize" and self.headers.get("Mcp-Session-Id") != "s1":
                return self._give(400, b"no session", "text/plain")
            if (found := server.answer(message)) is None:
                return self._give(202, b"", "text/plain")
            if server.fault == "redirect":
                return self._give(302, b"", "text/plain")
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            if message["method"] == "tools/call" and not isinstance(found, bytes):
                note = b'event: message\ndata: {"jsonrpc": "2.0", "method": "notifications/progress"}\n\n'
                return self._give(200, note + b"data: " + data + b"\n\n", "text/event-stream")
            return self._give(200, data, "application/json")

        def do_DELETE(self) -> None:
            self._give(200, b"", "text/plain")

        def _give(self, status: int, data: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Mcp-Session-Id", "s1")
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *about: object) -> None: ...

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", type=int)
    parser.add_argument("--fault", default="")
    parser.add_argument("--notes", default="")
    parser.add_argument("--token", default="")
    options = parser.parse_args()
    if options.http is None:
        serve_lines(Server(options))
    else:
        ThreadingHTTPServer(("127.0.0.1", options.http), handler_of(Server(options), options.token)).serve_forever()


if __name__ == "__main__":
    main()
