"""The section `reward.judge.server`: the server of a second model that judges, where `reward.judge.by` is `model`."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from infra.config.tools import engine_flags
from infra.config.tools.base import ConfigBase

if TYPE_CHECKING:  # JudgeConfig's own module imports this one
    from infra.config.sections.rewards.reward import JudgeConfig

HOW_JUDGE_SERVERS_RUN = {"max_running_requests", "memory_fraction", "kv_cache_tokens", "colocation"}
"""Fields of the section that do not decide what a judge answers."""
OF_ENDPOINTS = {
    "base_url": "the model has a server of Ratchet's own",
    "timeout_s": "engine.request_timeout_s holds for its server",
    "concurrency": "reward.judge.server.max_running_requests takes its place",
    "max_attempts": "its server is started again as the engine is (docs/failures.md)",
    "retry_delay_s": "its server is started again as the engine is (docs/failures.md)",
    "input_price": "its answers cost no money",
    "output_price": "its answers cost no money",
    "max_run_cost": "its answers cost no money, max_run_tokens limits them",
}
"""Fields of `reward.judge` that say how an endpoint is asked or paid, and why a server of its own has none of them."""


class JudgeServerConfig(ConfigBase):
    """The server of the model that judges, with `reward.judge.by` model. It sleeps while the engine samples and the trainer trains. Kind of
    engine, GPUs, deterministic mode and time-outs are those of the section `engine`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision. auto: float32 on a CPU, bfloat16 on a GPU."""
    max_context_tokens: int = Field(default=2048, ge=16)
    """Rubric, answer and judgement together, in tokens of the judge's model. A sample that is longer is unjudged."""
    max_running_requests: int = Field(default=64, ge=1)
    """Judgements that it makes at a time; others wait for a place."""
    memory_fraction: float = Field(default=0.6, gt=0, lt=1)
    """Share of a GPU's memory for its weights and KV cache while it judges; not used on a CPU."""
    kv_cache_tokens: int = Field(default=65536, ge=1024)
    """Size of its KV cache on a CPU; not used on a GPU."""
    colocation: Literal["auto", "offload", "reload", "restart"] = "auto"
    """How it makes room when it has judged. offload: weights and KV cache are released, with a copy on the host; reload: the same without a copy,
    they are read from disk again; restart: the server ends, and starts again in each step; auto: offload."""
    extra_flags: tuple[str, ...] = ()
    """Given to its command line last, as engine.extra_flags are to the engine's, which it does not get."""

    @model_validator(mode="after")
    def _flags_are_not_ours(self) -> Self:
        engine_flags.check("sglang", self.extra_flags)
        return self


def check_own_model(judge: "JudgeConfig") -> None:
    """Check the section `reward.judge` of a judge that is a second model.

    Raises:
        ValueError: for a field that is missing, and for one that only an endpoint has.
    """
    if not judge.model:
        raise ValueError(
            "reward.judge.by 'model' needs reward.judge.model: a Hugging Face folder or a hub id of the model that judges"
        )
    for name, why in OF_ENDPOINTS.items():
        value = getattr(judge, name)
        if value != type(judge).model_fields[name].default:
            shown = repr(value) if isinstance(value, str) else f"{value:g}"
            raise ValueError(f"reward.judge.{name} {shown} with reward.judge.by 'model': {why}; leave it out")
    if judge.answer == "json_schema":
        raise ValueError(
            "reward.judge.answer 'json_schema' with reward.judge.by 'model': its server enforces no schema, take 'auto' or 'text'"
        )
    answer, context = judge.max_output_tokens, judge.server.max_context_tokens
    if answer >= context:
        raise ValueError(
            f"reward.judge.max_output_tokens {answer} leaves no room for a prompt in reward.judge.server.max_context_tokens {context}: "
            "lower it"
        )
