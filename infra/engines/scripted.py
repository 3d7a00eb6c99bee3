"""The shipped fake: an engine without a model, for tests and fault drills. Never what a demo or a claim rests on.

Its samples are a fixed function of the prompt's seed: some prompts are answered rightly by some samples, so that groups are mixed.
It keeps the border's promises as the real ones do: it forgets adapters when it stops, and says what a canary must hear.
"""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from infra import base_model, devices
from infra.config import EngineConfig, SamplingConfig
from infra.engines import golden
from infra.engines.base import EngineUnavailable, Release, RolloutMeasures, WrongAnswer, check_samples
from infra.files import read_json, verified
from infra.megatron.job import Canary
from infra.prompts import Prompt, sample_seed
from infra.records import AdapterVersion, BaseModelRef
from infra.samples import Sample
from infra.settings import settings

_SERVING: dict[Path, dict[str, Canary]] = {}
"""By workspace: the adapters of the engine that runs there in this process. Missing: it is not running."""


class ScriptedEngine:
    def __init__(self, config: EngineConfig, base: BaseModelRef) -> None:
        self.config = config
        self.model_folder = base_model.locate(base.id)
        self.identity = f"scripted-{base.sha256[:16]}"

    def wake(self) -> None:
        _SERVING.setdefault(settings().workspace, {})
        golden.check_base(self.logprobs, [[1, 2, 3, 5, 8], [13, 21, 34]], self.identity, "float32")

    def load_adapter(self, adapter: AdapterVersion) -> None:
        serving = self._serving
        serving.clear()
        if adapter.served_name and adapter.canary:
            serving[adapter.served_name] = Canary.model_validate(read_json(verified(adapter.canary)))
        golden.check_adapter(self.logprobs, adapter, "float32")

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, adapter: AdapterVersion
    ) -> tuple[list[Sample], RolloutMeasures]:
        if list(self._serving) != [name for name in [adapter.served_name] if name]:
            raise WrongAnswer(f"the engine serves {list(self._serving)}, asked for {adapter.served_name}")
        samples = [self.answer(prompt, index, sampling, adapter) for prompt in prompts for index in range(sampling.group_size)]
        check_samples(samples, prompts, sampling.group_size, adapter, self.vocab_size)
        return samples, RolloutMeasures(ttft_s=0.0, prefix_cache_hit_frac=0.0)

    def release_memory(self) -> Release:
        return Release(plan="resident", reason=devices.plan(self.config).reason, released_bytes=0)

    def stop(self) -> None:
        self.stop_in(settings().workspace)

    @staticmethod
    def stop_in(workspace: Path) -> None:
        _SERVING.pop(workspace, None)

    @property
    def _serving(self) -> dict[str, Canary]:
        if settings().workspace not in _SERVING:
            raise EngineUnavailable("the scripted engine is not running")
        return _SERVING[settings().workspace]

    @property
    def vocab_size(self) -> int:
        return int(read_json(self.model_folder / "config.json")["vocab_size"])

    def answer(self, prompt: Prompt, index: int, sampling: SamplingConfig, adapter: AdapterVersion) -> Sample:
        """Right in about one sample of three."""
        rng = random.Random(sample_seed(prompt.seed, index))
        result = prompt.answer.rsplit("#### ", 1)[-1] if rng.random() < 1 / 3 else str(rng.randrange(100))
        tokens = [
            *base_model.tokenizer(self.model_folder)(f"#### {result}")["input_ids"],
            *base_model.stop_token_ids(self.model_folder)[:1],
        ]
        cut = tokens[: sampling.max_output_tokens]
        return Sample(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            prompt_tokens=prompt.prompt_tokens,
            output_tokens=[int(token) for token in cut],
            output_logprobs=[-0.5 - rng.random() for _ in cut],
            finish_reason="stop" if len(cut) == len(tokens) else "length",
            adapter_version=adapter.version,
            adapter_sha256=adapter.sha256,
        )

    def logprobs(self, tokens: list[int], adapter_name: str | None) -> list[float]:
        """What the trainer said where a canary asks, else a fixed function of the tokens."""
        canary = self._serving.get(adapter_name or "") or next(iter(self._serving.values()), None)
        if canary is not None and canary.tokens == tokens:
            return canary.adapter_logprobs if adapter_name else canary.base_logprobs
        return [-hashlib.sha256(str(tokens[:n]).encode()).digest()[0] / 64 for n in range(1, len(tokens))]
