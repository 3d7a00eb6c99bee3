"""SGLang as a program in its own environment, called over HTTP: token ids in, token ids with log-probs out.

Facts of SGLang 0.5.17/0.5.18 that shape this file (each met in practice):
* a request without `lora_path` is silently served by the base model; so every request names its adapter;
* an unloaded name is silently loaded again from its old path; so a name always stands for the same content;
* `n > 1` with an adapter makes every later unload hang, and with a seed gives equal samples; so each sample is one request;
* copies of a prompt in one batch are all prefilled; so each prompt is sent once first, and its samples find it in the cache;
* a greedy request in the same batch changes the samples of all seeds; the server sends one itself to warm up, when it already
answers; so it is ready when /health reports the end of the warm-up, and /health may not send greedy requests either;
* resume without release kills the server; so engine.json records what was released;
* next to the log-probs of a text, the vocabulary's highest token id is returned as 0 (`logprob_result_processor.py`); the text is the
same.
"""

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from infra.colocation import engine_memory
from infra.config import ColocationPlan, EngineConfig
from infra.config.tools import engine_flags
from infra.engines.scoring import ScoreRequest, Scores
from infra.engines.server import merged_weights, server_engine, server_process
from infra.engines.server.parts import Launch
from infra.engines.server.server_engine import ServerEngine
from infra.engines.server.server_process import ServerState
from infra.engines.server.transport import ServerApi
from infra.engines.sglang import memory_api, several_nodes
from infra.engines.sglang.generate_api import Generate, all_parsed, check_tokens, check_version, values
from infra.engines.sglang.memory_api import BASE_VERSION, RELEASED_TAGS
from infra.engines.sglang.routed_experts import FLAG as ROUTES_FLAG
from infra.failures import WrongAnswer
from infra.machine import devices, nvml
from infra.models import base_model
from infra.models.architecture import read_architecture
from infra.records import AdapterVersion, BaseModelRef
from infra.settings import CHECKOUT, Settings
from infra.store.files import PRIVATE, fresh_folder, verified_for_engine
from infra.store.layout import Workspace
from infra.store.routes import RouteShape

log = logging.getLogger(__name__)

# Perf: rollout 13.8k -> 19.0k tokens/s (7B, H200, docs/results/h200-hand-over.md).
LORA_BACKEND = "triton"
"""LoRA backend on a GPU: 19.0k tokens/s with an adapter; the default, csgmv, gives 13.8k (7B shape, docs/results/h200-hand-over.md).
csgmv is made for many adapters in one batch; here all requests use the same. engine.extra_flags can name another one."""
MAX_BY_CACHE = 16
"""Tokens at the end of a text that are scored through the prefix cache; half of a short text."""
BACKENDS = (
    "version",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "lora_backend",
    "sampling_backend",
)
"""Fields of /server_info that name backends. If no flag set one, it is SGLang's choice."""
GRAPH_SIZES = ("cuda_graph_bs_decode", "cuda_graph_max_bs_decode", "cuda_graph_config")
"""Destinations of flags that choose the batch sizes of CUDA graphs."""
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply 8-bit floats."""
MEETING = "engine-meeting"
"""Folder of the workspace, private to its user, with the file through which the processes of one engine find each other."""
UNEQUAL_MEMORY = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false", "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true"}
"""Environment variables: the first for 0.5.18, the second for 0.5.17."""
KEPT_COPY = {"TMS_RETAIN_CPU_BACKUP": "1"}
"""Environment variable of torch_memory_saver 0.0.10: the copy of the weights on the host stays when they return to the GPU. Each release
still copies them from the GPU (infra/colocation/host_memory.py)."""

SHARED_EXPERTS = "RATCHET_SHARED_EXPERTS"
"""Environment variable: the folder into which the server writes where its experts are (infra/engines/launchers/sglang_shared_experts.py)."""


class SGLangEngine(ServerEngine):
    kind = "sglang"
    ready_path = "/health"
    load_path = "/load_lora_adapter"
    unload_path = "/unload_lora_adapter"
    folder_of = staticmethod(verified_for_engine)
    time_stamp = re.compile(r"^\[[-0-9 :]+\] ")

    def __init__(
        self,
        config: EngineConfig,
        base: BaseModelRef,
        target_modules: Sequence[str],
        origin: str = "",
        *,
        machine: Settings | None = None,
        replica: int = 0,
    ) -> None:
        """origin: Run, its seed and step. The seed of a launch is derived from them if requests have no seed."""
        super().__init__(config, base, target_modules, machine=machine, replica=replica)
        self.origin = origin
        self.is_merged = config.lora_mode == "merged"

    @property
    def _decides_beside_flags(self) -> tuple[str, ...]:
        shared = ("share_experts",) if self.config.share_experts else ()
        return (*(self.target_modules if self.is_merged else ()), *(KEPT_COPY if self._keeps_host_copy else ()), *shared)

    @property
    def _keeps_host_copy(self) -> bool:
        return self.config.keep_host_copy and self.plan.colocation == "offload" and devices.device() == "cuda"

    @cached_property
    def flags(self) -> tuple[str, ...]:
        config = self.config
        flags = [
            *("--skip-tokenizer-init", *self.place.address_of_all),
            *("--dtype", self.dtype, "--enable-metrics", "--log-level-http", "warning"),
            *("--context-length", str(self.context_tokens)),
            *("--max-running-requests", str(config.running_requests), "--tp-size", str(config.tensor_parallel)),
        ]
        if not self.is_merged:
            flags += ["--enable-lora", "--max-lora-rank", str(config.max_lora_rank)]
            flags += ["--lora-target-modules", *self.target_modules]
            flags += ["--max-loras-per-batch", str(engine_memory.NUM_LORA_SLOTS), "--max-loaded-loras", "4"]
            flags += ["--lora-strict-loading"]  # else a tensor of another name is left out, with a warning in the log
        flags += ["--quantization", "fp8"] if config.quantization == "fp8" else []
        flags += ["--kv-cache-dtype", "fp8_e4m3"] if config.kv_cache_dtype == "fp8" else []
        if devices.device() == "cpu":
            flags += ["--device", "cpu", "--attention-backend", "torch_native"]
            flags += [] if self.is_merged else ["--lora-backend", "torch_native"]
            flags += ["--sleep-on-idle", "--max-total-tokens", str(config.kv_cache_tokens)]
        else:
            flags += ["--mem-fraction-static", str(config.memory_fraction)]
            if not engine_flags.names_one_of("sglang", config.extra_flags, GRAPH_SIZES):
                flags += ["--cuda-graph-bs-decode", *map(str, graph_sizes(config.running_requests))]
            flags += [] if self.is_merged else ["--lora-backend", LORA_BACKEND]
            flags += ["--enable-memory-saver"] if self.plan.colocation in RELEASED_TAGS else []
            # Without a backup, released weights are garbage after the wake, although success is reported.
            flags += ["--enable-weights-cpu-backup"] if self.plan.colocation == "offload" else []
        if config.deterministic:
            flags += ["--enable-deterministic-inference"]
        flags += [ROUTES_FLAG] if config.record_routes else []
        # Other MoE runners choose the experts in their own kernels and record nothing, without an error; and some have weights in another order.
        if (config.record_routes or config.share_experts) and devices.device() == "cuda":
            flags += ["--moe-runner-backend", "triton"]
        return (*flags, *config.extra_flags)

    @property
    def api(self) -> ServerApi:
        stop_token_ids = base_model.stop_token_ids(self.model_folder)
        merged_version = next(iter(self._state.adapters), BASE_VERSION) if self.is_merged else None
        return Generate(stop_token_ids, merged_version, self._route_shape if self.config.record_routes else None)

    @property
    def _route_shape(self) -> RouteShape:
        architecture = read_architecture(self.model_folder)
        if architecture.experts is None:
            raise ValueError(
                f"engine.record_routes true with model {self.base.id!r}: it is no mixture of experts and has no routes"
            )
        return RouteShape(architecture.num_layers, architecture.experts.per_token, architecture.experts.count)

    def load_adapter(self, adapter: AdapterVersion) -> None:
        self._merge(adapter) if self.is_merged else super().load_adapter(adapter)

    def _merge(self, adapter: AdapterVersion) -> None:
        state, name = self._state, adapter.served_name
        if adapter.target_modules != tuple(self.target_modules):  # modules changed by an earlier adapter would stay changed
            raise ValueError(f"adapter {name} is on {adapter.target_modules}, this engine merges {tuple(self.target_modules)}")
        if state.adapters != ((name,) if name else ()):
            folder = merged_weights.folder_of(adapter, self.model_folder) if name else self.model_folder
            state = server_process.begin_change(state)
            memory_api.update_weights(state.url, folder, name or BASE_VERSION)
            server_process.remember(state.but(adapters=(name,) if name else ()))
        merged_weights.keep_only(name)

    def score(self, questions: Sequence[ScoreRequest]) -> list[Scores]:
        # If log-probs start at the first token, SGLang takes nothing of the text from its prefix cache. If they start later, it may take the
        # part before. The token at which they start has no log-prob.
        begins = [begin_by_cache(len(each.text)) if each.is_by_cache else 0 for each in questions]
        body: dict[str, object] = {
            "input_ids": [each.text for each in questions],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": begins,
        }
        state = self._state
        body |= {} if self.is_merged else {"lora_path": [each.adapter_name for each in questions]}
        answers = all_parsed(server_process.post(state.url, "/generate", body, server_engine.CONTROL_TIMEOUT_S), len(questions))
        if self.is_merged:
            for answer, each in zip(answers, questions, strict=True):
                check_version(answer, each.adapter_name or next(iter(state.adapters), BASE_VERSION))
        told = [self._told(each.text[begin:]) for each, begin in zip(questions, begins, strict=True)]
        return [_said(*each) for each in zip(questions, answers, told, strict=True)]

    def _told(self, tokens: Sequence[int]) -> list[int]:
        """Token ids as SGLang returns them next to log-probs: the highest id of the vocabulary becomes 0."""
        return [token if token < self.vocab_size - 1 else 0 for token in tokens]

    def version(self) -> str:
        return str(
            server_process.get(self._state.url, "/server_info", server_engine.CONTROL_TIMEOUT_S).json().get("version", "unknown")
        )

    def _backends(self, state: ServerState) -> dict[str, str]:
        info = server_process.get(state.url, "/server_info", server_engine.CONTROL_TIMEOUT_S).json()
        return {name: str(info[name]) for name in BACKENDS if info.get(name) is not None}

    def kv_pool_tokens(self) -> int:
        return memory_api.kv_cache_tokens(self._state.url)

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        place = ["--model-path", str(self.model_folder), "--port", str(port), *self.place.address]
        place += ["--random-seed", str(self._random_seed())]
        meeting = self.machine.workspace / (f"{MEETING}-{self.replica}" if self.replica else MEETING)
        argv = [str(self.machine.sglang_python), str(CHECKOUT / "infra/engines/launchers/sglang_server.py"), *self.flags, *place]
        env = {
            "PYTHONPATH": self.machine.sglang_pythonpath,
            "SGLANG_TIMEOUT_KEEP_ALIVE": str(server_process.KEEP_ALIVE_S),
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            # Otherwise log-probs are those at temperature 1, not at that of sampling.
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
            # Otherwise a TCP store of torch listens on all interfaces, without a password.
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{fresh_folder(meeting, PRIVATE) / 'ranks'}",
            **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo"),
        }
        env |= UNEQUAL_MEMORY if self.config.allow_unequal_memory else {}
        if devices.device() == "cpu" and self.config.tensor_parallel > 1:  # else SGLang wants a NUMA node for each rank
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * self.config.tensor_parallel)
        if self.config.share_experts:
            env[SHARED_EXPERTS] = str(fresh_folder(Workspace.here().shared_experts.parent, PRIVATE))
        return argv, env | (KEPT_COPY if self._keeps_host_copy else {})

    def _spread(self, argv: Sequence[str], env: Mapping[str, str], port: int) -> list[Launch]:
        return several_nodes.programs(argv, env, self.place, port)

    def _random_seed(self) -> int:
        """Seed of one launch, from 0 to 2**31 - 1.

        Without deterministic mode SGLang draws all samples from one random stream, which starts from this seed. A server launched for each step
        with the same seed would draw the same numbers in each step. The launch number is included for a server that is restarted within a step:
        its samples join those of the previous server. Replicas of one step must not draw the same numbers either.
        """
        if self.config.deterministic:  # each request has a seed
            return 0
        place = f" {self.replica}" if self.replica else ""
        decides = f"{self.origin} {server_process.num_launches()}{place}"
        seed = int.from_bytes(hashlib.sha256(decides.encode()).digest()[:4], "big") >> 1
        log.info("the engine draws its samples from random seed %d", seed)
        return seed

    def _launch(self) -> ServerState:
        state = super()._launch()
        # As infra/concurrency/gc_freeze.py does, for each of its processes. From 0.5.18 on, SGLang does it by itself.
        server_process.post(state.url, "/freeze_gc", {}, server_engine.CONTROL_TIMEOUT_S)
        return state

    def _empty_cache(self, state: ServerState) -> None:
        memory_api.empty_cache(state.url, min(server_engine.CONTROL_TIMEOUT_S, self.config.request_timeout_s))

    def _release(self, state: ServerState, plan: ColocationPlan) -> None:
        memory_api.release(state.url, plan)

    def _resume(self, state: ServerState, plan: ColocationPlan) -> ServerState:
        memory_api.resume(state.url, plan, self.model_folder)
        return state.but(adapters=()) if self.is_merged and plan == "reload" else state


def check_config(config: EngineConfig) -> None:
    """Refuse a configuration that SGLang cannot run on this machine. Starts nothing.

    Raises:
        ValueError: names the field, and what to set instead.
    """
    if not config.is_fp8:
        return
    field, otherwise = ("quantization", "none") if config.quantization == "fp8" else ("kv_cache_dtype", "auto")
    if devices.device() == "cpu":
        raise ValueError(f"engine.{field} 'fp8' needs a GPU, there is none here: set it to {otherwise!r}")
    for number in devices.engine_gpus(config.tensor_parallel):
        if (capability := nvml.compute_capability(number)) < FP8_CAPABILITY:
            raise ValueError(
                f"engine.{field} 'fp8' on {nvml.name(number)}: its compute capability is {'.'.join(map(str, capability))}, 8-bit floats need "
                f"{'.'.join(map(str, FP8_CAPABILITY))} or higher: set it to {otherwise!r}"
            )


def graph_sizes(largest: int) -> list[int]:
    """Return the batch sizes for which SGLang captures a CUDA graph for decoding: a batch is padded to the next one.

    The largest is the largest batch there can be. By itself SGLang decodes more than 256 requests at a time without graphs, on one GPU below
    160 GiB; up to 512 it captures 52 sizes. These are 26. Up to 128 requests decoding is bound by reading the weights, so that padding costs
    next to nothing; above, at most an eighth of a batch is padding.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + max(16, sizes[-1] // 8 // 16 * 16))
    return [*(size for size in sizes if size < largest), largest]


def _said(question: ScoreRequest, answer: dict[str, Any], told: list[int]) -> Scores:
    try:
        check_tokens(answer, "input_token_logprobs", told)
        return Scores(question.text, values(answer, "input_token_logprobs")[1:])
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise WrongAnswer(f"the engine's answer has not the form that was asked for: {error}", {"answer": answer}) from error


def begin_by_cache(num_tokens: int) -> int:
    """Position up to which a text may come from the prefix cache."""
    return num_tokens - 1 - min(MAX_BY_CACHE, max(1, (num_tokens - 1) // 2))
