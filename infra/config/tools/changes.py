"""What may change in a run that has begun. Everything else is what the run is: a run with another value is another run."""

from typing import NamedTuple

from infra.config import RunConfig
from infra.config.sections.evaluation import DECIDE_HELD_OUT
from infra.config.tools.overrides import flattened

MAY_CHANGE = {
    "num_steps": "a longer run keeps the steps that it has",
    "layout": "who chooses the layout; its fields say which one it is",
    "engine.max_context_tokens": "how samples are served, not which",
    "engine.max_running_requests": "how samples are served, not which",
    "engine.max_lora_rank": "how samples are served, not which",
    "engine.replicas": "how many servers make the samples, not which",
    "engine.tensor_parallel": "how samples are served, not which",
    "engine.memory_fraction": "how samples are served, not which",
    "engine.kv_cache_tokens": "how samples are served, not which",
    "engine.colocation": "how the memory is shared",
    "engine.allow_unequal_memory": "how the memory is shared",
    "engine.start_timeout_s": "patience",
    "engine.request_timeout_s": "patience",
    "engine.extra_flags": "how samples are served; what else a flag does is for its user to know",
    "trainer.learning_rate": "lowered by hand in a run's life; each step's manifest and the metric train/learning_rate say it",
    "trainer.lr_scheduler_type": "as learning_rate",
    "trainer.lr_warmup_steps": "as learning_rate",
    "trainer.num_schedule_steps": "as learning_rate: a longer run needs a longer cosine",
    "trainer.min_lr_ratio": "as learning_rate",
    "trainer.max_mismatch": "what is refused, not what is trained",
    "trainer.max_tokens_per_microbatch": "memory and speed: the same numbers up to rounding",
    "trainer.num_processes": "memory and speed: the same numbers up to rounding",
    "trainer.tensor_parallel": "memory and speed: the same numbers up to rounding",
    "trainer.sequence_parallel": "memory and speed: the same numbers up to rounding",
    "trainer.expert_parallel": "memory and speed: the same numbers up to rounding",
    "trainer.first_gpu": "which GPUs train",
    "trainer.recompute": "memory and speed: the same numbers up to rounding",
    "trainer.timeout_s": "patience",
    "trainer.mode": "speed",
    "trainer.sleep_weights": "memory",
    "reward.timeout_s": "patience",
    "reward.task_timeout_s": "patience",
    "reward.cpu_s": "patience",
    "reward.workers": "speed",
    "reward.memory_mib": "memory",
    "reward.environment": "where the reward runs",
    "reward.concurrency": "speed",
    "reward.judge.base_url": "where the judge is; which one it is stays",
    "reward.judge.timeout_s": "patience",
    "reward.judge.concurrency": "speed",
    "reward.judge.max_attempts": "patience",
    "reward.judge.retry_delay_s": "patience",
    "reward.judge.input_price": "what is shown",
    "reward.judge.output_price": "what is shown",
    "reward.judge.max_run_tokens": "what is refused, not what is trained",
    "reward.judge.max_run_cost": "what is refused, not what is trained",
    "reward.model.load_timeout_s": "patience",
    "reward.max_unjudged_frac": "what is refused, not what is trained",
    "evaluation": "what is measured, not what is trained; figures of another evaluation are kept apart. With a single data file the number "
    "of held-out rows stays",
    "retention": "what stays on the disk",
    "export": "what is left behind at the end",
    "tracking.num_samples_shown": "what is shown",
    "tracking.register_every": "what is shown",
}
"""Field or section -> why it may."""


class Change(NamedTuple):
    field: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.field} {self.was!r} -> {self.now!r}"


def changes(before: RunConfig, now: RunConfig) -> list[Change]:
    was, is_now = flattened(before.model_dump()), flattened(now.model_dump())
    return [Change(field, was[field], is_now[field]) for field in was if was[field] != is_now[field]]


def may_change(field: str) -> bool:
    return any(field == allowed or field.startswith(f"{allowed}.") for allowed in MAY_CHANGE)


def check_goes_on(before: RunConfig, now: RunConfig) -> None:
    """Raises ValueError, with the difference, if a run that was begun with one configuration may not go on with another."""
    held = DECIDE_HELD_OUT if before.training.num_held_out != now.training.num_held_out else ()
    refused = [change for change in changes(before, now) if change.field in held or not may_change(change.field)]
    if refused:
        raise ValueError(
            f"run {now.name!r} was begun with another configuration and cannot go on with this one: {'; '.join(map(str, refused))}. "
            "Give the new run another name, or take the values that it was begun with (what may change: docs/runs.md)"
        )
