"""SGLang as a program of its own environment, spoken to over HTTP: token ids in, token ids with log-probabilities out.

Facts of SGLang 0.5.17/0.5.18 that shape this file (each met in practice):
* a request without `lora_path` is served by the base model, silently; so every request names its adapter;
* an unloaded name is silently loaded again from its old path; so a name stands for one content, for ever;
* `n > 1` with an adapter makes every later unload hang, and with a seed gives equal samples; so one request for one sample;
* copies of a prompt in one batch are all prefilled; so each prompt is sent once first, and its samples find it in the cache;
* resume without release kills the server; so engine.json knows what was released.
"""

import re
from functools import cached_property
from typing import Any

from infra import base_model, devices
from infra.engines import server, server_engine
from infra.engines.rollout import Dialect
from infra.engines.server import ServerState
from infra.engines.server_engine import NUM_CONTINUED_TOKENS, ServerEngine, metrics_of, number_in
from infra.engines.sglang_rollout import Generate, parsed, values
from infra.settings import CHECKOUT, settings

RELEASED_TAGS = {"resident": ["kv_cache"], "offload": ["kv_cache", "weights"]}
"""What a plan takes off the GPU; with `restart` the whole server goes."""


class SGLangEngine(ServerEngine):
    kind = "sglang"
    ready_path = "/model_info"
    load_path = "/load_lora_adapter"
    unload_path = "/unload_lora_adapter"
    ttft_metric = "sglang:time_to_first_token_seconds"
    time_stamp = re.compile(r"^\[[-0-9 :]+\] ")

    @cached_property
    def flags(self) -> tuple[str, ...]:
        config = self.config
        flags = [
            *("--skip-tokenizer-init", "--host", settings().host),
            *("--dtype", self.dtype, "--random-seed", "0", "--enable-metrics", "--log-level-http", "warning"),
            *("--context-length", str(self.context_tokens)),
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

    @cached_property
    def dialect(self) -> Dialect:
        return Generate(base_model.stop_token_ids(self.model_folder))

    def logprobs(self, tokens: list[int], adapter_name: str | None) -> list[float]:
        # Log-probabilities from the first token on keep SGLang from taking any of the text from its prefix cache.
        answer = self._asked(tokens, adapter_name, max_new_tokens=1, logprob_start_len=0)
        return values(answer, "input_token_logprobs")[1:]

    def continued(self, tokens: list[int], adapter_name: str | None) -> tuple[list[int], list[float]]:
        answer = self._asked(tokens, adapter_name, max_new_tokens=NUM_CONTINUED_TOKENS, logprob_start_len=-1)
        return answer["output_ids"], values(answer, "output_token_logprobs")

    def version(self) -> str:
        return str(server.get(self._state.url, "/server_info", server_engine.CONTROL_TIMEOUT_S).json().get("version", "unknown"))

    def kv_pool_tokens(self) -> int:
        lines = metrics_of(self._state.url, server_engine.CONTROL_TIMEOUT_S)
        # Older ones say it in their log only.
        lines += self._state.log_path.read_text(errors="replace").splitlines()
        return int(number_in(lines, r"max_total_num_tokens(?:\{.*\})?[ =]([0-9.e+]+)"))

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        place = ["--model-path", str(self.model_folder), "--port", str(port)]
        argv = [str(settings().sglang_python), str(CHECKOUT / "infra/sglang_server.py"), *self.flags, *place]
        return argv, {"PYTHONPATH": settings().sglang_pythonpath}

    def _resume(self, state: ServerState) -> None:
        self._change_memory(state, "/resume_memory_occupation")

    def _release(self, state: ServerState) -> None:
        self._change_memory(state, "/release_memory_occupation")

    def _change_memory(self, state: ServerState, path: str) -> None:
        server.post(state.url, path, {"tags": RELEASED_TAGS[self.plan.hand_over]}, server_engine.CONTROL_TIMEOUT_S)

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
        return parsed(server.post(self._state.url, "/generate", body, server_engine.CONTROL_TIMEOUT_S))
