"""A server that speaks SGLang's HTTP without a model, for border tests; its misbehaviour is read from the file `RATCHET_TEST_FAULT`
names, at each request, so that a test can change it while the server runs. `<fault> after <n>` begins after n samples. Each sample
that was answered is a line `<seed>` in the file `<fault file>.answered`, each prompt that went first a line `leader`.

It asks for the API key as SGLang does: not for /health and /metrics, for everything else.
Log-probabilities are a fixed function of the tokens and of the served adapter; see `logprob`.

Memory as SGLang has it: a release while requests are let in, or a resume without a release, ends it; weights that were released without
`--enable-weights-cpu-backup` are garbage until they are read from disk, and nothing says so. What it holds, in GiB, is in the file
`<fault file>.memory`: what the driver says of it in tests.
"""

import hashlib
import json
import os
import socket
import struct
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

adapters: dict[str, str] = {}
ever_loaded: list[str] = []
computed_for: dict[tuple[int, ...], str | None] = {}
"""Which adapter (by path) was served when a text was first seen: a prefix cache."""
num_requests = {"generate": 0, "answered": 0}
GIB = {"kv_cache": 83, "weights": 15}
REST_GIB = 2
memory: dict = {"released": set(), "paused": False, "weights lost": False, "flushes": 0, "tokens": 65536}
weights: dict = {"path": None, "version": "default"}
"""What was read into the base model's place; None: the base model."""


def logprob(tokens: list[int], adapter_path: str | None) -> float:
    name = Path(adapter_path).name if adapter_path else "base"
    return -(1 + hashlib.sha256(f"{tokens} {name}".encode()).digest()[0]) / 64


def fault() -> str:
    path = Path(os.environ["RATCHET_TEST_FAULT"])
    name, _, number = (path.read_text().strip() if path.exists() else "").partition(" after ")
    return name if num_requests["answered"] >= int(number or 0) else ""


def answered(what: object, file: str = "answered") -> None:
    with Path(f"{os.environ['RATCHET_TEST_FAULT']}.{file}").open("a") as lines:
        lines.write(f"{what}\n")


def served_for(name: str | None) -> str | None:
    """Path of the adapter that answers for this name."""
    if name is not None and name not in adapters:
        raise KeyError(name)
    match fault():
        case "forgets the adapter":
            return None
        case "serves an old adapter" if name is not None:
            return ever_loaded[0]
    return adapters.get(name)


def generate(body: dict) -> object:
    if isinstance(body["input_ids"][0], list):  # many requests in one
        rows = zip(body["input_ids"], body["sampling_params"], body["lora_path"], strict=True)
        return [generate(body | {"input_ids": tokens, "sampling_params": how, "lora_path": name}) for tokens, how, name in rows]
    served = served_for(body.get("lora_path")) or weights["path"]
    tokens, sampling = body["input_ids"], body["sampling_params"]
    first = computed_for.setdefault(tuple(tokens), served)
    in_output = first if fault() == "stale prefix cache" and body.get("logprob_start_len") != 0 else served
    garbage = 3.0 if fault() == "garbage" or memory["weights lost"] else 0.0
    version = "another" if fault() == "another weight version" else weights["version"]
    about: dict = {"cached_tokens": len(tokens) - 1, "finish_reason": {"type": "stop"}, "weight_version": version}
    if body.get("logprob_start_len") == 0:
        values = [logprob(tokens[:n], served) - garbage for n in range(1, len(tokens))]
        about["input_token_logprobs"] = [
            [None, tokens[0], None],
            *([v, t, None] for v, t in zip(values, tokens[1:], strict=True)),
        ]
    output = [(sampling.get("sampling_seed", 0) + n) % 50 + 3 for n in range(min(sampling["max_new_tokens"], 5))]
    values = [logprob(tokens + output[:n], in_output) - garbage for n in range(len(output))]
    is_sample = "sampling_seed" in sampling and sampling["max_new_tokens"] > 1
    if is_sample and fault() == "slow":
        time.sleep(0.2)
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
            about["finish_reason"] = {"type": "abort"}
        case "too few samples" if is_sample:
            return []
        case "None" if is_sample:
            values[0] = None
        case "dies":
            os._exit(1)
    about["output_token_logprobs"] = [[v, t, None] for v, t in zip(values, output, strict=False)]
    if "sampling_seed" in sampling:
        num_requests["answered"] += is_sample
        answered(sampling["sampling_seed"] if is_sample else "leader")
    return {"output_ids": output, "meta_info": about}


def remember_memory() -> None:
    held = REST_GIB + sum(size for tag, size in GIB.items() if tag not in memory["released"])
    Path(os.environ["RATCHET_TEST_FAULT"] + ".memory").write_text(str(held))


def manage_memory(path: str, body: dict) -> tuple[int, object] | None:
    """What SGLang does for a control request; None for another path."""
    match path:
        case "/pause_generation" | "/continue_generation":
            memory["paused"] = path == "/pause_generation"
        case "/abort_request":
            assert body == {"abort_all": True}
        case "/flush_cache":
            memory["flushes"] += 1
            if fault() == "busy" or (fault() == "busy at first" and memory["flushes"] < 4):
                return 400, "not idle"
        case "/release_memory_occupation":
            if not memory["paused"] or fault() == "busy":
                os._exit(1)
            if fault() != "does not release":
                memory["released"] |= set(body["tags"])
        case "/resume_memory_occupation":
            if not memory["released"] and fault() != "does not release":
                os._exit(1)
            if "weights" in memory["released"] and "--enable-weights-cpu-backup" not in sys.argv:
                memory["weights lost"] = True
            memory["released"] -= set(body["tags"])
            memory["tokens"] -= 100 if fault() == "smaller cache" else 0
        case "/update_weights_from_disk":
            if fault() == "cannot read":
                return 400, {"success": False}
            if fault() != "reads nothing":
                is_adapter = (Path(body["model_path"]) / "adapter_model.safetensors").exists()
                memory["weights lost"], weights["path"] = False, body["model_path"] if is_adapter else None
            weights["version"] = body["weight_version"]
        case _:
            return None
    remember_memory()
    answered(f"{path} {' '.join(body.get('tags', []))}".strip(), "control")
    return 200, {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, content: object) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def is_authorized(self) -> bool:
        key = Path(os.environ["RATCHET_API_KEY_FILE"]).read_text()
        return self.path.startswith(("/health", "/metrics")) or self.headers["Authorization"] == f"Bearer {key}"

    def do_GET(self) -> None:
        if fault() == "hangs altogether":
            time.sleep(3600)
        if not self.is_authorized():
            self.answer(401, "")
        elif self.path == "/metrics":
            self.answer(
                200,
                f"sglang:time_to_first_token_seconds_sum 1.0\nsglang:time_to_first_token_seconds_count {num_requests['generate']}\n",
            )
        elif self.path == "/adapters":
            self.answer(200, adapters)
        elif self.path == "/server_info":
            self.answer(200, {"max_total_num_tokens": memory["tokens"]})
        else:
            self.answer(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_authorized():
            self.answer(401, "")
        elif fault() in ("HTTP 500", "HTTP 503", "HTTP 400"):
            self.answer(int(fault()[-3:]), "oh no")
        elif fault() in ("hangs", "hangs altogether"):  # its front still says that it is ready, as SGLang's does
            time.sleep(3600)
        elif fault() == "connection reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        elif fault() == "no JSON" and self.path == "/generate":
            self.answer(200, "<html>")
        elif self.path == "/load_lora_adapter":
            adapters[body["lora_name"]] = body["lora_path"]
            ever_loaded.append(body["lora_path"])
            self.answer(200, {})
        elif self.path == "/unload_lora_adapter":
            del adapters[body["lora_name"]]
            self.answer(200, {})
        elif (said := manage_memory(self.path, body)) is not None:
            self.answer(*said)
        elif self.path == "/generate":
            num_requests["generate"] += 1
            try:
                self.answer(200, generate(body))
            except KeyError as error:
                self.answer(400, f"adapter {error} is not loaded")
        else:
            self.answer(404, "")

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    if fault() == "does not start":
        print("no GPU today", flush=True)
        sys.exit(3)
    if fault() == "out of memory":
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    if fault() == "never gets ready":
        time.sleep(600)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    remember_memory()
    print("listening", flush=True)
    ThreadingHTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Handler).serve_forever()
