"""What our own Python costs between the last sampled token of a step and the trainer's first kernel, and for each sample of a rollout.

    .venv/bin/python tests/benches/step_tail.py [--samples 512 4096] [--repeats 7] [--save NOW.json] [--before OLD.json]

Samples of 512 + 512 random tokens of a large vocabulary, 8 of a prompt, without an engine and without a model. Each part is done so
many times, the least CPU time of them counts (of all threads; others may use the machine too). The client's part speaks to a small
server in a process of its own, which holds back its answers until all that were asked for at a time (512) are there: that is a
rollout whose samples all end with the same token. Only what is called wall time is no CPU time.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PROMPT_TOKENS, OUTPUT_TOKENS, GROUP_SIZE, VOCAB_SIZE = 512, 512, 8, 151_936
CONCURRENCY = 512
NUM_LEADER_TOKENS = 1
Part = Callable[[], float | None]
"""Seconds that it counts itself; None: those of the call."""


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


class Answering(asyncio.Protocol):
    """Just enough HTTP. Answers to leaders go out at once, all others when CONCURRENCY of them, or the last ones, wait."""

    waiting: list[asyncio.Transport] = []  # noqa: RUF012  # of all connections
    num_left = 0

    def connection_made(self, transport: Any) -> None:
        self.transport, self.data = transport, b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        size = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
        if not end or len(body) < size:
            return
        self.data = b""
        if json.loads(body)["sampling_params"]["max_new_tokens"] == NUM_LEADER_TOKENS:
            self.transport.write(next(leader_answers))
            return
        everyone = type(self)
        everyone.waiting.append(self.transport)
        if len(everyone.waiting) == min(CONCURRENCY, everyone.num_left):
            everyone.num_left -= len(everyone.waiting)
            answers = [(waiting, next(sample_answers)) for waiting in everyone.waiting]
            everyone.waiting = []
            Path(os.environ["RATCHET_BENCH_RELEASED"]).write_text(str(time.monotonic()))
            for waiting, answer in answers:
                waiting.write(answer)


def http_of(rng: random.Random, num_tokens: int) -> bytes:
    data = json.dumps(answer_of(rng, num_tokens), separators=(",", ":")).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)


def serve(num_samples: int) -> None:
    """Says its port on a line of its own, then answers until it is ended."""
    global leader_answers, sample_answers
    rng = random.Random(0)
    leader_answers = itertools.repeat(http_of(rng, NUM_LEADER_TOKENS))
    sample_answers = itertools.cycle([http_of(rng, OUTPUT_TOKENS) for _ in range(16)])
    Answering.num_left = num_samples

    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0, backlog=2 * CONCURRENCY)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(forever())


class World(NamedTuple):
    """A workspace with a step whose rollout is over."""

    folder: Path
    prompts: list[Any]
    drawn: Any
    samples: list[Any]
    adapter: Any
    engine: Any
    sampling: Any


def model_in(folder: Path) -> Path:
    """A tokenizer with as many tokens as Qwen's, of random letters, and what else is asked of a model's folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from infra.tiny_model.tokenizer import CHAT_TEMPLATE

    rng, words = random.Random(1), dict.fromkeys([*pre_tokenizers.ByteLevel.alphabet(), "<|im_end|>"])
    while len(words) < VOCAB_SIZE:
        words["\u0120" * rng.randrange(2) + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7)))] = None
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    chatty = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", clean_up_tokenization_spaces=False)
    chatty.chat_template = CHAT_TEMPLATE
    chatty.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return folder


def world_of(num_samples: int, folder: Path) -> World:
    from infra.config import EngineConfig, SamplingConfig
    from infra.files import record_of, write_json_lines
    from infra.prompts import Prompt
    from infra.records import AdapterVersion, BaseModelRef, PromptBatch
    from infra.samples import Sample

    rng, model = random.Random(2), model_in(folder / "model")
    prompts = [
        Prompt(n, n, f"{n} + {n}?", f"#### {2 * n}", [token_of(rng) for _ in range(PROMPT_TOKENS)], n)
        for n in range(num_samples // GROUP_SIZE)
    ]
    base = BaseModelRef(id=str(model), sha256="0" * 64)
    adapter = AdapterVersion(run="r", version=0, base=base, rank=8, alpha=16, target_modules=("q_proj",), seed=0)
    samples = []
    for prompt, index in itertools.product(prompts, range(GROUP_SIZE)):
        answer = answer_of(rng, OUTPUT_TOKENS)
        samples.append(
            Sample(
                prompt_id=prompt.prompt_id,
                sample_index=index,
                prompt_tokens=prompt.prompt_tokens,
                output_tokens=answer["output_ids"],
                output_logprobs=[value for value, *_ in answer["meta_info"]["output_token_logprobs"]],
                finish_reason="length",
                adapter_version=0,
                adapter_sha256=adapter.sha256,
            )
        )
    path = write_json_lines(folder / "runs/r/steps/000000/prompts.jsonl", (prompt._asdict() for prompt in prompts))
    drawn = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=len(prompts), dataset_fingerprint="f", first_row=0)
    sampling = SamplingConfig(group_size=GROUP_SIZE, max_output_tokens=OUTPUT_TOKENS)
    return World(folder, prompts, drawn, samples, adapter, EngineConfig(max_running_requests=CONCURRENCY // 2), sampling)


def taking(world: World, journal: Any) -> Callable[[Any], bool]:
    """As the border does it."""
    from infra.engines.base import check_sample

    def take(sample: Any) -> bool:
        check_sample(sample, world.adapter, VOCAB_SIZE)
        journal.add(sample)
        return True

    return take


def taken(world: World) -> None:
    from infra.engines.journal import Journal

    path = world.folder / "x.journal"
    path.unlink(missing_ok=True)
    with Journal(path, {"adapter": "a"}) as journal:
        take = taking(world, journal)
        for sample in world.samples:
            take(sample)


def found_again(world: World) -> None:
    from infra.engines.journal import Journal

    with Journal(world.folder / "x.journal", {"adapter": "a"}) as journal:
        assert len(journal.samples) == len(world.samples)


def asked(world: World) -> tuple[float, float]:
    """Seconds of CPU for all requests, and wall seconds from the last answers' being there to the last sample's being in the journal."""
    from infra.engines.base import Wanted
    from infra.engines.journal import Journal
    from infra.engines.rollout import Rollout
    from infra.engines.sglang_rollout import Generate

    released, path = world.folder / "released", world.folder / "y.journal"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--serve", str(len(world.samples))]
    environment = os.environ | {"RATCHET_BENCH_RELEASED": str(released)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        try:
            with Journal(path, {"adapter": "a"}) as journal:
                take = taking(world, journal)
                rollout = Rollout(Generate([1]), world.engine, url, world.sampling, world.adapter, take)
                wanted = [Wanted(prompt, index) for prompt in world.prompts for index in range(GROUP_SIZE)]
                begin = time.process_time()
                asyncio.run(rollout.all_of(wanted))
                return time.process_time() - begin, time.monotonic() - float(released.read_text())
        finally:
            server.terminate()


class Sampled:
    """An engine whose samples are there already."""

    def __init__(self, world: World) -> None:
        self.world = world

    def wake(self) -> None: ...

    def load_adapter(self, adapter: Any) -> None: ...

    def generate(self, *_: object) -> tuple[list[Any], Any]:
        from infra.engines.base import RolloutMeasures

        return self.world.samples, RolloutMeasures()


def rolled_out(world: World) -> Any:
    """All of the task but the engine."""
    from tasks import roll_out

    (world.folder / "runs/r/steps/000000" / roll_out.MADE_FROM).unlink(missing_ok=True)
    roll_out.open_engine = lambda config, adapter: Sampled(world)
    return roll_out.roll_out.fn(world.engine, world.sampling, world.drawn, world.adapter)


def parts_of(world: World) -> dict[str, Part]:
    """What is timed, in the order of a step."""
    from infra import base_model
    from infra.config import BatchConfig, DataConfig, RewardConfig
    from infra.engines.base import check_samples
    from infra.prompts import draw
    from infra.samples import read_samples, write_samples
    from tasks.assemble import assemble
    from tasks.pages import shown_samples
    from tasks.score import score

    model, num_prompts = Path(world.adapter.base.id), len(world.prompts)
    data = DataConfig(num_prompts=num_prompts, max_prompt_tokens=PROMPT_TOKENS)
    draw(data, model, step=0, seed=0)  # reads the data set
    texts, tokens = base_model.tokenizer(model), [sample.output_tokens for sample in world.samples]
    rollouts = rolled_out(world)
    scored = score.fn(RewardConfig(), rollouts, world.drawn)
    batch = BatchConfig(advantage="reinforce_pp")
    made = assemble.fn(batch, scored)
    path = world.folder / "x.parquet"
    return {
        "draw prompts": lambda: draw(data, model, step=0, seed=0) and None,
        "client, all requests": lambda: asked(world)[0],
        "client, from the last 512 answers to the last sample, wall time": lambda: asked(world)[1],
        "each sample checked and journaled": lambda: taken(world),
        "the journal read": lambda: found_again(world),
        "all samples checked": lambda: check_samples(world.samples, world.prompts, GROUP_SIZE, world.adapter, VOCAB_SIZE),
        "texts": lambda: texts.batch_decode(tokens, skip_special_tokens=True) and None,
        "samples written": lambda: write_samples(path, world.samples) and None,
        "samples read": lambda: len(read_samples(path)) and None,
        "roll_out without its engine": lambda: rolled_out(world) and None,
        "score": lambda: score.fn(RewardConfig(), rollouts, world.drawn) and None,
        "assemble": lambda: assemble.fn(batch, scored) and None,
        "rows for a page": lambda: shown_samples(made, 8) and None,
    }


def timed(part: Part, repeats: int) -> float:
    def once() -> float:
        begin = time.process_time()
        said = part()
        return time.process_time() - begin if said is None else said

    return min(once() for _ in range(repeats))


def measured(num_samples: int, repeats: int) -> dict[str, float]:
    from infra.settings import settings

    with tempfile.TemporaryDirectory() as folder:
        os.environ["RATCHET_WORKSPACE"] = folder
        settings.cache_clear()
        return {name: timed(part, repeats) for name, part in parts_of(world_of(num_samples, Path(folder))).items()}


def table_of(now: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> str:
    """Milliseconds; where there is an earlier measurement, that too and how many times as fast it is now."""

    def cells(count: str, name: str) -> str:
        value, old = 1000 * now[count][name], before.get(count, {}).get(name)
        return f"{value:.1f}" if old is None else f"{1000 * old:.1f} | {value:.1f} | {1000 * old / value:.1f}"

    heads = [f"{count} before | now | ratio" if before.get(count) else f"{count}" for count in now]
    columns = " | ".join(heads)
    rows = [f"| {name} | {' | '.join(cells(count, name) for count in now)} |" for name in next(iter(now.values()))]
    return "\n".join([f"| ms, samples: | {columns} |", "|--|" + "--:|" * (columns.count("|") + 1), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, nargs="+", default=[512, 4096], metavar="N", help=f"multiples of {GROUP_SIZE}")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", type=Path, help="write the seconds here")
    parser.add_argument("--before", type=Path, help="what an earlier version saved")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    now = {str(count): measured(count, options.repeats) for count in options.samples}
    if options.save:
        options.save.write_text(json.dumps(now, indent=1))
    print(table_of(now, json.loads(options.before.read_text()) if options.before else {}))
    print(
        f"\n{os.cpu_count()} CPU cores ({platform.machine()}), load {os.getloadavg()[0]:.1f} at the end, "
        f"Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
