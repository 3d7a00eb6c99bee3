"""A server that speaks SGLang's HTTP without a model, for border tests; its misbehaviour is read from the file `RATCHET_TEST_FAULT`
names, at each request, so that a test can change it while the server runs.

Log-probabilities are a fixed function of the tokens and of the served adapter; see `logprob`.
"""

import hashlib
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

adapters: dict[str, str] = {}
num_requests = {"generate": 0}


def logprob(tokens: list[int], adapter_path: str | None) -> float:
    name = Path(adapter_path).name if adapter_path else "base"
    return -(1 + hashlib.sha256(f"{tokens} {name}".encode()).digest()[0]) / 64


def fault() -> str:
    path = Path(os.environ["RATCHET_TEST_FAULT"])
    return path.read_text().strip() if path.exists() else ""


def generate(body: dict) -> dict:
    name = body.get("lora_path")
    if name is not None and name not in adapters:
        raise KeyError(name)
    served = None if fault() == "forgets the adapter" else adapters.get(name)
    tokens, sampling = body["input_ids"], body["sampling_params"]
    garbage = 3.0 if fault() == "garbage" else 0.0
    about: dict = {"cached_tokens": len(tokens) - 1, "finish_reason": {"type": "stop"}}
    if body.get("logprob_start_len") == 0:
        values = [logprob(tokens[:n], served) - garbage for n in range(1, len(tokens))]
        about["input_token_logprobs"] = [
            [None, tokens[0], None],
            *([v, t, None] for v, t in zip(values, tokens[1:], strict=True)),
        ]
    output = [(sampling.get("sampling_seed", 0) + n) % 50 + 3 for n in range(min(sampling["max_new_tokens"], 5))]
    values = [logprob(tokens + output[:n], served) for n in range(len(output))]
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
        case "dies":
            os._exit(1)
    about["output_token_logprobs"] = [[v, t, None] for v, t in zip(values, output, strict=False)]
    return {"output_ids": output, "meta_info": about}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, content: object) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(
                200,
                f"sglang:time_to_first_token_seconds_sum 1.0\nsglang:time_to_first_token_seconds_count {num_requests['generate']}\n",
            )
        elif self.path == "/adapters":
            self.answer(200, adapters)
        else:
            self.answer(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if fault() == "HTTP 500":
            self.answer(500, "oh no")
        elif self.path == "/load_lora_adapter":
            adapters[body["lora_name"]] = body["lora_path"]
            self.answer(200, {})
        elif self.path == "/unload_lora_adapter":
            del adapters[body["lora_name"]]
            self.answer(200, {})
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
    if fault() == "never gets ready":
        time.sleep(600)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    print("listening", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
