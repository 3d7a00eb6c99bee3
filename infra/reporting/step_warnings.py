"""Warnings about a step's figures: one table, a row for each rule, with its limit and what to do."""

from statistics import median
from typing import Literal, NamedTuple

from infra.runs.history import Figures, History

MIN_STEPS = 3
"""Fewest steps for a comparison."""


class WarningRule(NamedTuple):
    name: str
    figure: str
    """The figure's name in MLflow. Its absolute value counts."""
    side: Literal["above", "below"]
    limit: float
    of: Literal["", "first", "recent"] = ""
    """The limit is a multiple of the median of the run's first or latest steps; empty: it is the limit itself."""
    least: float = 0.0
    """Smaller figures are noise: with `above` this step's must reach it, with `below` what it is compared with."""
    advice: str = ""


class Triggered(NamedTuple):
    alarm: WarningRule
    value: float
    bound: float

    def __str__(self) -> str:
        limit = f" ({said(self.alarm)})" if self.alarm.of else ""
        return f"{self.alarm.name}: {self.alarm.figure} {self.value:.3g} is {self.alarm.side} {self.bound:.3g}{limit}"


WARNING_RULES = (
    WarningRule(
        *("entropy collapse", "train/entropy", "below", 0.3, "first", 1e-3),
        advice="samples of a group become alike: lower the learning rate, raise trainer.loss.clip_high or entropy_bonus",
    ),
    WarningRule(
        *("mismatch drift", "mismatch/mean_abs_logprob_diff", "above", 3.0, "first", 2e-3),
        advice="engine and trainer move apart: look at dtypes and at the engine's weights; trainer.loss.correction bounds the harm",
    ),
    WarningRule(
        *("few effective samples", "mismatch/ess", "below", 0.5),
        advice="a few tokens carry the update: fewer mini-batches, or trainer.loss.correction",
    ),
    WarningRule(
        *("many truncated", "rollout/truncated_frac", "above", 0.25),
        advice="raise sampling.max_output_tokens (environment.max_turns too), or set batch.mask_truncated or batch.overlong",
    ),
    WarningRule(
        *("most groups flat", "reward/frac_zero_std_groups", "above", 0.5),
        advice="they teach nothing: easier or harder data, larger groups, or batch.drop_zero_std_groups with more prompts",
    ),
    WarningRule(
        *("loss spike", "train/loss", "above", 10.0, "recent", 0.2),
        advice="read this step's samples and rewards; lower the learning rate or trainer.max_grad_norm",
    ),
    WarningRule(
        *("gradient spike", "train/grad_norm", "above", 5.0, "recent", 1e-3),
        advice="trainer.max_grad_norm bounds it; when it comes again, lower the learning rate",
    ),
    WarningRule(
        *("much clipping", "train/clip_frac", "above", 0.3),
        advice="the policy moves far within a step: fewer mini-batches, or a lower learning rate",
    ),
    WarningRule(
        *("far from the base model", "train/kl_ref", "above", 1.0),
        advice="raise trainer.loss.kl.coefficient, or lower the learning rate",
    ),
    WarningRule(
        *("rewards fell", "reward/mean", "below", 0.5, "recent", 0.05),
        advice="go back to an earlier adapter (models:/<run>@best), lower the learning rate",
    ),
    WarningRule(
        *("worse than at first on held-out questions", "eval/pass_at_1", "below", 0.9, "first", 0.02),
        advice="the rewards are learnt, the task is not: look for a reward that can be had without it",
    ),
    WarningRule(
        *("rollout became slow", "rollout/tokens_per_s", "below", 0.5, "recent"),
        advice="longer samples, or another user of this machine; the time line shows which part grew",
    ),
    WarningRule(
        *("replica lost", "rollout/lost_replicas", "above", 0.0),
        advice="the others made its samples, and it was started again; `ratchet logs` shows the engine's log",
    ),
    WarningRule(
        *("memory stays in use", "memory/after_release_gib", "above", 1.2, "first", 1.0),
        advice="a leak: `ratchet down` ends the engine, the next step starts it again",
    ),
)


def triggered(now: Figures, history: History) -> list[Triggered]:
    """In the order of the table; figures that were not measured raise nothing."""
    found = []
    for alarm in WARNING_RULES:
        bound = _bound(alarm, history)
        if alarm.figure not in now or bound is None:
            continue
        value = abs(now[alarm.figure])
        if alarm.side == "above" and value > bound and value >= alarm.least:
            found.append(Triggered(alarm, value, bound))
        if alarm.side == "below" and value < bound and bound >= alarm.least * alarm.limit:
            found.append(Triggered(alarm, value, bound))
    return found


def said(alarm: WarningRule) -> str:
    """The limit in words."""
    if not alarm.of:
        return f"{alarm.side} {alarm.limit:g}"
    steps = "the run's first steps" if alarm.of == "first" else "the latest steps"
    return f"{alarm.side} {alarm.limit:g} times the median of {steps}"


def _bound(alarm: WarningRule, history: History) -> float | None:
    if not alarm.of:
        return alarm.limit
    values = [abs(step[alarm.figure]) for step in getattr(history, alarm.of) if alarm.figure in step]
    # Of evaluations there are fewer than of steps: the one before training is enough.
    enough = 1 if alarm.figure.startswith("eval/") else MIN_STEPS
    return alarm.limit * median(values) if len(values) >= enough else None
