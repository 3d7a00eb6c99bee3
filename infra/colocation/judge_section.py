"""The server of a second model that judges, as the section of an engine."""

from infra.config import ColocationPlan, EngineConfig, JudgeConfig


def plan_of(judge: JudgeConfig) -> ColocationPlan:
    """The judge's own colocation plan."""
    return "offload" if judge.server.colocation == "auto" else judge.server.colocation


def server_of(engine: EngineConfig, judge: JudgeConfig) -> EngineConfig:
    """The judge's server, as the section of an engine. It needs no slots for adapters: its weights are the base model's."""
    server = judge.server
    return EngineConfig(
        kind=engine.kind,
        dtype=server.dtype,
        max_context_tokens=server.max_context_tokens,
        max_running_requests=server.max_running_requests,
        lora_mode="merged",
        tensor_parallel=engine.tensor_parallel,
        memory_fraction=server.memory_fraction,
        kv_cache_tokens=server.kv_cache_tokens,
        colocation=plan_of(judge),
        allow_unequal_memory=engine.allow_unequal_memory,
        deterministic=engine.deterministic,
        start_timeout_s=engine.start_timeout_s,
        request_timeout_s=engine.request_timeout_s,
        extra_flags=server.extra_flags,
    )
