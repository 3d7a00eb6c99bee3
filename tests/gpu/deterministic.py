"""Whether equal inputs give equal bits with engine.deterministic, whatever the engine has done before and however requests come.

    python tests/gpu/deterministic.py OUT.json --model FOLDER [--requests 64 8 1] [--set FIELD=VALUE ...]

One rollout, made ten times, each time with a digest over all tokens and log-probabilities: on a fresh engine, after another rollout,
right after itself, in another order, after a sleep, resumed after the engine was killed in the middle of it, and with other values of
engine.max_running_requests (--requests) in the order of the prompts and in another. Many prompts begin alike, and some are the
beginning of others, so that the prefix cache matters. At last the control: on the warm engine, with the cache as it is and shared by all
prompts. With --small it is a measurement too, of a CPU in float32.

Every rollout of the ten is compared with the first: digest, samples with other tokens, and the largest difference in nats between
log-probabilities of samples with equal tokens. Ends with `done` where all ten digests are equal, else with FAILED and their number.
"""

import hashlib
import json
import random
import time
from collections.abc import Callable
from typing import Any

from bench import Bench, compared, parser

from infra.data.prompts import Prompt
from infra.engines.interface import NO_SINK, RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.server import server_process
from infra.failures import EngineUnavailable
from infra.models import base_model
from infra.processes import children
from infra.records import AdapterVersion
from infra.settings import settings
from infra.store.files import read_json
from infra.store.samples import Sample

CONTROL = "control: warm, cache shared and not emptied"


def main() -> None:
    p = parser(__doc__)
    p.set_defaults(prompts=16, group=4, prompt_tokens=1024, output_tokens=128)  # more prompt tokens than are prefilled at a time
    p.add_argument("--requests", type=int, nargs=3, default=[64, 8, 1], help="engine.max_running_requests (default: %(default)s)")
    options = p.parse_args()
    bench = Bench(options, "deterministic")
    if options.small:
        options.prompts = 8
    rollouts = Rollouts(bench)
    try:
        rollouts.with_most_requests(options.requests[0])
        for number in options.requests[1:]:
            rollouts.with_requests(number)
    finally:
        server_process.stop_recorded()
    others = [name for name, row in rollouts.rows.items() if name != CONTROL and not row["same_bits"]]
    for name, row in rollouts.rows.items():
        print(f"| {name} | {row['digest']} | {row['samples_with_other_tokens']} | {row['max_logprob_difference']:.1e} |")
    print(f"{len(rollouts.rows) - 1 - len(others)} of {len(rollouts.rows) - 1} digests are equal")
    print("done" if not others else f"FAILED: {len(others)} digests differ from the first: {'; '.join(others)}")


class Rollouts:
    """The same rollout again and again, and what came of it."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.prompts, self.adapter = bench, prompts_that_begin_alike(bench), bench.adapter()
        self.sampling = bench.config.sampling.but(ignore_eos=True)
        self.rows: dict[str, dict[str, Any]] = {}
        self.first: list[Sample] = []

    def engine(self, max_running_requests: int) -> Any:
        engine: Any = self.bench.engine(self.adapter, deterministic=True, max_running_requests=max_running_requests)
        made_ready(engine, self.adapter)
        return engine

    def with_most_requests(self, number: int) -> None:
        engine = self.engine(number)
        self.note(f"fresh engine, {number} requests", lambda: self.sampled(engine))
        engine.load_adapter(self.bench.base())
        engine.generate(RolloutRequest(self.bench.prompts(), self.sampling, self.bench.base()))
        engine.load_adapter(self.adapter)
        engine.generate(RolloutRequest(self.prompts[1::2], self.sampling.but(max_output_tokens=8), self.adapter))
        self.note("after other rollouts", lambda: self.sampled(engine))
        self.note("right after itself", lambda: self.sampled(engine))
        self.note("in another order", lambda: self.sampled(engine, seed=1))
        engine.release_memory()
        made_ready(engine, self.adapter)
        self.note("after a sleep", lambda: self.sampled(engine))
        self.note("resumed after a kill", lambda: self.resumed(engine))
        engine.program.config = engine.program.config.but(deterministic=False)  # of the client; the server is the same
        self.note(CONTROL, lambda: self.sampled(engine, seed=2))
        engine.stop()

    def with_requests(self, number: int) -> None:
        engine = self.engine(number)
        self.note(f"fresh engine, {number} requests", lambda: self.sampled(engine))
        self.note(f"{number} requests, in another order", lambda: self.sampled(engine, seed=number))
        engine.stop()

    def note(self, name: str, sample: Callable[[], list[Sample]]) -> None:
        begin = time.monotonic()
        samples = sample()
        self.first = self.first or samples
        self.rows[name] = {"digest": digest_of(samples), "seconds": time.monotonic() - begin, **compared(self.first, samples)}
        self.bench.say(rows=self.rows)

    def sampled(self, engine: Any, sink: SampleSink = NO_SINK, *, seed: int | None = None) -> list[Sample]:
        """seed: of the order in which prompts and samples are sent; None: one after the other."""
        prompts, program = list(self.prompts), engine.program
        if seed is None:
            return by_key(engine.generate(RolloutRequest(prompts, self.sampling, self.adapter), sink)[0])
        shuffler, send = random.Random(seed), program.sample
        shuffler.shuffle(prompts)

        def shuffled(missing: Any, *arguments: Any, **keywords: Any) -> Any:
            return send(shuffler.sample(list(missing), len(missing)), *arguments, **keywords)

        program.sample = shuffled
        try:
            return by_key(engine.generate(RolloutRequest(prompts, self.sampling, self.adapter), sink)[0])
        finally:
            program.sample = send

    def resumed(self, engine: Any) -> list[Sample]:
        """The engine is killed when a third of the samples have come, and another one goes on from the journal."""
        path, count = settings().workspace / "deterministic.journal", len(self.prompts) * self.sampling.group_size
        path.unlink(missing_ok=True)
        scores = 0

        def strike(_: Sample) -> None:
            nonlocal scores
            scores += 1
            if scores == max(1, count // 3):
                kill_the_engine()

        config = engine.program.config
        engine.program.config = config.but(max_running_requests=max(1, count // 8))  # sends few at a time: not all end at once
        try:
            with Journal(path, {}) as journal:
                self.sampled(engine, SampleSink(journal, on_sample=strike))
            raise AssertionError("the engine was killed, and the rollout went on")
        except EngineUnavailable:
            engine.program.config = config
        made_ready(engine, self.adapter)
        with Journal(path, {}) as journal:
            kept = len(journal.samples)
            assert 0 < kept < count, kept
            self.bench.say(kept_after_the_kill=kept)
            return self.sampled(engine, SampleSink(journal))


def made_ready(engine: Any, adapter: AdapterVersion) -> None:
    engine.wake()
    engine.load_adapter(adapter)


def kill_the_engine() -> None:
    state = server_process.recorded()
    process = children.find(state.process) if state else None
    assert process is not None
    for each in [*process.children(recursive=True), process]:
        each.kill()


def prompts_that_begin_alike(bench: Bench) -> list[Prompt]:
    """Of different lengths, in pairs: one is the beginning of the other but for its last token, or all but the last tokens are equal."""
    o, generator = bench.options, random.Random(0)
    vocab = read_json(base_model.locate(o.model) / "config.json")["vocab_size"]
    common = [generator.randrange(10, vocab) for _ in range(o.prompt_tokens // 2)]
    rows: list[list[int]] = []
    for number in range(0, o.prompts, 2):
        own = [generator.randrange(10, vocab) for _ in range(o.prompt_tokens // 2 - number)]
        whole = common + own
        rows += [whole, [*whole[: -1 if number % 4 else -2], generator.randrange(10, vocab)]]
    return [Prompt(n, n, "?", "#### 1", row, seed=100 + n) for n, row in enumerate(rows)]


def by_key(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: (sample.prompt_id, sample.sample_index))


def digest_of(samples: list[Sample]) -> str:
    rows = [
        (each.prompt_id, each.sample_index, list(map(int, each.output_tokens)), [float(x).hex() for x in each.output_logprobs])
        for each in samples
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
