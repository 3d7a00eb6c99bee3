"""The scripted SGLang server of the tests, whose samples have lengths by their seeds and take as long as they have tokens; for simulate.py."""

import random
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "infra/engines"))
import scripted_server
import scripted_sglang_server
from scripted_server import Asked, Completion

S_PER_TOKEN = 0.005
LOG_MEAN, LOG_SPREAD = 4.45, 0.6
"""Of lognormal lengths: 103 tokens on average."""
slots = threading.Semaphore(int(sys.argv[sys.argv.index("--max-running-requests") + 1]) if __name__ == "__main__" else 1)
answer_at_once = scripted_server.complete


def complete(asked: Asked, off: float = 0.0) -> Completion | None:
    if not asked.is_sample:
        return answer_at_once(asked, off)
    num = min(max(1, round(random.Random(asked.seed).lognormvariate(LOG_MEAN, LOG_SPREAD))), asked.max_new_tokens)
    with slots:
        time.sleep(num * S_PER_TOKEN)
    return Completion([3 + n % 50 for n in range(num)], [-0.5] * num, "stop" if num < asked.max_new_tokens else "length")


if __name__ == "__main__":
    scripted_sglang_server.complete = complete
    scripted_server.ThreadingHTTPServer.request_queue_size = 128
    scripted_server.serve(scripted_sglang_server.SGLang, scripted_sglang_server.remember_memory)
