"""From steps to sentences: medians with spread, differences in percent, a verdict for each metric."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

Direction = str
"""`less`, `more`, or `` where neither is better."""


class Metric(NamedTuple):
    name: str
    title: str
    better: Direction


METRICS = (
    Metric("tokens_per_s", "rollout tokens/s", "more"),
    Metric("goodput_tokens_per_s", "goodput tokens/s", "more"),
    Metric("rollout_s", "rollout s", "less"),
    Metric("ttft_s", "time to first token s", "less"),
    Metric("inter_token_s", "inter-token latency s", "less"),
    Metric("latency_p50_s", "request latency p50 s", "less"),
    Metric("latency_p99_s", "request latency p99 s", "less"),
    Metric("release_s", "release s", "less"),
    Metric("wake_s", "wake s", "less"),
    Metric("reload_s", "reload adapter s", "less"),
    Metric("transition_s", "transition overhead s", "less"),
    Metric("training_s", "training s (control)", ""),
    Metric("step_s", "total step s", "less"),
    Metric("memory_inference_mean_gib", "memory in inference, mean GiB", "less"),
    Metric("memory_inference_peak_gib", "memory in inference, peak GiB", "less"),
    Metric("memory_after_release_mean_gib", "memory after release, mean GiB", "less"),
    Metric("memory_after_release_peak_gib", "memory after release, peak GiB", "less"),
    Metric("memory_training_mean_gib", "memory in training, mean GiB", "less"),
    Metric("memory_training_peak_gib", "memory in training, peak GiB", "less"),
    Metric("kv_pool_tokens", "KV pool tokens", "more"),
    Metric("start_s", "engine start s", "less"),
    Metric("errors", "errors", "less"),
)
FEWEST = 3
"""Values of each side below which nothing is said about a difference."""


class Summary(NamedTuple):
    median: float
    low: float
    high: float
    num: int

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g}, {self.high:.4g}]"


def summary(values: Sequence[float]) -> Summary | None:
    """None where nothing was measured."""
    return Summary(median(values), min(values), max(values), len(values)) if values else None


def difference_percent(left: Summary, right: Summary) -> float | None:
    """How much more the right median is than the left; None where the left is nothing."""
    return 100 * (right.median - left.median) / left.median if left.median else None


def verdict(metric: Metric, names: tuple[str, str], left: Summary | None, right: Summary | None) -> str:
    """The better of the two; neither, as long as the two spreads overlap."""
    if left is None or right is None:
        return "not measured for both"
    if not metric.better:
        return "a control: should be equal"
    if min(left.num, right.num) < FEWEST:
        return f"too few values ({left.num} and {right.num}), {FEWEST} of each are needed"
    if left.low <= right.high and right.low <= left.high:
        return "no difference beyond the spread"
    right_is_better = (right.median < left.median) == (metric.better == "less")
    return f"{names[1] if right_is_better else names[0]} is better"


def relative_to_first(values: Mapping[int, float]) -> dict[int, float]:
    """Each step's value by that of the first; empty without a first."""
    first = values.get(min(values)) if values else None
    return {step: value / first for step, value in sorted(values.items())} if first else {}
