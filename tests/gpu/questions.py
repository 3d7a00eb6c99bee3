"""What a check of the engine costs: texts that are asked one by one, at once, and in one request; and the first after an adapter was loaded.

    python tests/gpu/questions.py OUT.json --model FOLDER [--set FIELD=VALUE ...]

Milliseconds, --times each. One request of texts with and without an adapter is a batch of SGLang; requests that come at once are not.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import Bench, parser

from infra.concurrency.background import run_concurrently
from infra.engines.scoring import ScoreRequest
from infra.engines.server import server_process
from infra.engines.server.server_engine import CONTROL_TIMEOUT_S
from infra.records import AdapterVersion
from infra.store.files import path_of

NUM_LOADS = 3


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--times", type=int, default=4)
    p.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    options = p.parse_args()
    bench = Bench(options, "questions")
    adapter = bench.adapter()
    engine: Any = bench.engine(adapter)
    try:
        engine.wake()
        engine.load_adapter(adapter)
        for num_tokens in options.tokens:
            bench.say(**{f"{num_tokens} tokens": asked(engine.program, adapter, num_tokens, options.times)})
        bench.say(first_after_a_load=after_loads(engine.program, adapter, options.tokens[0]))
    finally:
        server_process.stop_recorded()
    print("done")


def asked(program: Any, adapter: AdapterVersion, num_tokens: int, times: int) -> dict[str, list[float]]:
    score, name = program.score, adapter.served_name
    text = some_text(program.vocab_size, num_tokens)
    five = [ScoreRequest(text, name), ScoreRequest(text, None), ScoreRequest(text, name, is_by_cache=True)]
    five += [ScoreRequest(text[: num_tokens // 2], None), ScoreRequest(text[: num_tokens // 3], None)]

    def by_requests(questions: list[ScoreRequest]) -> Callable[[], object]:
        def call() -> None:
            with run_concurrently(len(questions)) as begin:
                answers = [begin(score, [question]) for question in questions]
            for answer in answers:
                answer.result()

        return call

    ways: dict[str, Callable[[], object]] = {"base": lambda: score(five[1:2]), "adapter": lambda: score(five[:1])}
    for number in (2, 5):
        ways[f"{number} at once"] = by_requests(five[:number])
        ways[f"{number} in one request"] = lambda number=number: score(five[:number])
    return {way: [milliseconds(call) for _ in range(times)] for way, call in ways.items()}


def after_loads(program: Any, adapter: AdapterVersion, num_tokens: int) -> list[float]:
    """Of the same adapter, each time under another name."""
    assert adapter.weights
    state, folder, found = server_process.recorded(), path_of(adapter.weights).parent, []
    assert state
    for number in range(NUM_LOADS):
        name = f"load-{number}"
        load(state.url, folder, name)
        text = some_text(program.vocab_size, num_tokens)
        found.append(milliseconds(lambda text=text, name=name: program.score([ScoreRequest(text, name)])))
        server_process.post(state.url, "/unload_lora_adapter", {"lora_name": name}, CONTROL_TIMEOUT_S)
    return found


def load(url: str, folder: Path, name: str) -> None:
    server_process.post(url, "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, CONTROL_TIMEOUT_S)


def some_text(vocab_size: int, num_tokens: int) -> list[int]:
    generator = random.Random(num_tokens)
    return [generator.randrange(10, vocab_size) for _ in range(num_tokens)]


def milliseconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return round(1000 * (time.perf_counter() - begin), 1)


if __name__ == "__main__":
    main()
