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
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import httpx

from infra import base_model, devices, driver, hand_over, ports, processes, program_logs
from infra.config import EngineConfig, SamplingConfig
from infra.engines import confirmation, golden, merged, server, sglang_memory
from infra.engines.base import Release, RolloutMeasures, Wanted
from infra.engines.server import ServerState
from infra.engines.sglang_memory import BASE_VERSION, CONTROL_TIMEOUT_S, RELEASED_TAGS
from infra.engines.sglang_rollout import Rollout, check_version, parsed, values
from infra.failures import EngineUnavailable
from infra.files import read_json, verified
from infra.records import AdapterVersion, BaseModelRef
from infra.samples import Sample
from infra.settings import CHECKOUT, NO_SECRETS, settings

log = logging.getLogger(__name__)

READY_PATH = "/model_info"
CONTEXT_SLACK_TOKENS = 8
NUM_CONTINUED_TOKENS = 8
TIME_STAMP = re.compile(r"^\[[-0-9 :]+\] ")
UNEQUAL_MEMORY = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false", "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true"}
"""Environment of 0.5.18 and, second, of 0.5.17."""


class SGLangEngine:
    """One SGLang server, serving one base model with at most one adapter at a time."""

    def __init__(self, config: EngineConfig, base: BaseModelRef, target_modules: Sequence[str]) -> None:
        self.config = config
        self.base = base
        self.target_modules = target_modules
        self.model_folder = base_model.locate(base.id)
        self.dtype = devices.dtype_of(config.dtype)
        self.plan = devices.plan(config)
        self.is_merged = config.serve == "merged"

    def wake(self) -> bool:
        state = server.adopt(self.identity, READY_PATH)
        if state is not None and state.is_awake and state.is_checked:
            log.info("the engine is awake: pid %d, launch %d", state.process.pid, state.launch)
            return False
        if state is None:
            state = self._launch()
            server.remember(state.but(kv_cache_tokens=sglang_memory.kv_cache_tokens(state.url)))
        elif not state.is_awake:
            state = sglang_memory.resume(state, self.plan.hand_over, self.model_folder)
            is_base_again = self.is_merged and self.plan.hand_over == "reload"
            server.remember(state.but(adapters=()) if is_base_again else state)
        return True

    def passed(self) -> None:
        server.remember(self._state.but(is_checked=True))

    def load_adapter(self, adapter: AdapterVersion) -> None:
        if self.is_merged:
            self._merge(adapter)
            return
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
        self, missing: Sequence[Wanted], sampling: SamplingConfig, adapter: AdapterVersion, take: Callable[[Sample], bool]
    ) -> RolloutMeasures:
        state = self._state
        before = self._ttft(state.url)
        with program_logs.followed(state.log_path, _log_line):
            hit_frac = asyncio.run(Rollout(self.config, self.model_folder, state.url, sampling, adapter, take).all_of(missing))
        seconds, count = (after - was for after, was in zip(self._ttft(state.url), before, strict=True))
        return RolloutMeasures(ttft_s=seconds / max(count, 1.0), prefix_cache_hit_frac=hit_frac)

    def _merge(self, adapter: AdapterVersion) -> None:
        state, name = self._state, adapter.served_name
        if adapter.target_modules != tuple(self.target_modules):  # what an earlier one changed would stay changed
            raise ValueError(f"adapter {name} is on {adapter.target_modules}, this engine merges {tuple(self.target_modules)}")
        if state.adapters != ((name,) if name else ()):
            folder = merged.folder_of(adapter, self.model_folder) if name else self.model_folder
            server.begin_change(state)
            sglang_memory.update_weights(state.url, folder, name or BASE_VERSION)
            server.remember(state.but(adapters=(name,) if name else ()))
        merged.keep_only(name)

    def release_memory(self) -> Release:
        plan, reason = self.plan
        if plan == "split" or (plan == "resident" and devices.device() == "cpu") or not (state := self._state).is_awake:
            return Release(plan=plan, reason=reason, released_bytes=0)
        expected = hand_over.residue_bytes(plan, self.config, hand_over.model_in(self.model_folder))
        if plan == "restart":
            before = confirmation.held_by(state.process.program)
            self.stop()
            gained = confirmation.wait_until_released(
                state.process.program, before, plan=plan, expected_bytes=expected, timeout_s=hand_over.DEADLINE_S[plan]
            )
        else:
            gained = sglang_memory.release(state, plan, expected)
        return Release(plan=plan, reason=reason, released_bytes=sum(gained.values()))

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
        merges = list(self.target_modules) if self.is_merged else []
        return hashlib.sha256(f"{self.base.sha256} {[*self.flags, *merges]}".encode()).hexdigest()[:16]

    @cached_property
    def flags(self) -> tuple[str, ...]:
        """Of the server: all that decides its answers, but for the model and its place."""
        config, positions = self.config, base_model.num_positions(self.model_folder)
        flags = [
            *("--skip-tokenizer-init", "--host", settings().host),
            *("--dtype", self.dtype, "--random-seed", "0", "--enable-metrics", "--log-level-http", "warning"),
            *("--context-length", str(min(config.max_context_tokens + CONTEXT_SLACK_TOKENS, positions))),
            *("--max-running-requests", str(config.max_running_requests), "--tp-size", str(config.tensor_parallel)),
        ]
        if not self.is_merged:
            flags += [
                "--enable-lora",
                "--max-lora-rank",
                str(config.max_lora_rank),
                "--lora-target-modules",
                *self.target_modules,
            ]
            flags += ["--max-loras-per-batch", str(hand_over.NUM_LORA_SLOTS), "--max-loaded-loras", "4"]
        if devices.device() == "cpu":
            flags += ["--device", "cpu", "--attention-backend", "torch_native"]
            flags += [] if self.is_merged else ["--lora-backend", "torch_native"]
            flags += ["--sleep-on-idle", "--max-total-tokens", str(config.kv_cache_tokens)]
        else:
            flags += ["--mem-fraction-static", str(config.memory_fraction)]
            flags += ["--enable-memory-saver"] if self.plan.hand_over in RELEASED_TAGS else []
            # Without a backup, weights that were released are garbage after the wake, reported as success.
            flags += ["--enable-weights-cpu-backup"] if self.plan.hand_over == "offload" else []
        if config.deterministic:
            flags += ["--enable-deterministic-inference"]
        return (*flags, *config.extra_flags)

    def _launch(self) -> ServerState:
        self._check_room()
        port = ports.free_port(settings().engine_port, settings().host)
        place = ["--model-path", str(self.model_folder), "--port", str(port)]
        gpus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, settings().engine_gpus))}
        return server.launch(
            "sglang",
            [str(settings().sglang_python), str(CHECKOUT / "infra/sglang_server.py"), *self.flags, *place],
            # Its environment is its own: nothing of ours may be imported there, and nobody's secrets are needed.
            NO_SECRETS
            | {"PYTHONPATH": settings().sglang_pythonpath, "HF_HUB_OFFLINE": "1", "RATCHET_API_KEY_FILE": str(server.key_path())}
            | (gpus if settings().engine_gpus else {})
            | (UNEQUAL_MEMORY if self.config.allow_unequal_memory else {}),
            identity=self.identity,
            ready_path=READY_PATH,
            timeout_s=self.config.start_timeout_s,
            port=port,
        )

    def _check_room(self) -> None:
        """Before a launch: the trainer is off the GPUs, and their room is equal. Both by the driver's word."""
        gpus = devices.engine_gpus(self.config.tensor_parallel)
        total = {gpu.number: gpu.total_bytes for gpu in driver.read().gpus if gpu.number in gpus}
        needed = {index: int(self.config.memory_fraction * size) for index, size in total.items()}
        confirmation.wait_for_room(needed, what="the engine's launch", timeout_s=sglang_memory.ROOM_DEADLINE_S)
        if unequal := confirmation.check_equal_memory(driver.read(), gpus, is_allowed=self.config.allow_unequal_memory):
            log.warning("%s; allowed by engine.allow_unequal_memory", unequal)

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
        }
        state = self._state
        if not self.is_merged:
            return parsed(server.post(state.url, "/generate", body | {"lora_path": adapter_name}, CONTROL_TIMEOUT_S))
        answer = parsed(server.post(state.url, "/generate", body, CONTROL_TIMEOUT_S))
        check_version(answer, adapter_name or next(iter(state.adapters), BASE_VERSION))
        return answer

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
