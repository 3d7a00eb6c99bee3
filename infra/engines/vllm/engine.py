"""vLLM as a program in its own environment, called over HTTP: token ids in, token ids with log-probs out.

Facts of vLLM 0.26.0, the newest for torch 2.11, that shape this file (from its source; paths under vllm/):
* sleep, wake and RPC exist only with VLLM_SERVER_DEV_MODE=1, LoRA at run time only with VLLM_ALLOW_RUNTIME_LORA_UPDATING
  (entrypoints/serve/dev, entrypoints/serve/lora/api_router.py);
* a sleep while asleep, and a wake with a tag that is not asleep, return 200 and only write a log line
(v1/executor/abstract.py); so each of them is followed by a call of /is_sleeping;
* level 1 keeps weights, including the LoRA slots, on the host and discards the KV cache; level 2 discards both
(device_allocator/cumem.py); after a level 2 wake without reload_weights it answers from uninitialized memory, with
status 200 (vllm-project/vllm#29341, #54235);
* reload_weights does not find the base layers under LoRA wrappers (#39934, fixed in 0.28.0, which needs torch 2.13); so plan `reload`
is refused here with older versions;
* by default, log-probs are computed before temperature (`--logprobs-mode raw_logprobs`); the trainer needs the distribution
that was sampled from;
* the model's generation_config.json would change sampling (top-k, top-p, penalties); so `--generation-config vllm`;
* a request for prompt log-probs does not read the prefix cache (sampling_params.py, skip_reading_prefix_cache);
* the prefix cache identifies an adapter by its name (v1/core/kv_cache_utils.py, #42125); so a name always stands for the same content;
* an unloaded adapter stays in the workers until others need its slot (#54839); a request that names it gets 404;
* the size of the KV cache in tokens is kv_cache_size_tokens, a label of its metric cache_config_info: the number of full-length requests
that fit, times that length. Blocks times block size is too large if layers differ in kind (config/cache.py, v1/core/kv_cache_utils.py);
* dense models run on model runner V2 unless VLLM_USE_V2_MODEL_RUNNER is set otherwise; most mixtures of experts run on V1
(config/vllm.py, use_v2_model_runner).
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any

from infra.concurrency.background import run_concurrently
from infra.config import ColocationPlan, EngineConfig
from infra.engines.scoring import ScoreRequest, Scores
from infra.engines.server import server_engine, server_process
from infra.engines.server.installed import installed
from infra.engines.server.server_engine import ServerEngine
from infra.engines.server.server_process import ServerState, metrics_of, number_in
from infra.engines.server.transport import ServerApi
from infra.engines.vllm.completions_api import BASE_MODEL, PATH, Completions, as_wrong_answer, numbers
from infra.failures import EngineRefused, EngineUnavailable, WrongAnswer
from infra.models import base_model
from infra.processes import logs
from infra.records import BaseModelRef
from infra.settings import CHECKOUT, Settings, settings

NUM_CONTINUED_TOKENS = 4
SLEEP_LEVEL: dict[str, int] = {"keep_weights": 1, "offload": 1, "reload": 2}
"""Sleep level of a plan. `restart` ends the whole server; `separate_gpus` releases nothing. vLLM cannot release the KV cache alone."""
PLANS = (*SLEEP_LEVEL, "restart", "separate_gpus")
RELOADS_UNDER_LORA = (0, 28)
BACKENDS = {
    "attention_backend": r"Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+) (?:attention )?backend",
    "lora_backend": r"Using (PunicaWrapper\w+)",
}
"""Patterns of its log lines at the start that report backends."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that `--max-lora-rank` accepts (config/lora.py, MaxLoRARanks)."""


class VLLMEngine(ServerEngine):
    kind = "vllm"
    ready_path = "/health"
    load_path = "/v1/load_lora_adapter"
    unload_path = "/v1/unload_lora_adapter"
    time_stamp = re.compile(r"^(\([^)]*\) )?[A-Z]+ [-0-9]+ [0-9:]+ ")
    frees_as = MappingProxyType({"keep_weights": "offload"})

    def __init__(
        self,
        config: EngineConfig,
        base: BaseModelRef,
        target_modules: Sequence[str],
        *,
        machine: Settings | None = None,
        replica: int = 0,
    ) -> None:
        super().__init__(config, base, target_modules, machine=machine, replica=replica)
        check_config(config, self.plan.colocation, self.machine)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        config = self.config
        arguments = [
            *("--served-model-name", BASE_MODEL, *self.place.address_of_all),
            *("--dtype", self.dtype, "--seed", "0", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
            *("--max-model-len", str(self.context_tokens), "--max-num-seqs", str(config.running_requests)),
            *("--tensor-parallel-size", str(config.tensor_parallel), "--gpu-memory-utilization", str(config.memory_fraction)),
            *("--enable-lora", "--max-lora-rank", str(lora_rank_that_fits(config.max_lora_rank))),
            *("--max-loras", "2", "--max-cpu-loras", "4", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
            "--disable-uvicorn-access-log",
        ]
        arguments += ["--enable-sleep-mode"] if self.plan.colocation in SLEEP_LEVEL else []
        return (*arguments, *config.extra_flags)

    @cached_property
    def switches(self) -> dict[str, str]:
        """Return the switches in its environment."""
        switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
        switches["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # unused for requests with seeds; the default needs flashinfer
        return switches | ({"VLLM_BATCH_INVARIANT": "1"} if self.config.deterministic else {})

    @cached_property
    def flags(self) -> tuple[str, ...]:
        return (*self.arguments, *(f"{name}={value}" for name, value in self.switches.items()))

    @cached_property
    def api(self) -> ServerApi:
        return Completions(base_model.stop_token_ids(self.model_folder))

    def score(self, questions: Sequence[ScoreRequest]) -> list[Scores]:
        with run_concurrently(len(questions)) as begin:  # a request can use only one adapter
            answers = [begin(self._by_cache if each.is_by_cache else self._computed, each) for each in questions]
        return [answer.result() for answer in answers]

    def _computed(self, question: ScoreRequest) -> Scores:
        text = question.text
        answer = self._asked(text, question.adapter_name, {"max_tokens": 1, "prompt_logprobs": 1})
        with _of_the_form_asked_for(answer):
            pairs = zip(text[1:], answer["prompt_logprobs"][1:], strict=True)
            logprobs = [entry[str(token)]["logprob"] for token, entry in pairs]
        return Scores(text, numbers(logprobs))

    def _by_cache(self, question: ScoreRequest) -> Scores:
        """Score through the prefix cache. vLLM does not use it for requests with prompt log-probs."""
        how: dict[str, object] = {"max_tokens": NUM_CONTINUED_TOKENS, "logprobs": 0, "return_token_ids": True}
        answer = self._asked(question.text, question.adapter_name, how)
        with _of_the_form_asked_for(answer):
            going_on, logprobs = answer["token_ids"], answer["logprobs"]["token_logprobs"]
        return Scores([*question.text, *going_on], numbers(logprobs))

    def version(self) -> str:
        return str(server_process.get(self._state.url, "/version", server_engine.CONTROL_TIMEOUT_S).json()["version"])

    def _backends(self, state: ServerState) -> dict[str, str]:
        """Return its backends. The version comes over HTTP, the rest only from its log (platforms/cuda.py,
        lora/punica_wrapper/punica_selector.py)."""
        told = logs.beginning(state.log_path)
        found = {name: match[1] for name, pattern in BACKENDS.items() if (match := re.search(pattern, told))}
        return {"version": self.version(), **found}

    def kv_pool_tokens(self) -> int:
        lines = metrics_of(self._state.url, server_engine.CONTROL_TIMEOUT_S)
        info = [line for line in lines if line.startswith("vllm:cache_config_info")]
        return int(number_in(info, r'[{,]kv_cache_size_tokens="([0-9]+)"'))

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        program = [
            str(self.machine.vllm_python),
            str(CHECKOUT / "infra/engines/launchers/vllm_server.py"),
            "serve",
            str(self.model_folder),
        ]
        own = {"PYTHONPATH": self.machine.vllm_pythonpath, "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(server_process.KEEP_ALIVE_S)}
        return [*program, *self.arguments, "--port", str(port), *self.place.address], self.switches | own

    def _resume(self, state: ServerState, plan: ColocationPlan) -> ServerState:
        self._tell(state, "/wake_up?tags=weights")
        if SLEEP_LEVEL[plan] == 2:
            self._tell(state, "/collective_rpc", {"method": "reload_weights"}, timeout_s=self.config.start_timeout_s)
        self._tell(state, "/wake_up?tags=kv_cache")
        self._expect_sleeping(state, False)
        return state

    def _empty_cache(self, state: ServerState) -> None:
        """Nothing to do: a prompt only finds cached blocks with its salt (Sender.token), and each rollout has its own salts."""

    def _release(self, state: ServerState, plan: ColocationPlan) -> None:
        self._tell(state, f"/sleep?level={SLEEP_LEVEL[plan]}&mode=wait")
        self._expect_sleeping(state, True)

    def _tell(self, state: ServerState, path: str, body: dict[str, object] | None = None, timeout_s: float | None = None) -> None:
        server_process.post(state.url, path, body or {}, timeout_s or server_engine.CONTROL_TIMEOUT_S)

    def _expect_sleeping(self, state: ServerState, expected: bool) -> None:
        found = server_process.get(state.url, "/is_sleeping", server_engine.CONTROL_TIMEOUT_S).json()["is_sleeping"]
        if found is not expected:
            told = "to sleep" if expected else "to wake up"
            raise EngineUnavailable(f"vLLM was told {told}, answered that it did, and says is_sleeping={found}")

    def _asked(self, tokens: list[int], adapter_name: str | None, what: dict[str, object]) -> dict[str, Any]:
        """Request one greedy completion, at temperature 1, and return its choice."""
        body = {"model": adapter_name or BASE_MODEL, "prompt": tokens, "temperature": 0, "ignore_eos": True} | what
        try:
            response = server_process.post(self._state.url, PATH, body, server_engine.CONTROL_TIMEOUT_S)
        except EngineRefused as error:
            raise as_wrong_answer(error) from error
        with _of_the_form_asked_for(response.text):
            (choice,) = response.json()["choices"]
        return dict(choice)


@contextmanager
def _of_the_form_asked_for(answer: object) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise WrongAnswer("the engine's answer has not the form that was asked for", {"answer": answer}) from error


def check_config(config: EngineConfig, plan: str, machine: Settings | None = None) -> None:
    """Refuse a configuration that vLLM cannot run. Starts nothing.

    Raises:
        ValueError: names the field, and values that would work.
    """
    if config.lora_mode != "adapter":
        raise ValueError(f"engine.lora_mode {config.lora_mode!r} with vLLM is not supported: use 'adapter'")
    machine = machine or settings()
    found = installed(machine.vllm_python, machine.vllm_pythonpath, "vllm")
    check_plan(plan, found.version if found else None)
    lora_rank_that_fits(config.max_lora_rank)


def check_plan(plan: str, version: str | None) -> None:
    """Raises ValueError for a plan that this version of vLLM cannot carry out. version: None if unknown."""
    if plan not in PLANS:
        raise ValueError(f"engine.colocation {plan!r} is unknown to vLLM: choose from {', '.join(PLANS)}")
    if plan == "reload" and version is not None and _numbers(version) < RELOADS_UNDER_LORA:
        raise ValueError(
            f"engine.colocation 'reload' with vLLM {version}: it cannot read its weights again where LoRA is on "
            "(vllm-project/vllm#39934, mended in 0.28.0): use 'offload' or 'restart'"
        )


def lora_rank_that_fits(rank: int) -> int:
    """Return the smallest accepted rank that fits. Raises ValueError if there is none."""
    if rank > LORA_RANKS[-1]:
        raise ValueError(f"engine.max_lora_rank {rank} is more than vLLM's largest, {LORA_RANKS[-1]}")
    return next(each for each in LORA_RANKS if each >= rank)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])
