"""What a router of the field does to our requests: which fields arrive, how often one is sent, which control calls it knows.

    python -m venv ROUTER && ROUTER/bin/pip install smg==1.13.0
    .venv/bin/python tests/benches/router_probe.py ROUTER/bin/smg

Two scripted workers behind the router record what arrives. The request is the one that infra/engines/sglang/generate_api.py makes, with all of its
fields; those in OTHERS are of SGLang and not sent by us. The router listens on loopback, without retries.
"""

import argparse
import json
import os
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from infra.engines.server.transport import GenerateRequest
from infra.engines.sglang.generate_api import Generate
from infra.machine import ports

HOST, READY_S = "127.0.0.1", 60
REQUEST = GenerateRequest([5, 6, 7], "r-1", 0.7, 4, 11, ignore_eos=False, cache_key="part-3", top_p=0.9, request_id="a-1")
OTHERS: dict[str, Any] = {
    "logit_bias": {"5": 1.0},
    "stop_regex": "x+",
    "structural_tag": "{}",
    "stream_interval": 2,
    "custom_params": {"a": 1},
    "min_new_tokens": 1,
}
"""Fields of sampling_params."""
CONTROL = ("/abort_request", "/load_lora_adapter", "/unload_lora_adapter", "/pause_generation", "/flush_cache")
ANSWER = {
    "text": "",
    "output_ids": [3],
    "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 3, None]], "cached_tokens": 2},
}


class Worker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    arrived: ClassVar[list[tuple[str, dict[str, Any], str]]] = []
    """Path, body and Authorization of each POST to any worker."""
    status = 200

    def log_message(self, *about: object) -> None:
        pass

    def do_GET(self) -> None:
        self._say(200, {"model_path": "m", "served_model_name": "m", "is_generation": True, "version": "0.5.18"})

    def do_POST(self) -> None:
        body = json.loads(self._body() or b"{}")
        self.arrived.append((self.path, body, self.headers.get("Authorization", "")))
        self._say(self.status, ANSWER)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while num := int(self.rfile.readline(), 16):
            data += self.rfile.read(num)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _say(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def post(url: str, body: dict[str, Any]) -> int:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key", "x-smg-routing-key": "prompt-3"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def await_ready(url: str) -> float:
    begin = time.monotonic()
    while time.monotonic() - begin < READY_S:
        try:
            with urllib.request.urlopen(f"{url}/readiness", timeout=2):
                return time.monotonic() - begin
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{url} is not ready after {READY_S} s")


def generated(url: str, body: dict[str, Any]) -> tuple[int, list[tuple[str, dict[str, Any], str]]]:
    """Send one request. Returns the status and what arrived at the workers."""
    before = len(Worker.arrived)
    status = post(f"{url}/generate", body)
    return status, [each for each in Worker.arrived[before:] if each[0] == "/generate"]


def probe(url: str) -> None:
    sent = Generate([2, 3]).body(REQUEST)
    _, found = generated(url, sent)
    dropped = sorted(set(sent) - set(found[0][1]))
    print(
        f"our request arrives as it was sent: {found[0][1] == sent | {key: found[0][1][key] for key in set(found[0][1]) - set(sent)}}"
    )
    print(
        f"fields of ours that are dropped: {dropped or 'none'}; fields that are added: {sorted(set(found[0][1]) - set(sent)) or 'none'}"
    )
    print(f"Authorization arrives: {found[0][2] == 'Bearer key'}")
    for name, value in OTHERS.items():
        _, found = generated(url, {**sent, "sampling_params": {**Generate([2, 3]).body(REQUEST)["sampling_params"], name: value}})  # type: ignore[dict-item]
        print(
            f"sampling_params.{name}: {'arrives' if found and found[0][1]['sampling_params'].get(name) == value else 'dropped or refused'}"
        )
    for status in (503, 500, 400):
        Worker.status = status
        answer, found = generated(url, sent)
        print(f"where a worker answers {status}: the client gets {answer}, the workers got {len(found)} calls")
    Worker.status = 200
    for path in CONTROL:
        print(f"{path}: {post(url + path, {'rid': 'a-1'})}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smg", type=Path, help="the program")
    smg = parser.parse_args().smg
    workers = [ThreadingHTTPServer((HOST, 0), Worker) for _ in range(2)]
    for worker in workers:
        threading.Thread(target=worker.serve_forever, daemon=True).start()
    with tempfile.TemporaryFile() as log, ports.reserved(31000, HOST) as port, ports.reserved(31500, HOST) as metrics_port:
        place = ["--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(metrics_port)]
        behind = ["--worker-urls", *(f"http://{HOST}:{worker.server_port}" for worker in workers)]
        command = [str(smg), "launch", *place, *behind, "--policy", "consistent_hashing", "--disable-retries"]
        router = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
        try:
            print(f"ready after {await_ready(f'http://{HOST}:{port}'):.1f} s")
            probe(f"http://{HOST}:{port}")
        finally:
            router.terminate()
            router.wait(15)


if __name__ == "__main__":
    main()
