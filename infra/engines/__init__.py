"""Rollout engines behind one interface; see interface.py."""

from pathlib import Path

from infra.cluster import connection
from infra.config import ColocationPlan, EngineConfig
from infra.engines.checked import CheckedEngine
from infra.engines.interface import Engine, EngineProgram
from infra.engines.replicas.replica_set import ReplicaSet
from infra.engines.scripted import ScriptedEngine
from infra.engines.server import server_process
from infra.engines.server.judge_engine import JudgeEngine
from infra.engines.server.server_process import ServerState
from infra.engines.sglang.engine import SGLangEngine
from infra.engines.sglang.engine import check_config as check_config_of_sglang
from infra.engines.sglang.judge_server import JudgeServer
from infra.engines.vllm import engine as vllm
from infra.engines.vllm.engine import VLLMEngine
from infra.records import AdapterVersion
from infra.settings import Settings
from infra.store.layout import JUDGE


def open_engine(
    config: EngineConfig, adapter: AdapterVersion, *, machine: Settings | None = None, checks_beside: bool = True
) -> Engine:
    """Return the engine of this configuration for adapters like this one. Nothing is started yet.

    machine: Interpreter, port and GPUs of a server. None: those of settings().
    checks_beside: As for CheckedEngine.
    """
    # One number for all of them, also when a node is lost meanwhile.
    config = config.but(replicas=connection.num_replicas(config))
    programs = [_program(config, adapter, machine, replica) for replica in range(config.replicas or 1)]
    replicas = [CheckedEngine(program, checks_beside=checks_beside) for program in programs]
    return replicas[0] if len(replicas) == 1 else ReplicaSet(replicas)


def _program(config: EngineConfig, adapter: AdapterVersion, machine: Settings | None, replica: int) -> EngineProgram:
    match config.kind:
        case "sglang":
            origin = f"{adapter.run} {adapter.seed} {adapter.version}"
            return SGLangEngine(config, adapter.base, adapter.target_modules, origin, machine=machine, replica=replica)
        case "vllm":
            return VLLMEngine(config, adapter.base, adapter.target_modules, machine=machine, replica=replica)
        case "scripted":
            return ScriptedEngine(config, adapter.base, replica)
        case unknown:
            raise ValueError(f"engine.kind {unknown!r} is unknown; known are sglang, vllm, scripted")


def check_config(config: EngineConfig, plan: ColocationPlan) -> None:
    """Refuse a configuration that an engine of this kind cannot run. Starts nothing.

    Raises:
        ValueError: names the field, and values that would work.
    """
    if config.kind == "vllm":
        vllm.check_config(config, plan)
    if config.kind == "sglang":
        check_config_of_sglang(config)


def open_judge(config: EngineConfig, version: AdapterVersion) -> JudgeEngine:
    """Return the second model that judges, with a server and records of its own. Nothing is started yet.

    config: Its server, as infra.colocation.judge.server_of gives it.
    version: Version 0 of its model.
    """
    scripted = config.kind == "scripted"
    program = ScriptedEngine(config, version.base, JUDGE) if scripted else JudgeServer(config, version)
    return JudgeEngine(program, version)


def stop_judge() -> bool:
    """End this workspace's server of a second model that judges. Returns whether it was alive."""
    return server_process.stop_replica(JUDGE)


def stop_recorded() -> bool:
    """End the engine's servers of this workspace, and the judge's. Returns whether one was alive."""
    return server_process.stop_recorded()


def log_path() -> Path | None:
    """Return the log file of this workspace's engine server, of the first if there are several; None where no server is recorded."""
    return next((state.log_path for state in recorded()), None)


def recorded() -> list[ServerState]:
    """Return the recorded states of this workspace's engine servers, alive or not: one for each replica, and one for a judge's."""
    return server_process.all_recorded()
