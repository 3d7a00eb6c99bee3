"""An S3 server of the package index (moto) on loopback, and a proxy before it that loses, delays and refuses requests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import httpx
from moto.server import ThreadedMotoServer

BUCKET = "runs"
ERRORS = {"503": (503, "SlowDown"), "403": (403, "AccessDenied"), "expired": (400, "ExpiredToken")}
"""Status and code of a refusal."""
HANG_S = 600.0
"""Longer than a test lasts."""


class Proxy:
    """Hands requests on to a server, except where `fault` names one: 503, 403, expired (keys), reset, lost (the server did it, the answer is lost),
    or hang (the request is read and never answered, also not after a later strike)."""

    def __init__(self, target: str) -> None:
        self.fault, self.methods, self.times, self.where = "", ("PUT", "POST"), 0, ""
        self.seen: list[str] = []
        self.is_over = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = proxy.next_fault(self.command, self.path)
                if fault == "hang":
                    proxy.is_over.wait(HANG_S)
                if fault in ("reset", "hang"):
                    self.close_connection = True
                    return
                if fault in ERRORS:
                    status, code = ERRORS[fault]
                    self._reply(
                        status,
                        {"Content-Type": "application/xml"},
                        f"<Error><Code>{code}</Code><Message>no: {fault}</Message></Error>".encode(),
                    )
                    return
                headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "expect")}
                answer = httpx.request(self.command, target + self.path, headers=headers, content=body, timeout=30)
                if fault == "lost":
                    self.close_connection = True
                    return
                self._reply(answer.status_code, dict(answer.headers), b"" if self.command == "HEAD" else answer.content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

            def _reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "content-encoding", "content-length"):
                        self.send_header(name, value)
                length = headers.get("content-length", "0") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def next_fault(self, method: str, path: str) -> str:
        self.seen.append(f"{method} {path}")
        if self.fault and self.times and method in self.methods and self.where in path:
            self.times -= 1
            return self.fault
        return ""

    def strike(self, fault: str, times: int, methods: tuple[str, ...] = ("PUT", "POST"), where: str = "") -> None:
        """where: Part of the paths that are struck."""
        self.fault, self.times, self.methods, self.where = fault, times, methods, where


@contextmanager
def object_store() -> Iterator[Proxy]:
    """The proxy before a server that has the bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    target = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=target, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret"
    )
    client.create_bucket(Bucket=BUCKET)
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.is_over.set()
        proxy.server.shutdown()
        server.stop()
