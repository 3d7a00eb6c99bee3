"""What our own Python costs between the last sampled token of a step and the trainer's first kernel, and for each sample of a rollout.

    .venv/bin/python tests/benches/step_tail.py [--samples 512 4096] [--repeats 7] [--save NOW.json] [--before OLD.json]

Samples of 512 + 512 random tokens of a large vocabulary, 8 of a prompt, without an engine and without a model. Each part is done so
many times, the least time of them counts. The client's part speaks to a small server in a process of its own, which holds back its
answers until all that were asked for at a time (512) are there: that is a rollout whose samples all end with the same token. Its wall
time is that from the last answers on.
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

from answering_server import CONCURRENCY, OUTPUT_TOKENS, PROMPT_TOKENS, VOCAB_SIZE, answer_of, token_of

GROUP_SIZE = 8


class Seconds(NamedTuple):
    cpu: float
    """Of all threads of this process."""
    wall: float


Part = Callable[[], Seconds | None]
"""Seconds that it counts itself; None: those of the call."""


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
    from infra.data.prompts import Prompt
    from infra.records import AdapterVersion, BaseModelRef, PromptBatch
    from infra.store.files import record_of, write_json_lines
    from infra.store.samples import Sample

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


def taking(world: World, journal: Any, tell: Callable[[Any], object] = lambda sample: None) -> Callable[[Any], bool]:
    """As the border does it."""
    from infra.engines.interface import check_sample

    def take(sample: Any) -> bool:
        check_sample(sample, world.adapter, VOCAB_SIZE)
        journal.add(sample)
        tell(sample)
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


def asked(world: World) -> Seconds:
    """CPU time of all requests, and wall time from the last answers' being there to the last sample's being ready for its file."""
    from infra.engines.detokenizer import Detokenizer
    from infra.engines.interface import SampleRequest
    from infra.engines.journal import Journal
    from infra.engines.server.generation import GenerationClient
    from infra.engines.sglang.generate_api import Generate

    released, path = world.folder / "released", world.folder / "y.journal"
    path.unlink(missing_ok=True)
    command = [sys.executable, Path(__file__).with_name("answering_server.py"), str(len(world.samples)), released]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        try:
            with Journal(path, {"adapter": "a"}) as journal, Detokenizer(Path(world.adapter.base.id)) as finishing:
                came: list[Any] = []
                take = taking(world, journal, lambda sample: came.append(sample) or finishing.add(sample))
                rollout = GenerationClient(
                    Generate([1]), world.engine, url, world.sampling, world.adapter, take, health_path="/health"
                )
                wanted = [SampleRequest(prompt, index) for prompt in world.prompts for index in range(GROUP_SIZE)]
                begin = time.process_time()
                asyncio.run(rollout.all_of(wanted))
                finishing.finished(came)
                return Seconds(time.process_time() - begin, time.monotonic() - float(released.read_text()))
        finally:
            server.terminate()


class Sampled:
    """An engine whose samples are there already; it tells of none of them."""

    def __init__(self, world: World) -> None:
        self.world = world

    def wake(self) -> None: ...

    def load_adapter(self, adapter: Any) -> None: ...

    def ran(self) -> Any:
        from infra.records import EngineRan
        from infra.telemetry import program_versions

        versions = program_versions.of_engine(self.world.engine.kind)
        return EngineRan(kind=self.world.engine.kind, identity="", flags=(), versions=versions, backends={})

    def start_figures(self) -> dict[str, float]:
        return {}

    def memory_in_use_gib(self) -> float:
        return 0.0

    def generate(self, request: Any, sink: Any) -> tuple[list[Any], Any]:
        from infra.engines.interface import RolloutMeasures

        sink.on_complete(self.world.samples)
        return self.world.samples, RolloutMeasures()


def rolled_out(world: World) -> Any:
    """All of the task but the engine."""
    from infra.store.layout import StepFolder
    from tasks.roll_out import roll_out
    from tasks.support import rollout

    StepFolder.of(world.drawn).samples_inputs.unlink(missing_ok=True)
    rollout.open_engine = lambda config, adapter: Sampled(world)
    return roll_out.fn(world.engine, world.sampling, world.drawn, world.adapter)


def parts_of(world: World) -> dict[str, Part]:
    """What is timed, in the order of a step."""
    from infra.config import BatchConfig, DataConfig, RewardConfig
    from infra.data.prompts import draw
    from infra.engines.interface import check_samples
    from infra.models import base_model
    from infra.reporting.step_page import shown_samples
    from infra.store.samples import read_samples, write_samples
    from tasks.assemble import assemble
    from tasks.score import score

    model, num_prompts = Path(world.adapter.base.id), len(world.prompts)
    data = DataConfig(num_prompts=num_prompts, max_prompt_tokens=PROMPT_TOKENS)
    draw(data, model, step=0, seed=0)  # reads the data set
    tokens = [sample.output_tokens for sample in world.samples]
    rollouts = rolled_out(world)
    scored = score.fn(RewardConfig(), rollouts, world.drawn)
    batch = BatchConfig(advantage="reinforce_pp")
    made = assemble.fn(batch, scored)
    path = world.folder / "x.parquet"
    return {
        "draw prompts": lambda: draw(data, model, step=0, seed=0) and None,
        "client with journal and texts; wall: from the last 512 answers on": lambda: asked(world),
        "each sample checked and journaled": lambda: taken(world),
        "the journal read": lambda: found_again(world),
        "all samples checked": lambda: check_samples(world.samples, world.prompts, GROUP_SIZE, world.adapter, VOCAB_SIZE),
        "texts": lambda: base_model.texts_of(model, tokens) and None,
        "samples written": lambda: write_samples(path, world.samples) and None,
        "samples read": lambda: len(read_samples(path)) and None,
        "roll_out without its engine": lambda: rolled_out(world) and None,
        "score": lambda: score.fn(RewardConfig(), rollouts, world.drawn) and None,
        "assemble": lambda: assemble.fn(batch, scored) and None,
        "rows for a page": lambda: shown_samples(made, 8) and None,
    }


def timed(part: Part, repeats: int) -> Seconds:
    def once() -> Seconds:
        cpu, wall = time.process_time(), time.perf_counter()
        return part() or Seconds(time.process_time() - cpu, time.perf_counter() - wall)

    return Seconds(*map(min, zip(*(once() for _ in range(repeats)), strict=True)))


def measured(num_samples: int, repeats: int) -> dict[str, Seconds]:
    from infra.settings import settings

    with tempfile.TemporaryDirectory() as folder:
        os.environ["RATCHET_WORKSPACE"] = folder
        settings.cache_clear()
        return {name: timed(part, repeats) for name, part in parts_of(world_of(num_samples, Path(folder))).items()}


def table_of(num_samples: str, now: dict[str, Seconds], before: dict[str, list[float]]) -> str:
    """Milliseconds; where there is an earlier measurement, that too and how many times as fast it is now."""

    def cells(value: float, old: float | None) -> str:
        return f"{1000 * value:.1f}" if old is None else f"{1000 * old:.1f} | {1000 * value:.1f} | {old / value:.1f}"

    kinds = ("CPU", "wall")
    heads = [f"{kind} before | now | ratio" if before else kind for kind in kinds]
    rows = [
        f"| {name} | {' | '.join(cells(*pair) for pair in zip(found, before.get(name, (None, None)), strict=True))} |"
        for name, found in now.items()
    ]
    columns = " | ".join(heads)
    return "\n".join([f"| {num_samples} samples, ms | {columns} |", "|--|" + "--:|" * (columns.count("|") + 1), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, nargs="+", default=[512, 4096], metavar="N", help=f"multiples of {GROUP_SIZE}")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", type=Path, help="write the seconds here")
    parser.add_argument("--before", type=Path, help="what an earlier version saved")
    options = parser.parse_args()
    before = json.loads(options.before.read_text()) if options.before else {}
    now = {str(count): measured(count, options.repeats) for count in options.samples}
    if options.save:
        options.save.write_text(json.dumps(now, indent=1))
    for count, found in now.items():
        print(table_of(count, found, before.get(count, {})) + "\n")
    print(
        f"{os.cpu_count()} CPU cores ({platform.machine()}), load {os.getloadavg()[0]:.1f} at the end, "
        f"Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
