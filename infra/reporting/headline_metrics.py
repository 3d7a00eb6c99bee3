"""The most important figures, with their units and changes."""

from typing import NamedTuple

from infra.runs.history import Figures


class HeadlineMetric(NamedTuple):
    name: str
    """In MLflow."""
    label: str
    unit: str = ""
    is_share: bool = False
    """Shown in percent."""


HEADLINE_METRICS = (
    HeadlineMetric("reward/mean", "mean reward"),
    HeadlineMetric("reward/frac_zero_std_groups", "zero-std groups", is_share=True),
    HeadlineMetric("rollout/truncated_frac", "truncated samples", is_share=True),
    HeadlineMetric("rollout/tokens_per_s", "rollout speed", "tokens/s"),
    HeadlineMetric("train/loss", "loss"),
    HeadlineMetric("train/grad_norm", "gradient norm"),
    HeadlineMetric("train/entropy", "entropy", "nats"),
    HeadlineMetric("mismatch/mean_abs_logprob_diff", "engine vs trainer", "nats"),
    HeadlineMetric("train/tokens_per_s", "training speed", "tokens/s"),
    HeadlineMetric("time/step_s", "time of the step", "s"),
    HeadlineMetric("memory/inference_gib", "memory while sampling", "GiB"),
    HeadlineMetric("memory/training_gib", "memory while training", "GiB"),
)

PARTS = "reward_parts/"
"""The beginning of the metrics of a reward's parts: `reward_parts/<part>/mean` and `/std`."""


def known(figures: Figures) -> list[HeadlineMetric]:
    """The key figures that were measured, the mean of each part of the reward behind the mean reward."""
    found = [each for each in HEADLINE_METRICS if each.name in figures]
    means = [HeadlineMetric(f"{PARTS}{part}/mean", f"mean of part {part}") for part in part_names(figures)]
    behind = sum(each.name == "reward/mean" for each in found[:1])
    return [*found[:behind], *means, *found[behind:]]


def part_names(figures: Figures) -> list[str]:
    """The parts of the reward in a step's metrics."""
    return sorted(
        name.removeprefix(PARTS).removesuffix("/mean") for name in figures if name.startswith(PARTS) and name.endswith("/mean")
    )


def value(each: HeadlineMetric, figures: Figures) -> str:
    """Format the value with its unit; a dash if it was not measured."""
    if each.name not in figures:
        return "-"
    found = figures[each.name]
    return f"{100 * found:.1f}%" if each.is_share else f"{number(found)} {each.unit}".strip()


def change(each: HeadlineMetric, before: Figures | None, now: Figures) -> str:
    """Format a change, such as +0.031 (+9.7%); for shares, in percentage points. A dash if there is nothing to compare."""
    if before is None or each.name not in before or each.name not in now:
        return "-"
    was, difference = before[each.name], now[each.name] - before[each.name]
    if each.is_share:
        return f"{100 * difference:+.1f} points"
    share = f" ({100 * difference / abs(was):+.1f}%)" if was else ""
    return f"{number(difference, sign='+')}{share}"


def number(found: float, sign: str = "-") -> str:
    """Four digits, and all before the point."""
    return f"{found:{sign},.0f}" if abs(found) >= 1000 else f"{found:{sign}.4g}"
