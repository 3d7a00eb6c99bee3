"""What the scripted servers of all engines share: a model that is a function of tokens and adapter, faults, HTTP.

Misbehaviour is read from the file `RATCHET_TEST_FAULT` names, at each request, so that a test can change it while the server runs.
`<fault> after <n>` begins after n samples. Each sample that was answered is a line `<seed>` in the file `<fault file>.answered`,
each prompt that went first a line `leader`. `<fault file>.order` has a line for each request that came, with the key of its part of the
prefix cache.
"""

import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

NUM_TOKENS = 5
"""Of a sample that may stop when it likes."""
adapters: dict[str, str] = {}
ever_loaded: list[str] = []
computed_for: dict[tuple[int, ...], str | None] = {}
"""Which adapter (by path) was served when a text was first seen: a prefix cache."""
broken_off: set[str] = set()
"""Ids of requests."""
one_at_a_time = threading.Lock()
num_requests = {"generate": 0, "answered": 0, "aborted": 0}
weights: dict = {"path": None, "lost": False}
"""What was read into the base model's place (None: the base model), and whether it was lost: answers are garbage then."""


def logprob(tokens: list[int], adapter_path: str | None) -> float:
    name = Path(adapter_path).name if adapter_path else "base"
    return -(1 + hashlib.sha256(f"{tokens} {name}".encode()).digest()[0]) / 64


def fault() -> str:
    path = Path(os.environ.get("RATCHET_TEST_FAULT", "/nowhere"))
    try:
        name, _, number = path.read_text().strip().partition(" after ")
    except FileNotFoundError:  # not set, or taken away just now
        return ""
    return name if num_requests["answered"] >= int(number or 0) else ""


def answered(what: object, file: str = "answered") -> None:
    if "RATCHET_TEST_FAULT" in os.environ:
        with Path(f"{os.environ['RATCHET_TEST_FAULT']}.{file}").open("a") as lines:
            lines.write(f"{what}\n")


def served_for(name: str | None) -> str | None:
    """Path of the adapter that answers for this name; raises KeyError for one that is not loaded."""
    if name is not None and name not in adapters:
        raise KeyError(name)
    found = adapters.get(name or "")
    match fault():
        case "forgets the adapter":
            found = None
        case "serves an old adapter" if name is not None:
            found = ever_loaded[0]
    return found or weights["path"]


def prompt_logprobs(tokens: list[int], name: str | None, off: float = 0.0) -> list[float]:
    """Of tokens[1:]."""
    served, off = served_for(name), 3.0 if fault() == "garbage" or weights["lost"] else off
    return [logprob(tokens[:n], served) - off for n in range(1, len(tokens))]


class Completion(NamedTuple):
    tokens: list[int]
    logprobs: list[float | None]
    finish_reason: str


class Asked(NamedTuple):
    tokens: list[int]
    adapter: str | None
    seed: int | None
    """None: a check, not a rollout."""
    max_new_tokens: int
    ignore_eos: bool = False
    reads_cache: bool = True
    cache_key: str | None = None
    request_id: str = ""

    @property
    def is_sample(self) -> bool:
        return self.seed is not None and self.max_new_tokens > 1


def complete(asked: Asked, off: float = 0.0) -> Completion | None:
    """None: no sample at all, where that is the fault."""
    served = served_for(asked.adapter)
    answered("check" if asked.seed is None else f"{'sample' if asked.is_sample else 'leader'} {asked.cache_key}", "order")
    first = computed_for.setdefault(tuple(asked.tokens), served)
    in_output = first if fault() == "stale prefix cache" and asked.reads_cache else served
    off = 3.0 if fault() == "garbage" or weights["lost"] else off
    is_cut = asked.max_new_tokens < NUM_TOKENS
    count = asked.max_new_tokens if asked.ignore_eos or is_cut else NUM_TOKENS
    output = [((asked.seed or 0) + n) % 50 + 3 for n in range(count)]
    values: list[float | None] = [logprob(asked.tokens + output[:n], in_output) - off for n in range(count)]
    reason = "length" if is_cut or asked.ignore_eos else "stop"
    if asked.is_sample and (num := num_before_broken_off(asked, len(output))) < len(output):
        return Completion(output[:num], values[:num], "abort")
    match fault():
        case "NaN":
            values[0] = float("nan")
        case "positive log-probability":
            values[0] = 0.5
        case "token out of the vocabulary":
            output[0] = 10**6
        case "no output":
            output, values = [], []
        case "lost log-probability":
            values = values[:-1]
        case "aborts":
            reason = "abort"
        case "too few samples" if asked.is_sample:
            return None
        case "None" if asked.is_sample:
            values[0] = None
        case "dies":
            os._exit(1)
        case "one by one" if asked.is_sample:
            with one_at_a_time:
                time.sleep(0.5)
        case "crashes" if asked.is_sample:
            with one_at_a_time:  # an engine has one scheduler, which dies once
                try:
                    raise AssertionError(f"LoRA buffer shape does not match, at {time.time()}")
                except AssertionError:
                    traceback.print_exc()
                print("40 lines of threads and modules\n" * 60, flush=True)
                os._exit(1)
    if asked.seed is not None:
        num_requests["answered"] += asked.is_sample
        answered(asked.seed if asked.is_sample else "leader")
    return Completion(output, values, reason)


def num_before_broken_off(asked: Asked, count: int) -> int:
    """How many of a sample's tokens have come when it is over or all are aborted, in 0.2 s where that is the fault. `endless from <n>`:
    where the prompt's third token is n or above it is never over."""
    name, before = fault(), num_requests["aborted"]
    is_endless = name.startswith("endless from ") and asked.tokens[2] >= int(name.rsplit(" ", 1)[1])
    num = 0 if is_endless or name == "slow" else count
    while num < count:
        time.sleep(0.2 / count)
        num += 1 if not is_endless or num < count - 1 else 0
        if num_requests["aborted"] > before or asked.request_id in broken_off:
            return num
    return count


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    open_paths: tuple[str, ...] = ()
    """That need no key."""
    completion_path: str

    def answer(self, status: int, content: object) -> None:
        text = content if isinstance(content, str) else "" if isinstance(content, bytes) else json.dumps(content)
        data = content if isinstance(content, bytes) else text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, chunks: list[object], seconds_a_chunk: float = 0.0) -> None:
        """Server-sent events."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        ends_early = fault() == "ends the stream early"
        for chunk in chunks[:1] if ends_early else [*chunks, None]:
            if chunk is not None:
                time.sleep(seconds_a_chunk)
            self.wfile.write(b"data: " + (b"[DONE]" if chunk is None else json.dumps(chunk).encode()) + b"\n\n")
            self.wfile.flush()
        self.close_connection = True

    def is_authorized(self) -> bool:
        key = Path(os.environ["RATCHET_API_KEY_FILE"]).read_text()
        return self.path.startswith(self.open_paths) or self.headers["Authorization"] == f"Bearer {key}"

    def is_first_sample(self, body: dict) -> bool:
        if self.path != self.completion_path or not self.asked(body).is_sample:
            return False
        num_requests["reset"] = num_requests.get("reset", 0) + 1
        return num_requests["reset"] == 1

    def asked(self, body: dict) -> "Asked":
        raise NotImplementedError

    def get(self) -> None:
        raise NotImplementedError

    def post(self, body: dict) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        if fault() == "hangs altogether":
            time.sleep(3600)
        if not self.is_authorized():
            self.answer(401, "")
        elif self.path == "/adapters":
            self.answer(200, adapters)
        else:
            self.get()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_authorized():
            self.answer(401, "")
        elif fault() in ("HTTP 500", "HTTP 503", "HTTP 400"):
            self.answer(int(fault()[-3:]), "oh no")
        elif fault() in ("hangs", "hangs altogether"):  # its front still says that it is ready, as SGLang's does
            time.sleep(3600)
        elif fault() == "connection reset" or (fault() == "one connection reset" and self.is_first_sample(body)):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        elif fault() == "no JSON" and self.path == self.completion_path:
            self.answer(200, "<html>")
        elif fault() == "no text" and self.path == self.completion_path:
            self.answer(200, b"\xff\xfe\x80")
        else:
            if self.path == self.completion_path:
                num_requests["generate"] += 1
            self.post(body)

    def log_message(self, *_: object) -> None:
        pass


def serve(handler: type[Handler], begin: Callable[[], object] = lambda: None) -> None:
    """Until it is ended; `--host` and `--port` are read from the command line."""
    if fault() == "does not start":
        print("no GPU today", flush=True)
        sys.exit(3)
    if fault() == "out of memory":
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    if fault() == "never gets ready":
        time.sleep(600)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    begin()
    print("listening", flush=True)
    host = sys.argv[sys.argv.index("--host") + 1]
    ThreadingHTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ThreadingHTTPServer((host, port), handler).serve_forever()
