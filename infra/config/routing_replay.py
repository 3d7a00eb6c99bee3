"""What trainer.routing_replay asks of the other sections. A rule of infra.config.rules."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from infra.config.tools import engine_flags

if TYPE_CHECKING:  # RunConfig's own module imports the rules
    from infra.config.sections.run import RunConfig

MOE_RUNNER = "moe_runner_backend"
RECORDING_RUNNER = "triton"
"""The MoE runner that chooses experts where SGLang records the choice."""
FOREIGN_ROUTES = {
    "enable_hierarchical_cache": "its prefixes from the host come with routes of other requests",
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


def refused_flags(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flags of SGLang with which its routes cannot be replayed, and why."""
    for flag, after in zip_longest(flags, flags[1:], fillvalue=""):
        found = engine_flags.destinations("sglang", flag)
        if MOE_RUNNER in found and (runner := flag.partition("=")[2] or after) != RECORDING_RUNNER:
            yield f"{flag.partition('=')[0]} {runner}", f"this MoE runner does not record routes, take {RECORDING_RUNNER!r}"
        for destination in sorted(found & FOREIGN_ROUTES.keys()):
            yield flag, FOREIGN_ROUTES[destination]
