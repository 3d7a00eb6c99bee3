"""What trainer.routing_replay and trainer.share_experts ask of the other sections. Two rules of infra.config.rules."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from infra.config.tools import engine_flags

if TYPE_CHECKING:  # RunConfig's own module imports the rules
    from infra.config.sections.run import RunConfig

MOE_RUNNER = "moe_runner_backend"
RUNNER = "triton"
"""The MoE runner that chooses experts where SGLang records the choice, and has their weights in the order of the model's files."""
FROM_HOST = "its prefixes from the host come with routes of other requests"
FOREIGN_ROUTES = {
    **dict.fromkeys(("enable_hierarchical_cache", "enable_lmcache", "radix_cache_backend"), FROM_HOST),
    "moe_a2a_backend": "routes of its dispatchers were not tried",
    "speculative_algorithm": "tokens that are guessed have no routes of their own",
}
"""Destinations of SGLang's flags with which routes are wrong or missing, and why."""


def routing_replay_is_possible(config: "RunConfig") -> None:
    if not config.trainer.routing_replay:
        return
    engine, data = config.engine, config.data
    refused = {
        f"engine.kind {engine.kind!r}": (engine.kind != "sglang", "only SGLang returns its routes, take 'sglang'"),
        f"environment {config.environment.label!r}": (
            bool(config.environment.label),
            "turns of episodes carry no routes, leave one of them out",
        ),
        "data.partial_rollouts true": (
            data.partial_rollouts,
            "an answer that is continued would have routes of two adapters, set it to false",
        ),
        "trainer.loss.correction.in_flight_updates true": (
            config.trainer.loss.correction.in_flight_updates,
            "an answer that is continued would have routes of two adapters, set it to false",
        ),
        **{f"engine.extra_flags {flag!r}": (True, why) for flag, why in refused_flags(engine.extra_flags)},
    }
    for what, (is_refused, why) in refused.items():
        if is_refused:
            raise ValueError(f"trainer.routing_replay true with {what} is not supported: {why}")


def experts_can_be_shared(config: "RunConfig") -> None:
    trainer, engine = config.trainer, config.engine
    if not trainer.share_experts:
        return
    one = "the memory is shared by one engine and one trainer on one GPU, set it to 1"
    refused = {
        f"engine.kind {engine.kind!r}": (engine.kind != "sglang", "only SGLang's experts are known, take 'sglang'"),
        f"engine.colocation {engine.colocation!r}": (
            engine.colocation not in ("auto", "keep_weights"),
            "the engine's weights must stay where they are, take 'keep_weights'",
        ),
        f"engine.quantization {engine.quantization!r}": (
            engine.quantization != "none",
            "the trainer needs them unrounded, take 'none'",
        ),
        f"engine.lora_mode {engine.lora_mode!r}": (
            engine.lora_mode == "merged",
            "the engine would change weights that the trainer computes with, take 'adapter'",
        ),
        f"engine.dtype {engine.dtype!r} and trainer.dtype {trainer.dtype!r}": (
            engine.dtype != trainer.dtype,
            "one copy has one dtype, set both alike",
        ),
        f"trainer.mode {trainer.mode!r}": (
            trainer.mode == "per_step",
            "each step would compare all experts again, take 'persistent'",
        ),
        f"engine.replicas {engine.replicas or 'auto'}": (engine.replicas != 1, one),
        f"engine.tensor_parallel {engine.tensor_parallel}": (engine.tensor_parallel > 1, one),
        f"trainer.num_processes {trainer.num_processes}": (trainer.num_processes > 1, one),
        **{
            f"engine.extra_flags {flag!r}": (True, f"take {RUNNER!r}, whose experts are those of the model's files")
            for flag in other_runners(engine.extra_flags)
        },
    }
    for what, (is_refused, why) in refused.items():
        if is_refused:
            raise ValueError(f"trainer.share_experts true with {what} is not supported: {why}")


def refused_flags(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flags of SGLang with which its routes cannot be replayed, and why."""
    for flag in other_runners(flags):
        yield flag, f"this MoE runner does not record routes, take {RUNNER!r}"
    for flag in flags:
        for destination in sorted(engine_flags.destinations("sglang", flag) & FOREIGN_ROUTES.keys()):
            yield flag, FOREIGN_ROUTES[destination]


def other_runners(flags: Sequence[str]) -> Iterator[str]:
    """Yield flags of SGLang that choose another MoE runner, with its name."""
    for flag, after in zip_longest(flags, flags[1:], fillvalue=""):
        runner = flag.partition("=")[2] or after
        if MOE_RUNNER in engine_flags.destinations("sglang", flag) and runner != RUNNER:
            yield f"{flag.partition('=')[0]} {runner}"
