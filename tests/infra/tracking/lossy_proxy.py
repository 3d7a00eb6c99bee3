"""A proxy before an HTTP server that loses the answer of one chosen request, or passes it on so late that nobody waits any more."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx


class LossyProxy:
    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.num_requests = 0
        self.lost: set[int] = set()
        """Numbers of requests that reach the server and whose answers do not come back."""
        self.held: dict[str, threading.Event] = {}
        """By the end of a path: when the next such request reaches the server; once."""
        self.pending: list[threading.Thread] = []

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        self.num_requests += 1
        number, body = self.num_requests, request.rfile.read(int(request.headers.get("Content-Length", 0)))
        held = next((self.held.pop(path) for path in list(self.held) if request.path.split("?")[0].endswith(path)), None)
        if held:
            later = threading.Thread(target=lambda: (held.wait(), self.forward(request, body)))
            self.pending.append(later)
            later.start()
            later.join()
            return
        answer = self.forward(request, body)
        if number in self.lost:
            request.close_connection = True
            return
        request.send_response(answer.status_code)
        request.send_header("Content-Length", str(len(answer.content)))
        request.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        request.end_headers()
        request.wfile.write(answer.content)

    def forward(self, request: BaseHTTPRequestHandler, body: bytes) -> httpx.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "content-length")}
        return httpx.request(request.command, self.target + request.path, content=body, headers=headers, timeout=60)


@contextmanager
def lossy_proxy(target: str) -> Iterator[LossyProxy]:
    proxy = LossyProxy(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            proxy.handle(self)

        do_GET = do_PUT = do_PATCH = do_DELETE = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
