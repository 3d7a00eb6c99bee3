"""Rollout engines behind one interface; see interface.py."""

from pathlib import Path

from infra.config import ColocationPlan, EngineConfig
from infra.engines.checked import CheckedEngine
from infra.engines.interface import Engine
from infra.engines.scripted import ScriptedEngine
from infra.engines.server import server_process
from infra.engines.server.server_process import ServerState
from infra.engines.sglang.engine import SGLangEngine
from infra.engines.vllm import engine as vllm
from infra.engines.vllm.engine import VLLMEngine
from infra.records import AdapterVersion
from infra.settings import Settings


def open_engine(
    config: EngineConfig, adapter: AdapterVersion, *, machine: Settings | None = None, checks_beside: bool = True
) -> Engine:
    """Return the engine of this configuration for adapters like this one. Nothing is started yet.

    machine: Interpreter, port and GPUs of a server. None: those of settings().
    checks_beside: As for CheckedEngine.
    """
    match config.kind:
        case "sglang":
            origin = f"{adapter.run} {adapter.seed} {adapter.version}"
            sglang = SGLangEngine(config, adapter.base, adapter.target_modules, origin, machine=machine)
            return CheckedEngine(sglang, checks_beside=checks_beside)
        case "vllm":
            server = VLLMEngine(config, adapter.base, adapter.target_modules, machine=machine)
            return CheckedEngine(server, checks_beside=checks_beside)
        case "scripted":
            return CheckedEngine(ScriptedEngine(config, adapter.base), checks_beside=checks_beside)
        case unknown:
            raise ValueError(f"engine.kind {unknown!r} is unknown; known are sglang, vllm, scripted")


def check_config(config: EngineConfig, plan: ColocationPlan) -> None:
    """Refuse a configuration that an engine of this kind cannot run. Starts nothing.

    Raises:
        ValueError: names the field, and values that would work.
    """
    if config.kind == "vllm":
        vllm.check_config(config, plan)


def stop_recorded() -> bool:
    """End the engine server of this workspace, if one is alive. Returns whether one was."""
    return server_process.stop_recorded()


def log_path() -> Path | None:
    """Return the log file of this workspace's engine server; None where no server is recorded."""
    state = server_process.recorded()
    return state.log_path if state else None


def recorded() -> ServerState | None:
    """Return the recorded state of this workspace's engine server, alive or not. None if no server is recorded."""
    return server_process.recorded()
