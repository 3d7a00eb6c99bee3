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
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import httpx

from infra import base_model, devices, ports, processes, program_logs
from infra.config import EngineConfig, SamplingConfig
from infra.engines import golden, server
from infra.engines.base import Release, RolloutMeasures, Wanted
from infra.engines.server import ServerState
from infra.engines.sglang_rollout import Rollout, parsed, values
from infra.failures import EngineUnavailable
from infra.files import read_json, verified
from infra.records import AdapterVersion, BaseModelRef
from infra.samples import Sample
from infra.settings import CHECKOUT, NO_SECRETS, settings

log = logging.getLogger(__name__)

READY_PATH = "/model_info"
CONTROL_TIMEOUT_S = 120.0
CONTEXT_SLACK_TOKENS = 8
NUM_CONTINUED_TOKENS = 8
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

    def wake(self) -> bool:
        state = server.adopt(self.identity, READY_PATH)
        if state is not None and state.is_awake and state.is_checked:
            log.info("the engine is awake: pid %d, launch %d", state.process.pid, state.launch)
            return False
        if state is None:
            self._launch()
        elif not state.is_awake:
            server.begin_change(state)
            server.post(state.url, "/resume_memory_occupation", {"tags": RELEASED_TAGS[self.plan.hand_over]}, CONTROL_TIMEOUT_S)
            server.remember(state.but(is_awake=True))
        return True

    def passed(self) -> None:
        server.remember(self._state.but(is_checked=True))

    def load_adapter(self, adapter: AdapterVersion) -> None:
        state, name = self._state, adapter.served_name
        if name is not None and name not in state.adapters:
            folder = verified(adapter.weights).parent if adapter.weights else None
            body: dict[str, object] = {"lora_name": name, "lora_path": str(folder)}
            server.begin_change(state)
            server.post(state.url, "/load_lora_adapter", body, CONTROL_TIMEOUT_S)
            state = server.remember(state.but(adapters=(*state.adapters, name)))
        for old in state.adapters:
            if old != name:
                server.begin_change(state)
                server.post(state.url, "/unload_lora_adapter", {"lora_name": old}, CONTROL_TIMEOUT_S)
        server.remember(state.but(adapters=(name,) if name else ()))

    def served_adapters(self) -> tuple[str, ...]:
        return self._state.adapters

    def sample(
        self, missing: Sequence[Wanted], sampling: SamplingConfig, adapter: AdapterVersion, take: Callable[[Sample], None]
    ) -> RolloutMeasures:
        state = self._state
        before = self._ttft(state.url)
        with program_logs.followed(state.log_path, _log_line):
            hit_frac = asyncio.run(Rollout(self.config, self.model_folder, state.url, sampling, adapter, take).all_of(missing))
        seconds, count = (after - was for after, was in zip(self._ttft(state.url), before, strict=True))
        return RolloutMeasures(ttft_s=seconds / max(count, 1.0), prefix_cache_hit_frac=hit_frac)

    def release_memory(self) -> Release:
        if devices.device() == "cpu":
            return Release(plan=self.plan.hand_over, reason=self.plan.reason, released_bytes=0)
        return self._freed(self.stop if self.plan.hand_over == "restart" else self._release)

    def stop(self) -> None:
        server.stop_recorded()

    def is_running(self) -> bool:
        state = server.recorded()
        return state is not None and processes.find(state.process) is not None

    def last_words(self) -> str:
        state = server.recorded()
        return program_logs.last_lines(state.log_path) if state is not None and state.log_path.exists() else ""

    @property
    def _state(self) -> ServerState:
        state = server.recorded()
        if state is None or processes.find(state.process) is None:
            raise EngineUnavailable("the engine is not running")
        return state

    @cached_property
    def identity(self) -> str:
        """Of a server: equal for equal model and flags."""
        return hashlib.sha256(f"{self.base.sha256} {list(self.flags)}".encode()).hexdigest()[:16]

    @cached_property
    def flags(self) -> tuple[str, ...]:
        """Of the server: all that decides its answers, but for the model and its place."""
        config, positions = self.config, base_model.num_positions(self.model_folder)
        flags = [
            *("--skip-tokenizer-init", "--host", settings().host),
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
        return (*flags, *config.extra_flags)

    def _launch(self) -> None:
        port = ports.free_port(settings().engine_port, settings().host)
        place = ["--model-path", str(self.model_folder), "--port", str(port)]
        server.launch(
            "sglang",
            [str(settings().sglang_python), str(CHECKOUT / "infra/sglang_server.py"), *self.flags, *place],
            # Its environment is its own: nothing of ours may be imported there, and nobody's secrets are needed.
            NO_SECRETS
            | {"PYTHONPATH": settings().sglang_pythonpath, "HF_HUB_OFFLINE": "1", "RATCHET_API_KEY_FILE": str(server.key_path())},
            identity=self.identity,
            ready_path=READY_PATH,
            timeout_s=self.config.start_timeout_s,
            port=port,
        )

    def _release(self) -> None:
        state = self._state
        server.begin_change(state)
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
    def vocab_size(self) -> int:
        return int(read_json(self.model_folder / "config.json")["vocab_size"])

    @cached_property
    def golden_tokens(self) -> list[list[int]]:
        tokenizer = base_model.tokenizer(self.model_folder)
        return [list(tokenizer(text)["input_ids"]) for text in golden.GOLDEN_TEXTS]

    def logprobs(self, tokens: list[int], adapter_name: str | None) -> list[float]:
        # Log-probabilities from the first token on keep SGLang from taking any of the text from its prefix cache.
        answer = self._asked(tokens, adapter_name, max_new_tokens=1, logprob_start_len=0)
        return values(answer, "input_token_logprobs")[1:]

    def continued(self, tokens: list[int], adapter_name: str | None) -> tuple[list[int], list[float]]:
        answer = self._asked(tokens, adapter_name, max_new_tokens=NUM_CONTINUED_TOKENS, logprob_start_len=-1)
        return answer["output_ids"], values(answer, "output_token_logprobs")

    def _asked(
        self, tokens: list[int], adapter_name: str | None, *, max_new_tokens: int, logprob_start_len: int
    ) -> dict[str, Any]:
        """Greedily, at temperature 1."""
        body: dict[str, object] = {
            "input_ids": tokens,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": logprob_start_len,
            "lora_path": adapter_name,
        }
        return parsed(server.post(self._state.url, "/generate", body, CONTROL_TIMEOUT_S))

    def _ttft(self, url: str) -> tuple[float, float]:
        """Sum of seconds and number of requests, since the server started."""
        try:
            patience_s = min(server.PROBE_TIMEOUT_S, self.config.request_timeout_s)
            got = httpx.get(f"{url}/metrics", headers=server.authorization(), timeout=patience_s, follow_redirects=True)
            lines = got.text.splitlines()
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{url}/metrics: {type(error).__name__} {error}") from error

        def total(name: str) -> float:
            return sum(
                float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sglang:time_to_first_token_seconds_{name}")
            )

        return total("sum"), total("count")


def _log_line(line: str) -> None:
    log.info("sglang: %s", TIME_STAMP.sub("", line))
