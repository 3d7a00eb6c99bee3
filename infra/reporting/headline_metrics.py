"""The headline figures of a step and of a run, in the order in which a person asks, and all other figures grouped by the part of the step.

Is the reward rising? Do held-out questions agree? What has the step changed? How long are the answers, where did the time go, and are
engine and trainer one? Warnings are the tenth figure (infra/reporting/step_warnings.py).
"""

from collections.abc import Mapping
from typing import NamedTuple

from infra.runs.history import Figures, LastEvaluation

PASS_AT_1 = "eval/pass_at_1"
GPU_IDLE = ("gpu_idle/to_training_s", "gpu_idle/to_sampling_s")
IDLE = "gpu_idle/all_s"
"""Sum of GPU_IDLE; in no store."""


class Detail(NamedTuple):
    """A figure that stands beside a headline metric."""

    name: str
    label: str
    unit: str = ""
    is_share: bool = False


class HeadlineMetric(NamedTuple):
    name: str
    """In MLflow."""
    label: str
    unit: str = ""
    is_share: bool = False
    """Shown in percent."""
    details: tuple[Detail, ...] = ()


HEADLINE_METRICS = (
    HeadlineMetric("reward/mean", "reward"),
    HeadlineMetric(PASS_AT_1, "pass@1, last evaluation", is_share=True),
    HeadlineMetric("reward/frac_zero_std_groups", "groups that teach nothing", is_share=True),
    HeadlineMetric("train/grad_norm", "gradient norm", details=(Detail("train/loss", "loss"),)),
    HeadlineMetric("train/entropy", "entropy", "nats"),
    HeadlineMetric(
        *("rollout/mean_output_tokens", "tokens a sample"),
        details=(Detail("rollout/truncated_frac", "truncated", is_share=True),),
    ),
    HeadlineMetric(
        *("time/step_s", "time of the step", "s"),
        details=(
            Detail("time/roll_out_s", "rollout", "s"),
            Detail("time/train_s", "train", "s"),
            Detail("time/overhead_s", "overhead", "s"),
        ),
    ),
    HeadlineMetric(IDLE, "GPU idle", "s"),
    HeadlineMetric("mismatch/mean_abs_logprob_diff", "engine vs trainer", "nats"),
)
"""With the warnings they are ten."""

GROUPS = ("reward", "reward_parts", "eval", "train", "rollout", "episodes", "mismatch", "time", "gpu_idle", "memory")
"""Beginnings of metrics' names, in the order of the report; others follow by alphabet."""
PARTS = "reward_parts/"
"""The beginning of the metrics of a reward's parts: `reward_parts/<part>/mean` and `/std`."""


def with_evaluation(figures: Figures, last: LastEvaluation | None) -> Figures:
    """A step's figures with what the headline adds to them: the last evaluation, and the GPU idle time of both kinds together."""
    idle = [figures[name] for name in GPU_IDLE if name in figures]
    return figures | ({PASS_AT_1: last.pass_at_1} if last else {}) | ({IDLE: sum(idle)} if idle else {})


def with_evaluation_before(before: Figures | None, last: LastEvaluation | None) -> Figures | None:
    """The same of the step before, with the evaluation before the last one."""
    if before is None:
        return None
    evaluated = {PASS_AT_1: last.before} if last and last.before is not None else {}
    return with_evaluation(before, None) | evaluated


def known(figures: Figures) -> list[HeadlineMetric]:
    """The headline metrics that were measured, the mean of each part of the reward behind the mean reward."""
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
    return _shown(each, figures[each.name]) if each.name in figures else "-"


def details(each: HeadlineMetric, figures: Figures) -> str:
    """Format the figures that stand beside it, such as `rollout 4.1 s, train 1.2 s`; empty if there are none."""
    return ", ".join(
        f"{detail.label} {_shown(detail, figures[detail.name])}" for detail in each.details if detail.name in figures
    )


def _shown(each: HeadlineMetric | Detail, found: float) -> str:
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


def grouped(figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """All figures by the beginning of their names, in the order of GROUPS; the names without it."""
    beginnings = sorted({name.partition("/")[0] for name in figures}, key=lambda group: (_rank(group), group))
    return {
        group: {name.partition("/")[2]: figures[name] for name in sorted(figures) if name.partition("/")[0] == group}
        for group in beginnings
    }


def _rank(group: str) -> int:
    return GROUPS.index(group) if group in GROUPS else len(GROUPS)
