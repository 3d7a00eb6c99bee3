"""The figures that a person asks for first, with their units, and how they moved."""

from typing import NamedTuple

from infra.runs.history import Figures


class KeyFigure(NamedTuple):
    name: str
    """In MLflow."""
    label: str
    unit: str = ""
    is_share: bool = False
    """Shown in percent."""


KEY_FIGURES = (
    KeyFigure("reward/mean", "mean reward"),
    KeyFigure("reward/frac_zero_std_groups", "flat groups", is_share=True),
    KeyFigure("rollout/truncated_frac", "truncated samples", is_share=True),
    KeyFigure("rollout/tokens_per_s", "rollout speed", "tokens/s"),
    KeyFigure("train/loss", "loss"),
    KeyFigure("train/grad_norm", "gradient norm"),
    KeyFigure("train/entropy", "entropy", "nats"),
    KeyFigure("mismatch/mean_abs_logprob_diff", "engine vs trainer", "nats"),
    KeyFigure("train/tokens_per_s", "training speed", "tokens/s"),
    KeyFigure("time/step_s", "time of the step", "s"),
    KeyFigure("memory/inference_gib", "memory while sampling", "GiB"),
    KeyFigure("memory/training_gib", "memory while training", "GiB"),
)

PARTS = "reward_parts/"
"""The beginning of the metrics of a reward's parts: `reward_parts/<part>/mean` and `/std`."""


def known(figures: Figures) -> list[KeyFigure]:
    """The key figures that were measured, the mean of each part of the reward behind the mean reward."""
    found = [each for each in KEY_FIGURES if each.name in figures]
    means = [KeyFigure(f"{PARTS}{part}/mean", f"mean of part {part}") for part in part_names(figures)]
    behind = sum(each.name == "reward/mean" for each in found[:1])
    return [*found[:behind], *means, *found[behind:]]


def part_names(figures: Figures) -> list[str]:
    """The parts of the reward in a step's metrics."""
    return sorted(
        name.removeprefix(PARTS).removesuffix("/mean") for name in figures if name.startswith(PARTS) and name.endswith("/mean")
    )


def value(each: KeyFigure, figures: Figures) -> str:
    """With its unit; a dash where it was not measured."""
    if each.name not in figures:
        return "-"
    found = figures[each.name]
    return f"{100 * found:.1f}%" if each.is_share else f"{number(found)} {each.unit}".strip()


def change(each: KeyFigure, before: Figures | None, now: Figures) -> str:
    """Such as +0.031 (+9.7%), of shares in percentage points; a dash where there is nothing to compare."""
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
