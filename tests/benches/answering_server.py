"""A server that answers as SGLang does, at once and without a model, for step_tail.py.

    python tests/benches/answering_server.py NUM_SAMPLES RELEASED

It says its port on a line of its own. Answers to leaders, which want one token, go out at once; all others when CONCURRENCY of them wait,
or all that are left of NUM_SAMPLES. The file RELEASED then has the time, by the monotonic clock, which all processes share.
"""

import asyncio
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS, OUTPUT_TOKENS, VOCAB_SIZE = 512, 512, 151_936
CONCURRENCY = 512
NUM_LEADER_TOKENS = 1


def answer_of(rng: random.Random, num_tokens: int) -> dict[str, Any]:
    """What SGLang 0.5.18 answers to /generate; log-probabilities are float32 numbers."""
    import numpy as np

    logprobs = np.float32([-rng.expovariate(2) for _ in range(num_tokens)]).tolist()
    tokens = [token_of(rng) for _ in range(num_tokens)]
    about = {
        "id": f"{rng.getrandbits(128):032x}",
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": PROMPT_TOKENS,
        "weight_version": "default",
        "total_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
        "completion_tokens": num_tokens,
        "cached_tokens": PROMPT_TOKENS - 1,
        "e2e_latency": 9.87654321,
    }
    return {"text": "some words " * (num_tokens // 3), "output_ids": tokens, "meta_info": about}


def token_of(rng: random.Random) -> int:
    """Few words are frequent, most are rare."""
    return min(int(rng.paretovariate(0.35)) - 1, VOCAB_SIZE - 1)


class Held:
    """Answers of all connections that wait for each other."""

    def __init__(self, num_samples: int, released: Path) -> None:
        rng = random.Random(0)
        self.leader_answer = http_of(rng, NUM_LEADER_TOKENS)
        self.answers = itertools.cycle([http_of(rng, OUTPUT_TOKENS) for _ in range(16)])
        self.num_left, self.released = num_samples, released
        self.waiting: list[asyncio.Transport] = []

    def answer(self, transport: asyncio.Transport, num_tokens: int) -> None:
        if num_tokens == NUM_LEADER_TOKENS:
            transport.write(self.leader_answer)
            return
        self.waiting.append(transport)
        if len(self.waiting) == min(CONCURRENCY, self.num_left):
            self.num_left -= len(self.waiting)
            self.released.write_text(str(time.monotonic()))
            for waiting in self.waiting:
                waiting.write(next(self.answers))
            self.waiting = []


class Answering(asyncio.Protocol):
    """Just enough HTTP."""

    def __init__(self, held: Held) -> None:
        self.held = held

    def connection_made(self, transport: Any) -> None:
        self.transport, self.data = transport, b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        size = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
        if not end or len(body) < size:
            return
        self.data = b""
        self.held.answer(self.transport, json.loads(body)["sampling_params"]["max_new_tokens"])


def http_of(rng: random.Random, num_tokens: int) -> bytes:
    data = json.dumps(answer_of(rng, num_tokens), separators=(",", ":")).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)


async def serve(num_samples: int, released: Path) -> None:
    held = Held(num_samples, released)
    server = await asyncio.get_running_loop().create_server(lambda: Answering(held), "127.0.0.1", 0, backlog=2 * CONCURRENCY)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
