"""SGLang as a program of its own environment, spoken to over HTTP: token ids in, token ids with log-probabilities out.

Facts of SGLang 0.5.17/0.5.18 that shape this file (each met in practice):
* a request without `lora_path` is served by the base model, silently; so every request names its adapter;
* an unloaded name is silently loaded again from its old path; so a name stands for one content, for ever;
* `n > 1` with an adapter makes every later unload hang, and with a seed gives equal samples; so one request for one sample;
* copies of a prompt in one batch are all prefilled; so each prompt is sent once first, and its samples find it in the cache;
* resume without release kills the server; so engine.json knows what was released.
"""

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import httpx

from infra import base_model, devices, processes
from infra.config import EngineConfig, SamplingConfig
from infra.engines import golden, server
from infra.engines.base import EngineUnavailable, Release, RolloutMeasures, WrongAnswer, check_samples
from infra.engines.server import ServerState
from infra.files import read_json, verified
from infra.prompts import Prompt, sample_seed
from infra.records import AdapterVersion, BaseModelRef
from infra.samples import Sample
from infra.settings import CHECKOUT, settings

log = logging.getLogger(__name__)

READY_PATH = "/model_info"
CONTROL_TIMEOUT_S = 120.0
CONTEXT_SLACK_TOKENS = 8
TIME_STAMP = re.compile(r"^\[[-0-9 :]+\] ")
RELEASED_TAGS = {"resident": ["kv_cache"], "offload": ["kv_cache", "weights"]}
"""What a plan takes off the GPU; with `restart` the whole server goes."""
FREED_DEADLINE_S = 60.0


class SGLangEngine:
    """One SGLang server, serving one base model with at most one adapter at a time."""

    def __init__(self, config: EngineConfig, base: BaseModelRef, target_modules: Sequence[str]) -> None:
        self.config = config
        self.base = base
        self.target_modules = target_modules
        self.model_folder = base_model.locate(base.id)
        self.dtype = devices.dtype_of(config.dtype)
        self.plan = devices.plan(config)

    def wake(self) -> None:
        state = server.adopt(self.identity, READY_PATH)
        if state is not None and state.is_awake and state.is_checked:
            log.info("the engine is awake: pid %d, launch %d", state.process.pid, state.launch)
            return
        if state is None:
            self._launch()
        elif not state.is_awake:
            server.post(state.url, "/resume_memory_occupation", {"tags": RELEASED_TAGS[self.plan.hand_over]}, CONTROL_TIMEOUT_S)
            server.remember(state.but(is_awake=True))
        try:
            golden.check_base(self._logprobs, self._golden_tokens, self.identity, self.dtype)
        except WrongAnswer:
            self.stop()  # whoever tries again gets another server, and another check
            raise
        server.remember(self._state.but(is_checked=True))

    def load_adapter(self, adapter: AdapterVersion) -> None:
        state, name = self._state, adapter.served_name
        if name is not None and name not in state.adapters:
            folder = verified(adapter.weights).parent if adapter.weights else None
            body: dict[str, object] = {"lora_name": name, "lora_path": str(folder)}
            server.post(state.url, "/load_lora_adapter", body, CONTROL_TIMEOUT_S)
            state = server.remember(state.but(adapters=(*state.adapters, name)))
        for old in state.adapters:
            if old != name:
                server.post(state.url, "/unload_lora_adapter", {"lora_name": old}, CONTROL_TIMEOUT_S)
        server.remember(state.but(adapters=(name,) if name else ()))
        golden.check_adapter(self._logprobs, adapter, self.dtype)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, adapter: AdapterVersion
    ) -> tuple[list[Sample], RolloutMeasures]:
        state = self._state
        loaded = (adapter.served_name,) if adapter.served_name else ()
        if state.adapters != loaded:
            raise WrongAnswer(f"the engine serves {state.adapters or 'the base model'}, asked for {loaded or 'the base model'}")
        before = self._ttft(state.url)
        with processes.followed(state.log_path, _log_line):
            samples, hit_frac = asyncio.run(_Rollout(self, state.url, sampling, adapter).all_of(prompts))
        check_samples(samples, prompts, sampling.group_size, adapter, self._vocab_size)
        seconds, count = (after - was for after, was in zip(self._ttft(state.url), before, strict=True))
        return samples, RolloutMeasures(ttft_s=seconds / max(count, 1.0), prefix_cache_hit_frac=hit_frac)

    def release_memory(self) -> Release:
        if devices.device() == "cpu":
            return Release(plan=self.plan.hand_over, reason=self.plan.reason, released_bytes=0)
        return self._freed(self.stop if self.plan.hand_over == "restart" else self._release)

    def stop(self) -> None:
        server.stop_recorded()

    @property
    def _state(self) -> ServerState:
        state = server.recorded()
        if state is None or processes.find(state.process) is None:
            raise EngineUnavailable("the engine is not running")
        return state

    @cached_property
    def identity(self) -> str:
        """Of a server: equal for equal model and flags."""
        return hashlib.sha256(f"{self.base.sha256} {self._flags}".encode()).hexdigest()[:16]

    @cached_property
    def _flags(self) -> list[str]:
        config, positions = self.config, base_model.num_positions(self.model_folder)
        flags = [
            *("--model-path", str(self.model_folder), "--skip-tokenizer-init", "--host", server.HOST),
            *("--dtype", self.dtype, "--random-seed", "0", "--enable-metrics", "--log-level-http", "warning"),
            *("--context-length", str(min(config.max_context_tokens + CONTEXT_SLACK_TOKENS, positions))),
            *("--max-running-requests", str(config.max_running_requests), "--tp-size", str(config.tensor_parallel)),
            *("--enable-lora", "--max-lora-rank", str(config.max_lora_rank), "--lora-target-modules", *self.target_modules),
            *("--max-loras-per-batch", "2", "--max-loaded-loras", "4"),
        ]
        if devices.device() == "cpu":
            flags += [*("--device", "cpu", "--attention-backend", "torch_native", "--lora-backend", "torch_native")]
            flags += ["--sleep-on-idle", "--max-total-tokens", str(config.kv_cache_tokens)]
        else:
            flags += ["--mem-fraction-static", str(config.memory_fraction)]
            flags += ["--enable-memory-saver"] if self.plan.hand_over in RELEASED_TAGS else []
            # Without a backup, weights that were released are garbage after the wake, reported as success.
            flags += ["--enable-weights-cpu-backup"] if self.plan.hand_over == "offload" else []
        if config.deterministic:
            flags += ["--enable-deterministic-inference"]
        return [*flags, *config.extra_flags]

    def _launch(self) -> None:
        on_cpu = devices.device() == "cpu"
        program = [str(CHECKOUT / "infra/sglang_cpu.py")] if on_cpu else ["-m", "sglang.launch_server"]
        port = processes.free_port(settings().engine_port)
        server.launch(
            "sglang",
            [str(settings().sglang_python), *program, *self._flags, "--port", str(port)],
            # Its environment is its own: nothing of ours may be imported there.
            {"PYTHONPATH": settings().sglang_pythonpath, "HF_HUB_OFFLINE": "1"},
            identity=self.identity,
            ready_path=READY_PATH,
            timeout_s=self.config.start_timeout_s,
            port=port,
        )

    def _release(self) -> None:
        state = self._state
        server.post(state.url, "/release_memory_occupation", {"tags": RELEASED_TAGS[self.plan.hand_over]}, CONTROL_TIMEOUT_S)
        server.remember(state.but(is_awake=False, is_checked=False))

    def _freed(self, release: Any) -> Release:
        before = devices.gpu_memory_used_bytes()
        release()
        deadline = time.monotonic() + FREED_DEADLINE_S
        while (after := devices.gpu_memory_used_bytes()) >= before:
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"{FREED_DEADLINE_S:g} s after the release the driver still counts {after} bytes of GPU memory in use"
                )
            time.sleep(0.1)
        return Release(plan=self.plan.hand_over, reason=self.plan.reason, released_bytes=before - after)

    @cached_property
    def _vocab_size(self) -> int:
        return int(read_json(self.model_folder / "config.json")["vocab_size"])

    @cached_property
    def _golden_tokens(self) -> list[list[int]]:
        tokenizer = base_model.tokenizer(self.model_folder)
        return [list(tokenizer(text)["input_ids"]) for text in golden.GOLDEN_TEXTS]

    def _logprobs(self, tokens: list[int], adapter_name: str | None) -> list[float]:
        """Of tokens[1:], at temperature 1."""
        body: dict[str, object] = {
            "input_ids": tokens,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": adapter_name,
        }
        answer = server.post(self._state.url, "/generate", body, CONTROL_TIMEOUT_S).json()
        return [value for value, *_ in answer["meta_info"]["input_token_logprobs"][1:]]

    def _ttft(self, url: str) -> tuple[float, float]:
        """Sum of seconds and number of requests, since the server started."""
        lines = httpx.get(f"{url}/metrics", timeout=CONTROL_TIMEOUT_S, follow_redirects=True).text.splitlines()

        def total(name: str) -> float:
            return sum(
                float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sglang:time_to_first_token_seconds_{name}")
            )

        return total("sum"), total("count")


def _log_line(line: str) -> None:
    log.info("sglang: %s", TIME_STAMP.sub("", line))


class _Rollout:
    """All requests of one rollout: first each prompt alone, then each of its samples."""

    def __init__(self, engine: SGLangEngine, url: str, sampling: SamplingConfig, adapter: AdapterVersion) -> None:
        self.url, self.sampling, self.adapter = url, sampling, adapter
        self.timeout_s = engine.config.request_timeout_s
        self.stop_token_ids = base_model.stop_token_ids(engine.model_folder)
        self.slots = asyncio.Semaphore(2 * engine.config.max_running_requests)
        self.num_done = 0

    async def all_of(self, prompts: Sequence[Prompt]) -> tuple[list[Sample], float]:
        """The samples by prompt and index, and the share of their prompt tokens that were in the prefix cache."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=self.timeout_s, limits=limits) as client:
            await asyncio.gather(*(self._ask(client, prompt, seed=0, max_new_tokens=1) for prompt in prompts))
            wanted = [(prompt, index) for prompt in prompts for index in range(self.sampling.group_size)]
            answers = await asyncio.gather(*(self._sample(client, prompt, index, len(wanted)) for prompt, index in wanted))
        samples = [sample for sample, _ in answers]
        cached = sum(num_cached for _, num_cached in answers)
        return samples, cached / sum(len(sample.prompt_tokens) for sample in samples)

    async def _sample(self, client: httpx.AsyncClient, prompt: Prompt, index: int, num_wanted: int) -> tuple[Sample, int]:
        seed = sample_seed(prompt.seed, index)
        answer = await self._ask(client, prompt, seed=seed, max_new_tokens=self.sampling.max_output_tokens)
        self.num_done += 1
        if self.num_done % max(num_wanted // 10, 1) == 0:
            log.info("rollout: %d of %d samples", self.num_done, num_wanted)
        about = answer["meta_info"]
        reason = (about["finish_reason"] or {}).get("type", "error")
        sample = Sample(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            prompt_tokens=prompt.prompt_tokens,
            output_tokens=answer["output_ids"],
            output_logprobs=[value for value, *_ in about["output_token_logprobs"]],
            finish_reason=reason,
            adapter_version=self.adapter.version,
            adapter_sha256=self.adapter.sha256,
        )
        return sample, int(about["cached_tokens"])

    async def _ask(self, client: httpx.AsyncClient, prompt: Prompt, *, seed: int, max_new_tokens: int) -> dict[str, Any]:
        body = {
            "input_ids": prompt.prompt_tokens,
            "sampling_params": {
                "temperature": self.sampling.temperature,
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": self.stop_token_ids,
                "sampling_seed": seed,
            },
            "return_logprob": True,
            "lora_path": self.adapter.served_name,
        }
        async with self.slots:
            try:
                response = await client.post(f"{self.url}/generate", json=body)
            except httpx.HTTPError as error:
                raise EngineUnavailable(f"{self.url}/generate: {type(error).__name__} {error}") from error
        answer: dict[str, Any] = server.answered(response).json()
        return answer
