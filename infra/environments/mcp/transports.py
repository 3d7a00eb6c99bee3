"""The two ways to an MCP server: a program that reads and writes lines, and an address of streamable HTTP."""

import json
import os
import select
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from tempfile import TemporaryFile
from typing import Any

from infra.environments.limits import ToolTimeOut, call_within
from infra.environments.mcp.protocol import MAX_ANSWER_BYTES, VERSION, McpFailed, Message, answer_to_server, message_of

CHUNK = 1 << 16
ERROR_TAIL = 2000
"""Bytes of a program's error output that are looked at for its last line."""


class ServerProgram:
    """A server as a program of ours: a message a line, on its standard input and output. It is ended with all that it started."""

    def __init__(self, command: Sequence[str]) -> None:
        self.errors = TemporaryFile()  # noqa: SIM115  # closed by close()
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True
            )
        except OSError as error:
            self.errors.close()
            raise McpFailed(f"cannot be started: {error.strerror}") from None
        assert self.process.stdin and self.process.stdout
        self.given, self.said = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.given, False)
        self.buffer = b""

    def request(self, message: Message, timeout_s: float) -> Message:
        until = time.monotonic() + timeout_s
        self._write(message, until, timeout_s)
        while True:
            found = message_of(self._line(until, timeout_s))
            if (answer := answer_to_server(found)) is not None:
                self._write(answer, until, timeout_s)
            elif "method" not in found and found.get("id") == message["id"]:
                return found  # what came before belongs to a request whose time was over, or is a notification

    def notify(self, message: Message, timeout_s: float) -> None:
        self._write(message, time.monotonic() + timeout_s, timeout_s)

    def _write(self, message: Message, until: float, timeout_s: float) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            if not select.select([], [self.given], [], max(0.0, until - time.monotonic()))[1]:
                raise McpFailed(f"took no request in {timeout_s:g} s")
            try:
                data = data[os.write(self.given, data) :]
            except OSError:
                raise McpFailed(self._ended()) from None

    def _line(self, until: float, timeout_s: float) -> bytes:
        while True:
            line, end, rest = self.buffer.partition(b"\n")
            if end:
                self.buffer = rest
                if line.strip():
                    return line
                continue
            if len(self.buffer) > MAX_ANSWER_BYTES:
                raise McpFailed(f"answers with more than {MAX_ANSWER_BYTES} bytes")
            if not select.select([self.said], [], [], max(0.0, until - time.monotonic()))[0]:
                raise McpFailed(f"gave no answer in {timeout_s:g} s")
            if not (data := os.read(self.said, CHUNK)):
                raise McpFailed(self._ended())
            self.buffer += data

    def _ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.poll()
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - ERROR_TAIL))
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        how = "closed its output" if code is None else f"ended with {code}"
        return f"{how}{f': {lines[-1].strip()}' if lines else ''}"

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                stream and stream.close()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An answer from elsewhere is none of the server's, and would be sent its token."""

    def redirect_request(self, *about: Any) -> None:
        return None


class ServerAddress:
    """A server at an address of streamable HTTP: a request is posted, and answered by a message or a stream of messages."""

    def __init__(self, url: str, token: str = "") -> None:
        """token: Sent as a bearer's. Empty: none."""
        self.url = url
        self.headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        self.headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self.opener = urllib.request.build_opener(_NoRedirect)

    def request(self, message: Message, timeout_s: float) -> Message:
        return self._sent(message, timeout_s)

    def notify(self, message: Message, timeout_s: float) -> None:
        self._sent(message, timeout_s)

    def _sent(self, message: Message, timeout_s: float) -> Message:
        try:
            found: Message = call_within(timeout_s, self._answered, {"message": message, "timeout_s": timeout_s})
        except (ToolTimeOut, TimeoutError):
            raise McpFailed(f"gave no answer in {timeout_s:g} s") from None
        except urllib.error.HTTPError as error:
            hint = ": is the variable of its token right?" if error.code in (401, 403) else ""
            raise McpFailed(f"answers with HTTP {error.code}{hint}") from None
        except (OSError, HTTPException) as error:
            why = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(why, TimeoutError):
                raise McpFailed(f"gave no answer in {timeout_s:g} s") from None
            raise McpFailed(f"cannot be reached: {why}") from None
        return found

    def _answered(self, message: Message, timeout_s: float) -> Message:
        request = urllib.request.Request(self.url, json.dumps(message).encode(), self.headers)
        with self.opener.open(request, timeout=timeout_s) as response:
            if session := response.headers.get("Mcp-Session-Id"):
                self.headers |= {"Mcp-Session-Id": session}
            self.headers |= {"MCP-Protocol-Version": VERSION}
            if "id" not in message:
                return {}
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
            if kind == "application/json":
                return message_of(_whole(response))
            if kind != "text/event-stream":
                raise McpFailed(f"answers with {kind or 'no type'!r}, must be application/json or text/event-stream")
            for event in _events(response):
                found = message_of(event)
                if "method" not in found and found.get("id") == message["id"]:
                    return found
        raise McpFailed("ended its stream without an answer")

    def close(self) -> None:
        """End the session, if the server has one; what it says to that does not matter."""
        if "Mcp-Session-Id" not in self.headers:
            return
        request = urllib.request.Request(self.url, headers=self.headers, method="DELETE")
        with suppress(OSError, HTTPException):
            self.opener.open(request, timeout=1.0).close()


def _whole(response: HTTPResponse) -> bytes:
    data = response.read(MAX_ANSWER_BYTES + 1)
    if len(data) > MAX_ANSWER_BYTES:
        raise McpFailed(f"answers with more than {MAX_ANSWER_BYTES} bytes")
    return data


def _events(response: HTTPResponse) -> Iterator[bytes]:
    """The data of each event of a stream (WHATWG HTML, section 9.2.6)."""
    data, num_bytes = [], 0
    for line in iter(lambda: response.readline(MAX_ANSWER_BYTES + 1), b""):
        num_bytes += len(line)
        if num_bytes > MAX_ANSWER_BYTES:
            raise McpFailed(f"answers with more than {MAX_ANSWER_BYTES} bytes")
        text = line.rstrip(b"\r\n")
        if text.startswith(b"data:"):
            data.append(text.removeprefix(b"data:").removeprefix(b" "))
        elif not text and data:
            yield b"\n".join(data)
            data = []
