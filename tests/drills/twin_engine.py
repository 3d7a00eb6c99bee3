"""SGLang's twin: its HTTP without a model. Started as SGLang is, through RATCHET_SGLANG_PYTHON.

What it samples is a fixed function of the request; what it thinks of a text, of the text and of the served adapter's bytes. It
writes a line for every sample that it has delivered (answers.jsonl in the cell's folder), so that the drill can count.
"""

import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import points

POINT_AT_SAMPLE = 8
"""The middle of a rollout of 16 samples. Divided by the number of replicas, which share them."""
POINT_OF_QUEUE = 2 * 16 + 8
"""The middle of the third rollout."""
HELD = range(16 + 8 + 1, 2 * 16 + 1)
"""Numbers of the samples that end when they are aborted, where a rollout is to have requests under way at its switch: half of the second rollout."""
HELD_S = 15.0
SECONDS_A_SAMPLE = 0.02
SLOW_S = 1.2
"""Of a slow replica's sample: it is late, and not lost yet."""
ROLE = "engine" if "--enable-lora" in sys.argv else "judge server"
"""A judge's server has no adapters."""
DIGIT_0 = 18
"""Token of `0` in the tiny models' tokenizer; the other digits follow. A judge answers with one of them."""
num_generated = 0
"""Requests that were answered, as its metrics have it."""
part: socket.socket | None = None
"""To the second part of a server over two nodes, without which nothing is sampled."""
adapters: dict[str, str] = {}
"""Name -> digest of the weights."""
num_samples, num_judged, counting = 0, 0, threading.Lock()
aborted: set[str] = set()
"""Ids of requests."""
num_under_way = 0
goes_on = threading.Event()
"""Not set while generation is paused."""
goes_on.set()


def logprob(before: list[int], adapter: str) -> float:
    """Of whatever token comes after these, in nats; adapter is a digest, or `base`."""
    return -(1 + hashlib.sha256(f"{before} {adapter}".encode()).digest()[0]) / 64


def logprobs(tokens: list[int], adapter: str) -> list[float]:
    """Of tokens[1:]. The trainer's twin says the same."""
    return [logprob(tokens[:n], adapter) for n in range(1, len(tokens))]


def is_sample(body: dict[str, Any]) -> bool:
    """Not one of the checks, nor a prompt that is sent once to be in the cache."""
    return "sampling_seed" in body["sampling_params"] and body["sampling_params"]["max_new_tokens"] > 1


def one_by_one(body: dict[str, Any]) -> list[dict[str, Any]]:
    """What many requests in one ask for; a field that is no list holds for all."""
    fields = {field: value if isinstance(value, list) else [value] * len(body["input_ids"]) for field, value in body.items()}
    return [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]


def generate(body: dict[str, Any]) -> dict[str, Any]:
    name, tokens, sampling = body.get("lora_path"), body["input_ids"], body["sampling_params"]
    served = adapters[name] if name is not None else "base"
    is_ill = points.ordered(ROLE) == "garbage"
    about: dict[str, Any] = {"cached_tokens": len(tokens) - 1, "finish_reason": {"type": "stop"}, "weight_version": "default"}
    if (begin := body.get("logprob_start_len", -1)) >= 0:
        if name is None and not num_samples and ROLE == "engine":
            points.reach("wake_engine.middle")
            is_ill = points.ordered(ROLE) == "garbage"
        known = [[value - 3.0 * is_ill, token, None] for value, token in zip(logprobs(tokens, served), tokens[1:], strict=True)]
        about["input_token_logprobs"] = [[None, tokens[begin], None], *known[begin:]]
    drawn = hashlib.sha256(f"{tokens} {sampling.get('sampling_seed')} {served}".encode()).digest()
    output = [3 + byte % 400 for byte in drawn[: min(sampling["max_new_tokens"], 5)]]
    if ROLE != "engine":
        output = [DIGIT_0 + drawn[0] % 10]
    elif is_of_judge(body):
        digits = points.plan()["digits"]
        output = [digits[drawn[0] % 2]]
    values = [logprob(tokens + output[:n], served) for n in range(len(output))]
    if is_sample(body):
        is_ill, number = (judged(), 0) if is_of_judge(body) else sampled()
        time.sleep(SLOW_S if points.ordered(ROLE) == "slow" else SECONDS_A_SAMPLE)
        if sampling["max_new_tokens"] == len(output) and not is_of_judge(body):
            about["finish_reason"] = {"type": "length"}
        if number in HELD and points.plan().get("holds_samples") and is_aborted(body["rid"]):
            about["finish_reason"] = {"type": "abort"}
            output, values = output[: len(output) // 2], values[: len(output) // 2]
    await_part()
    if is_ill:
        values[0] = float("nan")
    about["output_token_logprobs"] = [[v, t, None] for v, t in zip(values, output, strict=True)]
    return {"output_ids": output, "meta_info": about}


def await_part() -> None:
    """Wait until the second part has done its share of an answer. One that is gone is waited for for ever, as SGLang may do."""
    if part is None:
        return
    with counting:
        with contextlib.suppress(OSError):
            part.sendall(b".")
            if part.recv(1):
                return
        threading.Event().wait()


def is_aborted(request_id: str) -> bool:
    """Wait until the request is aborted. Returns whether it is."""
    deadline = time.monotonic() + HELD_S
    while request_id not in aborted and time.monotonic() < deadline:
        time.sleep(0.005)
    return request_id in aborted


def sampled() -> tuple[bool, int]:
    """Count; says whether garbage shall be answered, and the sample's number."""
    global num_samples
    with counting:
        num_samples += 1
        number = num_samples
    if number == POINT_OF_QUEUE:
        points.reach("queue.waiting")
    if number > POINT_AT_SAMPLE and ROLE == "engine":
        points.wait_for("store.copying")  # so that samples are there and more are to come
    if number == POINT_AT_SAMPLE // points.num_replicas():
        points.reach("roll_out.middle" if ROLE == "engine" else "ask_judge.middle")
    return points.ordered(ROLE) == "garbage", number


def count_answer() -> None:
    global num_generated
    with counting:
        num_generated += 1


@contextlib.contextmanager
def under_way() -> Iterator[None]:
    """Count a request. As SGLang, a judge's server empties its cache only when none is under way: it sleeps when it has answered them all."""
    global num_under_way
    with counting:
        num_under_way += 1
    try:
        yield
    finally:
        with counting:
            num_under_way -= 1


def is_of_judge(body: dict[str, Any]) -> bool:
    """Whether an adapter that judges is asked for an answer."""
    return str(body.get("lora_path")).startswith("judge-") and is_sample(body)


def judged() -> bool:
    """Count; says whether garbage shall be answered."""
    global num_judged
    with counting:
        num_judged += 1
        number = num_judged
    if number == 3:
        points.reach("ask_engine.judging")
    return points.ordered("engine") == "garbage"


def note_answer(body: dict[str, Any], made: Any, asked_at: float) -> None:
    """One line for each sample that was delivered whole."""
    cell = points.folder()
    if isinstance(made, dict) and made["meta_info"]["finish_reason"]["type"] == "abort":
        return
    if cell is not None and is_sample(body) and ROLE == "engine" and not is_of_judge(body):
        line = json.dumps(
            {"seed": body["sampling_params"]["sampling_seed"], "engine": os.getpid(), "asked_at": asked_at, "at": time.time()}
        )
        with (cell / "answers.jsonl").open("a") as stream:
            stream.write(line + "\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, content: object) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.misbehaves(of_health=False):
            return
        self.answer(200, f"sglang:num_requests_total {num_generated}\n" if self.path == "/metrics" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.misbehaves(of_health=True):
            return
        match self.path:
            case "/load_lora_adapter":
                points.reach("ask_engine.loading" if body["lora_name"].startswith("judge-") else "reload_adapter.middle")
                if self.misbehaves(of_health=True):
                    return
                await_part()
                adapters[body["lora_name"]] = self.digest_of(Path(body["lora_path"]))
                self.answer(200, {})
            case "/abort_request":
                aborted.add(body["rid"])
                self.answer(200, {})
            case "/flush_cache":
                self.answer(400 if num_under_way and ROLE != "engine" else 200, {})
            case "/pause_generation" | "/continue_generation":
                (goes_on.clear if self.path == "/pause_generation" else goes_on.set)()
                self.answer(200, {})
            case "/freeze_gc":
                self.answer(200, {})
            case "/release_memory_occupation" | "/resume_memory_occupation":
                self.answer(200, {})
            case "/unload_lora_adapter":
                del adapters[body["lora_name"]]
                self.answer(200, {})
            case "/generate":
                if ROLE != "engine":
                    goes_on.wait()
                with under_way():
                    self.generate(body)
            case _:
                self.answer(404, "")

    def generate(self, body: dict[str, Any]) -> None:
        asked_at = time.time()
        try:
            made = [generate(each) for each in one_by_one(body)] if isinstance(body["input_ids"][0], list) else generate(body)
        except KeyError as error:
            self.answer(400, f"adapter {error} is not loaded")
            return
        if self.misbehaves(of_health=True):
            return
        count_answer()
        self.answer(200, made)
        note_answer(body, made, asked_at)

    @staticmethod
    def digest_of(folder: Path) -> str:
        if points.ordered(ROLE) == "garbage":
            return "of another adapter"
        return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()

    def misbehaves(self, *, of_health: bool) -> bool:
        """Commit the fault that was ordered, from then on until this process ends. A sick engine may well look healthy."""
        match points.ordered(ROLE):
            case "exit 1":
                os._exit(1)
            case "out of memory":
                try:
                    points.run_out_of_memory()
                except MemoryError:
                    traceback.print_exc()
                    os._exit(1)
            case ("HTTP 500" | "HTTP 503") as fault if of_health:
                self.answer(int(fault.split()[1]), "the scheduler is gone")
                return True
            case "reset" if of_health:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
                return True
        return False

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # whoever asked is gone, or was cut off by us
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass


def address_of_parts() -> tuple[str, int] | None:
    """Where the parts meet; None: there is one."""
    if "--dist-init-addr" not in sys.argv:
        return None
    host, _, port = sys.argv[sys.argv.index("--dist-init-addr") + 1].rpartition(":")
    return host, int(port)


def serve_first_part(address: tuple[str, int]) -> None:
    """Do the second part's share until the first one is gone."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            first = socket.create_connection(address)
            break
        time.sleep(0.02)
    while asked := first.recv(1):
        first.send(asked)
    raise RuntimeError("[gloo] Connection closed by peer")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    if ROLE == "engine":
        points.reach("wake_engine.launch")
    if meeting := address_of_parts():
        if sys.argv[sys.argv.index("--node-rank") + 1] != "0":
            serve_first_part(meeting)
        part = socket.create_server(meeting).accept()[0]
    port = int(sys.argv[sys.argv.index("--port") + 1])
    host = sys.argv[sys.argv.index("--host") + 1] if "--host" in sys.argv else "127.0.0.1"
    print("listening", flush=True)
    if points.plan().get("is_cut"):
        import namespace

        namespace.serve(port, lambda there: Server((there, port), Handler).serve_forever())
    Server((host, port), Handler).serve_forever()
