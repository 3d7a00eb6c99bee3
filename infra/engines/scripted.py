"""The scripted engine: a fake without a model, for tests and fault drills. No demo or claim uses it.

Its samples are a fixed function of the prompt's seed. Some samples of some prompts are correct, so that groups are mixed. It forgets
adapters when it stops, as real engines do, and returns the log-probs that a canary expects. The workspace's file `fault` makes it
misbehave; see FAULTS.
"""

import hashlib
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import sample_seed
from infra.engines.interface import WHOLE, Release, RolloutMeasures, SampleRequest, Share, TurnRequest, Turns
from infra.engines.request_timing import Load
from infra.engines.scoring import ScoreRequest, Scores
from infra.failures import EngineUnavailable
from infra.machine import devices
from infra.megatron.protocol.job import Canary
from infra.models import base_model
from infra.records import AdapterVersion, BaseModelRef
from infra.settings import settings
from infra.store.files import read_json, verified
from infra.store.layout import Workspace
from infra.store.samples import Sample
from infra.telemetry import program_versions

FAULTS = {
    "forgets the adapter": "answers as the base model does",
    "serves an old adapter": "has the new one's name and the old one's content",
    "garbage": "log-probabilities are off by 3 nats",
    "stale prefix cache": "log-probabilities by way of the prefix cache are those of another adapter",
    "NaN": "a log-probability is no number",
    "positive log-probability": "a log-probability is above 0",
    "token out of the vocabulary": "a token that no model knows",
    "no output": "a sample without tokens",
    "lost log-probability": "fewer log-probabilities than tokens",
    "aborts": "a sample that was aborted",
    "too few samples": "the last sample does not come",
    "one sample twice": "the first sample comes again",
    "dies": "is gone after its first sample",
    "dies once": "the same, and then nothing is wrong any more",
}
Serving = Mapping[str, Canary | None]
_SERVING: dict[tuple[Path, int], Serving] = {}
"""By workspace and replica: the adapters of the engine that runs there in this process. Missing: it is not running. Each load makes a new
mapping, because an engine gets requests while it loads."""


class ScriptedEngine:
    dtype: Literal["float32", "bfloat16"] = "float32"
    flags: tuple[str, ...] = ()
    launch = 1
    kv_cache_tokens = 0

    def __init__(self, config: EngineConfig, base: BaseModelRef, replica: int = 0) -> None:
        self.config, self.replica = config, replica
        self.model_folder = base_model.locate(base.id)
        self.versions = program_versions.of_engine(config.kind)
        self.identity = f"scripted-{base.sha256[:16]}"
        self.golden_tokens = [[1, 2, 3, 5, 8], [13, 21, 34]]

    def backends(self) -> dict[str, str]:
        return {}

    def wake(self) -> bool:
        _SERVING.setdefault(self._place, {})
        return True

    def start_figures(self) -> dict[str, float]:
        return {}

    def mark_verified(self, adapter: AdapterVersion) -> None:
        pass

    def is_verified(self, adapter: AdapterVersion) -> bool:
        return False  # the fault may have changed since

    def load_adapter(self, adapter: AdapterVersion) -> None:
        old, serving = self._canary_of_any, {}
        if adapter.served_name:
            # An adapter trained elsewhere has no canary.
            new = Canary.model_validate(read_json(verified(adapter.canary))) if adapter.canary else None
            serving[adapter.served_name] = old if old and fault() == "serves an old adapter" else new
        _SERVING[self._place] = serving

    def served_adapters(self) -> tuple[str, ...]:
        return tuple(self._serving)

    def sample(
        self,
        missing: Sequence[SampleRequest],
        sampling: SamplingConfig,
        adapter: AdapterVersion,
        take: Callable[[Sample], bool],
        *,
        keeps_prefixes: bool = False,
        load: Load | None = None,
        share: Share = WHOLE,
    ) -> RolloutMeasures:
        samples = (self.answer(wanted, sampling, adapter) for wanted in missing if share.begins(wanted.key))
        is_more_needed = True
        for sample in _spoiled(samples, len(missing), fault()):
            is_more_needed = take(sample if is_more_needed else _aborted(sample))
            if _dies():
                self.stop()
                raise EngineUnavailable("the scripted engine died")
            if (not is_more_needed or share.is_over()) and not keeps_prefixes:
                break
        return RolloutMeasures()

    @asynccontextmanager
    async def turns(self, adapter: AdapterVersion) -> AsyncIterator[Turns]:
        yield _ScriptedTurns(self, adapter)

    def release_memory(self) -> Release:
        return Release(plan="keep_weights", reason=devices.plan(self.config).reason, released_bytes=0)

    def memory_in_use_gib(self) -> float:
        return devices.gpu_memory_used_bytes() / 2**30 if devices.device() == "cuda" else 0.0

    def is_running(self) -> bool:
        return self._place in _SERVING

    def is_asleep(self) -> bool:
        return self.is_running()  # it holds nothing that it could release

    def log_tail(self) -> str:
        return ""

    def last_traceback(self) -> str:
        return ""

    def stop(self) -> None:
        _SERVING.pop(self._place, None)

    @staticmethod
    def stop_in(workspace: Path) -> None:
        for place in [place for place in _SERVING if place[0] == workspace]:
            del _SERVING[place]

    @property
    def _place(self) -> tuple[Path, int]:
        return settings().workspace, self.replica

    @property
    def _serving(self) -> Serving:
        try:
            return _SERVING[self._place]
        except KeyError:
            raise EngineUnavailable("the scripted engine is not running") from None

    @property
    def _canary_of_any(self) -> Canary | None:
        return next(iter(self._serving.values()), None)

    @property
    def vocab_size(self) -> int:
        return int(read_json(self.model_folder / "config.json")["vocab_size"])

    def answer(self, wanted: SampleRequest, sampling: SamplingConfig, adapter: AdapterVersion) -> Sample:
        """Make a sample. About one in three is correct."""
        prompt, index, begun = wanted
        rng = random.Random(sample_seed(prompt.seed, index))
        result = prompt.answer.rsplit("#### ", 1)[-1] if rng.random() < 1 / 3 else str(rng.randrange(100))
        tokens = [
            *base_model.tokenizer(self.model_folder)(f"#### {result}")["input_ids"],
            *base_model.stop_token_ids(self.model_folder)[:1],
        ]
        cut = tokens[: sampling.max_output_tokens]
        first = list(begun.output_logprobs) if begun else []
        return Sample(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            prompt_tokens=prompt.prompt_tokens,
            output_tokens=[int(token) for token in cut],
            output_logprobs=[*map(float, first), *(-0.5 - rng.random() for _ in cut[len(first) :])],
            finish_reason="stop" if len(cut) == len(tokens) else "length",
            adapter_version=adapter.version,
            adapter_sha256=adapter.sha256,
            num_older_tokens=len(first),
            older_adapter_sha256=begun.adapter_sha256 if begun else "",
        )

    def logprobs(self, tokens: list[int], adapter_name: str | None) -> list[float]:
        """Return the trainer's log-probs for a canary, else a fixed function of the tokens."""
        off = 3.0 if fault() == "garbage" else 0.0
        canary = self._serving.get(adapter_name or "") or self._canary_of_any
        if canary is not None and canary.tokens == tokens:
            is_adapted = adapter_name and fault() != "forgets the adapter"
            return [value - off for value in (canary.adapter_logprobs if is_adapted else canary.base_logprobs)]
        return [-hashlib.sha256(str(tokens[:n]).encode()).digest()[0] / 64 - off for n in range(1, len(tokens))]

    def score(self, questions: Sequence[ScoreRequest]) -> list[Scores]:
        return [Scores(each.text, self._said_of(each)) for each in questions]

    def _said_of(self, question: ScoreRequest) -> list[float]:
        values = self.logprobs(question.text, question.adapter_name)
        is_stale = question.is_by_cache and fault() == "stale prefix cache"
        return [value - 1 for value in values] if is_stale else values


class _ScriptedTurns:
    """Answers with what stands between `<say>` and `</say>` in the prompt's end, else with a number by the seed."""

    def __init__(self, engine: ScriptedEngine, adapter: AdapterVersion) -> None:
        self.engine, self.adapter = engine, adapter
        self.num_prompt_tokens = self.num_cached_tokens = 0

    async def sample(self, request: TurnRequest) -> Sample:
        assert self.engine.served_adapters() == tuple(name for name in [self.adapter.served_name] if name)
        self.num_prompt_tokens += len(request.tokens)
        folder, rng = self.engine.model_folder, random.Random(request.seed)
        tokenizer = base_model.tokenizer(folder)
        _, say, last = str(tokenizer.decode(request.tokens)).rpartition("<say>")
        text = last.partition("</say>")[0] if say else f"#### {rng.randrange(100)}"
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], *base_model.stop_token_ids(folder)[:1]]
        cut = [int(token) for token in tokens[: request.max_new_tokens]]
        sample = Sample(
            prompt_id=request.prompt_id,
            sample_index=request.sample_index,
            prompt_tokens=request.tokens,
            output_tokens=cut,
            output_logprobs=[-0.5 - rng.random() for _ in cut],
            finish_reason="stop" if len(cut) == len(tokens) else "length",
            adapter_version=self.adapter.version,
            adapter_sha256=self.adapter.sha256,
        )
        if _dies():
            self.engine.stop()
            raise EngineUnavailable("the scripted engine died")
        return next(_spoiled(iter([sample]), 2, fault()))


def fault_path() -> Path:
    return Workspace.here().fault


def fault() -> str:
    """Return the engine's current fault; empty if it has none."""
    try:
        return fault_path().read_text().strip()
    except FileNotFoundError:  # a replica that died once took it away, perhaps just now
        return ""


def _dies() -> bool:
    """Whether this engine dies here; of several replicas that ask at one time, one dies of "dies once"."""
    if fault() != "dies once":
        return fault() == "dies"
    try:
        fault_path().unlink()
    except FileNotFoundError:
        return False
    return True


def _aborted(sample: Sample) -> Sample:
    """Cut a sample off in its middle."""
    num = len(sample.output_tokens) // 2
    tokens, logprobs = list(sample.output_tokens[:num]), list(sample.output_logprobs[:num])
    return replace(sample, output_tokens=tokens, output_logprobs=logprobs, finish_reason="abort")


def _spoiled(samples: Iterator[Sample], num_samples: int, wrong: str) -> Iterator[Sample]:
    for number, sample in enumerate(samples):
        match wrong:
            case "NaN":
                yield replace(sample, output_logprobs=[float("nan"), *sample.output_logprobs[1:]])
            case "positive log-probability":
                yield replace(sample, output_logprobs=[0.5, *sample.output_logprobs[1:]])
            case "token out of the vocabulary":
                yield replace(sample, output_tokens=[10**6, *sample.output_tokens[1:]])
            case "no output":
                yield replace(sample, output_tokens=[], output_logprobs=[])
            case "lost log-probability":
                yield replace(sample, output_logprobs=sample.output_logprobs[:-1])
            case "aborts":
                yield replace(sample, finish_reason="abort")
            case "too few samples" if number == num_samples - 1:
                return
            case "one sample twice" if number == 1:
                yield replace(sample, sample_index=sample.sample_index - 1)
            case _:
                yield sample
