"""Rollout engines behind one interface; see interface.py."""

from infra.config import EngineConfig
from infra.engines.checked import CheckedEngine
from infra.engines.interface import Engine
from infra.engines.scripted import ScriptedEngine
from infra.engines.sglang.engine import SGLangEngine
from infra.engines.vllm.engine import VLLMEngine
from infra.records import AdapterVersion


def open_engine(config: EngineConfig, adapter: AdapterVersion) -> Engine:
    """The engine of this configuration for adapters like this one; nothing is started yet."""
    match config.kind:
        case "sglang":
            return CheckedEngine(
                SGLangEngine(config, adapter.base, adapter.target_modules, f"{adapter.run} {adapter.seed} {adapter.version}")
            )
        case "vllm":
            return CheckedEngine(VLLMEngine(config, adapter.base, adapter.target_modules))
        case "scripted":
            return CheckedEngine(ScriptedEngine(config, adapter.base))
        case unknown:
            raise ValueError(f"engine.kind {unknown!r} is unknown; known are sglang, vllm, scripted")
