"""A small server that speaks the chat-completions API, with faults; a real one on loopback, on the path as `judge_server`."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Reply(NamedTuple):
    status: int = 200
    text: str = '{"reasoning": "fine", "score": 0.5}'
    """Content of the judge's message; with a status other than 200, the body."""
    headers: dict[str, str] = {}  # noqa: RUF012  # of a tuple
    raw: bytes | None = None
    """The whole body instead."""
    is_cut: bool = False
    """Whether the connection is closed in the middle of the body."""
    delay_s: float = 0.0
    finish_reason: str = "stop"
    usage: dict[str, int] | None = {"prompt_tokens": 100, "completion_tokens": 10}  # noqa: RUF012


Answer = Callable[[dict[str, Any], int], Reply]
"""What is replied to a request's body, which is the n-th, from 1."""


class JudgeServer:
    def __init__(self, answer: Answer) -> None:
        self.answer, self.bodies, self.headers = answer, list[dict[str, Any]](), list[dict[str, str]]()
        self.lock = threading.Lock()
        self.url = ""

    @property
    def prompts(self) -> list[str]:
        """The last message of each request."""
        return [body["messages"][-1]["content"] for body in self.bodies]


@contextmanager
def judge_server(answer: Answer = lambda body, n: Reply(), port: int = 0) -> Iterator[JudgeServer]:
    """Serve on a port of loopback, or on a free one."""
    state = JudgeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.bodies.append(body)
                state.headers.append(dict(self.headers.items()))
                number = len(state.bodies)
            reply = state.answer(body, number)
            time.sleep(reply.delay_s)
            self._send(reply)

        def _send(self, reply: Reply) -> None:
            data = reply.raw if reply.raw is not None else _body_of(reply)
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(data)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if reply.is_cut else data)
            if reply.is_cut:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:  # the name that it has
            pass

        def handle(self) -> None:
            with suppress(OSError):  # of a client that did not wait
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


def _body_of(reply: Reply) -> bytes:
    if reply.status != 200:
        return reply.text.encode()
    choice = {"message": {"role": "assistant", "content": reply.text}, "finish_reason": reply.finish_reason}
    return json.dumps({"choices": [choice], **({"usage": reply.usage} if reply.usage else {})}).encode()
