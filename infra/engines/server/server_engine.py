"""The common part of all engines that are server programs. The packages sglang and vllm define how theirs is started and called."""

import hashlib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import cached_property
from typing import Any

from infra.cluster import connection
from infra.colocation import confirm_memory, plans
from infra.colocation.confirm_memory import Promise
from infra.colocation.engine_memory import freed_bytes, residue_bytes
from infra.colocation.trainer_memory import model_in
from infra.concurrency import event_loop
from infra.config import ColocationPlan, EngineConfig, SamplingConfig
from infra.engines import health_checks
from infra.engines.interface import WHOLE, Release, RolloutMeasures, SampleRequest, Share, Turns
from infra.engines.request_timing import Load
from infra.engines.scoring import ScoreRequest, Scores
from infra.engines.server import parts, server_process, starts
from infra.engines.server.generation import GenerationClient
from infra.engines.server.parts import Launch
from infra.engines.server.server_place import ServerPlace
from infra.engines.server.server_process import ServerState
from infra.engines.server.transport import ServerApi
from infra.engines.server.turns import turn_client
from infra.failures import EngineUnavailable
from infra.machine import devices
from infra.models import base_model
from infra.processes import kernel_caches, logs
from infra.processes.log_levels import level_of
from infra.records import AdapterVersion, BaseModelRef
from infra.settings import Settings, settings
from infra.store import code_digest
from infra.store.files import read_json, verified_adapter
from infra.store.samples import Sample
from infra.telemetry import program_versions

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 120.0
CONTEXT_SLACK_TOKENS = 8


class ServerEngine(ABC):
    """One server, serving one base model with at most one adapter at a time."""

    kind: str
    ready_path: str
    load_path: str
    unload_path: str
    time_stamp: re.Pattern[str]
    """Pattern of the time stamp at the start of its log lines, which ours have already."""
    frees_as: Mapping[ColocationPlan, ColocationPlan] = {}
    """Plans that free as much memory as another plan, which is their value."""
    folder_of = staticmethod(verified_adapter)
    """The adapter's folder as this engine reads it, its files as recorded. Raises DigestMismatch if they are not."""

    def __init__(
        self,
        config: EngineConfig,
        base: BaseModelRef,
        target_modules: Sequence[str],
        *,
        machine: Settings | None = None,
        replica: int = 0,
    ) -> None:
        """machine: Interpreter, port and GPUs of the server. None: those of settings()."""
        self.machine = machine or settings()
        self.replica = replica
        self.config = config
        self.place = ServerPlace(config, self.machine, replica)
        self.base = base
        self.target_modules = target_modules
        self.model_folder = base_model.locate(base.id)
        self.dtype = devices.dtype_of(config.dtype)
        self.plan = devices.plan(config)
        self.start: starts.StartMeasures | None = None

    @property
    @abstractmethod
    def flags(self) -> tuple[str, ...]:
        """Everything that decides its answers, except the model and its path."""

    @property
    @abstractmethod
    def api(self) -> ServerApi: ...

    @abstractmethod
    def score(self, questions: Sequence[ScoreRequest]) -> list[Scores]: ...

    @abstractmethod
    def version(self) -> str:
        """Version as reported by the running server."""

    @abstractmethod
    def _backends(self, state: ServerState) -> dict[str, str]:
        """See EngineProgram.backends. Called once after each launch."""

    @abstractmethod
    def kv_pool_tokens(self) -> int:
        """Size of the running server's KV cache, in tokens."""

    @abstractmethod
    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment of the program. Neither contains a secret."""

    def _spread(self, argv: Sequence[str], env: Mapping[str, str], port: int) -> list[Launch]:
        """Return the programs of a server over several nodes. Raises ValueError if this kind of engine has none."""
        raise ValueError(
            f"engine.kind {self.kind} with engine.tensor_parallel {self.config.tensor_parallel} would be over {len(self.place.slot.parts)} nodes, "
            "which only sglang can be: set engine.kind sglang, or lower engine.tensor_parallel to the GPUs of one node"
        )

    @abstractmethod
    def _release(self, state: ServerState, plan: ColocationPlan) -> None:
        """Release the memory that a plan frees. Not called for `restart` and `separate_gpus`. No request is under way during the release."""

    @abstractmethod
    def _resume(self, state: ServerState, plan: ColocationPlan) -> ServerState:
        """Wake it by the plan that put it to sleep. Returns the state to record, besides being awake."""

    @abstractmethod
    def _empty_cache(self, state: ServerState) -> None:
        """Empty its prefix cache, texts of checks included: the last request before the first prompt of a deterministic rollout."""

    def wake(self) -> bool:
        if not self.replica:
            server_process.stop_recorded(self.config.replicas or 1)  # servers of a configuration with more replicas
        state = server_process.adopt(self.identity, self.ready_path, self.replica)
        if state is not None and state.is_awake and state.is_verified:
            log.info("the engine is awake: pid %d, launch %d", state.process.pid, state.launch)
            return False
        if state is None:
            state = self._launch()
            server_process.remember(state.but(kv_cache_tokens=self.kv_pool_tokens(), backends=self._backends(state)))
        elif not state.is_awake:
            server_process.remember(self._woken(state))
        return True

    def _woken(self, state: ServerState) -> ServerState:
        if state.slept_by is None:
            raise EngineUnavailable("it is not known what the engine released before it fell asleep")
        room: dict[str, Any] = {"what": "the engine's wake", "timeout_s": confirm_memory.ROOM_DEADLINE_S}
        for part in state.parts:
            connection.node_of(part.node).call(confirm_memory.wait_for_room, part.released, **room)
        woken = self._resume(server_process.begin_change(state), state.slept_by)
        tokens = self.kv_pool_tokens()
        if tokens < state.kv_cache_tokens:
            raise EngineUnavailable(
                f"after its wake the engine has room for {tokens} tokens, before its release it had {state.kv_cache_tokens}"
            )
        return woken.with_released([{}] * len(state.parts)).but(is_awake=True, slept_by=None, kv_cache_tokens=tokens)

    def release_memory(self) -> Release:
        plan, reason = self.plan.colocation, self.plan.reason
        frees = self.frees_as.get(plan, plan)
        if (
            frees == "separate_gpus"
            or (frees == "keep_weights" and devices.device() == "cpu")
            or not (state := self._state).is_awake
        ):
            return Release(plan=plan, reason=reason, released_bytes=0)
        promise = self._promise(state)
        there = [(connection.node_of(part.node), part.process.program) for part in state.parts]
        own = [self.place.gpus_of(rank) for rank in range(len(there))]
        before = [node.call(confirm_memory.held_by, program, gpus=gpus) for (node, program), gpus in zip(there, own, strict=True)]
        if plan == "restart":
            self.stop()
        else:
            state = server_process.begin_change(state)
            self._release(state, plan)
        gained = [
            node.call(confirm_memory.wait_until_released, program, held, promise, timeout_s=plans.DEADLINE_S[plan])
            for (node, program), held in zip(there, before, strict=True)
        ]
        if plan != "restart":
            server_process.remember(state.with_released(gained).but(is_awake=False, slept_by=plan))
        return Release(plan=plan, reason=reason, released_bytes=sum(sum(each.values()) for each in gained))

    def _promise(self, state: ServerState) -> Promise:
        plan = self.plan.colocation
        sizes = self.config, model_in(self.model_folder), state.kv_cache_tokens
        return Promise(plan, *(of(self.frees_as.get(plan, plan), *sizes) for of in (residue_bytes, freed_bytes)))

    def mark_verified(self, adapter: AdapterVersion) -> None:
        server_process.remember(self._state.but(is_verified=True))

    def is_verified(self, adapter: AdapterVersion) -> bool:
        state, name = self._state, adapter.served_name
        return state.is_awake and state.is_verified and state.adapters == ((name,) if name else ())

    def logprobs(self, tokens: list[int], adapter_name: str | None) -> list[float]:
        """Return the log-probs of tokens[1:], in nats, from a separate request."""
        return self.score([ScoreRequest(tokens, adapter_name)])[0].logprobs

    def load_adapter(self, adapter: AdapterVersion) -> None:
        state, name = self._state, adapter.served_name
        if state.adapters == (adapters := (name,) if name else ()):
            return
        folder = self.folder_of(adapter) if name is not None and name not in state.adapters else None
        state = server_process.begin_change(state)  # until both are done: a server of which only one is known is not adopted
        if folder is not None:
            server_process.post(state.url, self.load_path, {"lora_name": name, "lora_path": str(folder)}, CONTROL_TIMEOUT_S)
        for old in (each for each in state.adapters if each != name):
            server_process.post(state.url, self.unload_path, {"lora_name": old}, CONTROL_TIMEOUT_S)
        server_process.remember(state.but(adapters=adapters))

    def served_adapters(self) -> tuple[str, ...]:
        return self._state.adapters

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
        state = self._state
        with parts.watched(state.parts, self.stop):
            if self.config.deterministic and share.is_first:
                self._empty_cache(state)
            with logs.followed(state.log_path, self._log_line) if share.is_first else nullcontext():
                how: dict[str, Any] = {
                    "health_path": self.ready_path,
                    "keeps_prefixes": keeps_prefixes,
                    "load": load,
                    "share": share,
                }
                rollout = GenerationClient(self.api, self.config, state.url, sampling, adapter, take, **how)
                hit_frac = event_loop.completed(rollout.all_of(missing))
        return RolloutMeasures(
            ttft_s=rollout.ttft_s,
            first_token_at=rollout.first_token_at,
            last_token_at=rollout.last_token_at,
            prefix_cache_hit_frac=hit_frac,
        )

    @asynccontextmanager
    async def turns(self, adapter: AdapterVersion) -> AsyncIterator[Turns]:
        state = self._state
        with parts.watched(state.parts, self.stop):
            async with turn_client(self.api, self.config, state, adapter, self.ready_path, self._log_line) as turns:
                yield turns

    @property
    def kv_cache_tokens(self) -> int:
        return server_process.kv_cache_tokens(self.replica)

    def memory_in_use_gib(self) -> float:
        return server_process.memory_in_use_gib()

    def stop(self) -> None:
        server_process.stop_replica(self.replica)

    def is_running(self) -> bool:
        state = server_process.recorded(self.replica)
        return state is not None and server_process.is_alive(state)

    def log_tail(self) -> str:
        state = server_process.recorded(self.replica)
        return parts.log_tail(state.parts) if state is not None else ""

    def last_traceback(self) -> str:
        state = server_process.recorded(self.replica)
        return parts.last_traceback(state.parts) if state is not None else ""

    @property
    def _state(self) -> ServerState:
        state = server_process.recorded(self.replica)
        if state is None or not server_process.is_alive(state):
            raise EngineUnavailable(f"the engine{f' (replica {self.replica})' if self.replica else ''} is not running")
        return state

    @property
    def launch(self) -> int:
        return self._state.launch

    def backends(self) -> dict[str, str]:
        state = self._state
        if not state.backends:  # the process that launched it died before this was recorded
            state = server_process.remember(state.but(backends=self._backends(state)))
        return state.backends

    @cached_property
    def versions(self) -> dict[str, str]:
        return program_versions.of_engine(self.kind, self.machine)

    @cached_property
    def identity(self) -> str:
        """Identity of a server: equal for equal model, flags, versions and launcher, whose patches compute."""
        decides = f"{self.base.sha256} {[*self.flags, *self._decides_beside_flags]} {program_versions.key_of(self.versions)}"
        decides += f" {code_digest.digest('infra.engines.launchers')}"
        return hashlib.sha256(decides.encode()).hexdigest()[:16]

    @property
    def _decides_beside_flags(self) -> tuple[str, ...]:
        """Further values that require another server when they change, although its flags are equal."""
        return ()

    @cached_property
    def context_tokens(self) -> int:
        return min(self.config.max_context_tokens + CONTEXT_SLACK_TOKENS, base_model.num_positions(self.model_folder))

    @cached_property
    def vocab_size(self) -> int:
        return int(read_json(self.model_folder / "config.json")["vocab_size"])

    @cached_property
    def golden_tokens(self) -> list[list[int]]:
        tokenizer = base_model.tokenizer(self.model_folder)
        return [list(tokenizer(text)["input_ids"]) for text in health_checks.GOLDEN_TEXTS]

    def _launch(self) -> ServerState:
        self.place.check_room()
        program_versions.warn_of_engine(self.kind, self.machine)
        with self.place.reserved_port() as port:
            argv, env = self._command(port)
            key = {"RATCHET_API_KEY_FILE": str(server_process.key_path(self.replica))}
            # It has its own Python: nothing of ours may be imported there.
            has_bytecode = program_versions.engine_has_bytecode(self.kind, self.machine)
            caches = kernel_caches.variables(self.versions, has_bytecode=has_bytecode)
            env = {"HF_HUB_OFFLINE": "1"} | key | self.place.visible_gpus() | caches | env
            self.start = starts.StartMeasures(self.identity, self.versions)
            slot = self.place.slot
            programs = self._spread(argv, env, port) if slot.others else [Launch(slot.node, argv, env)]
            how: dict[str, Any] = {"identity": self.identity, "ready_path": self.ready_path, "replica": self.replica}
            with starts.read_ahead(self.model_folder):
                state = server_process.launch(self.kind, programs, timeout_s=self.config.start_timeout_s, port=port, **how)
            self.start.ready(state)
            return state

    def start_figures(self) -> dict[str, float]:
        return self.start.figures() if self.start else {}

    @property
    def gpus(self) -> list[int]:
        """NVML's numbers of its GPUs on its machine; empty on a CPU."""
        return self.place.gpus

    def _log_line(self, line: str) -> None:
        name = f"{self.kind} {self.replica}" if self.replica else self.kind
        log.log(level_of(line), "%s: %s", name, self.time_stamp.sub("", line))
