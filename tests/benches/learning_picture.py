"""The picture of learning_curves.py: what runs learn, in blue, and what their control does not, in grey."""

import io
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from infra.store.files import write

BLUE, ORANGE, GREY = "#1f5fbf", "#d9822b", "#7a7a7a"


class Point(NamedTuple):
    """What one evaluation found."""

    greedy: float
    """Share of questions whose likeliest answer is right."""
    sampled: float
    """The same for answers sampled at temperature 1, as rollouts are: mean over all of them."""
    worked: float
    """Share of the sampled answers that are worked out."""
    right_when_worked: float | None
    """Share of these that are right; None where there are none."""


class Curves(NamedTuple):
    name: str
    is_control: bool
    rewards: list[float]
    """Mean reward by step."""
    points: dict[int, Point]
    """By adapter version."""
    seconds: float | None
    """Of the whole run, evaluations included; None where it was interrupted and went on."""


def draw(found: list[Curves], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.6), sharex=True, sharey=True, constrained_layout=True)
    figure.suptitle(title, fontsize=13)
    sampled, greedy, rewards, reasons = axes.flat
    _panel(sampled, "Held-out questions: sampled answers that are right", found, _of_points(lambda point: point.sampled))
    _panel(greedy, "Held-out questions: greedy answers that are right", found, _of_points(lambda point: point.greedy))
    _panel(rewards, "Training questions: mean reward of the samples", found, _rewards)
    worked = _of_points(lambda point: point.worked)
    _panel(reasons, "Why: held-out sampled answers", found, worked, labels=("worked out, not guessed", "control: worked out"))
    _learning(reasons, found, _of_points(lambda point: point.right_when_worked), ORANGE, "right, of those worked out")
    sampled.legend(loc="upper left", frameon=False)
    reasons.legend(loc="lower right", frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("RL steps taken")
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes[:, 0]:
        axis.set_ylabel("share of answers")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    write(path, buffer.getvalue())


Curve = Callable[[Curves], dict[int, float]]


def _of_points(value: Callable[[Point], float | None]) -> Curve:
    """By adapter version, where there is a value."""

    def curve(curves: Curves) -> dict[int, float]:
        found = {version: value(point) for version, point in sorted(curves.points.items())}
        return {version: share for version, share in found.items() if share is not None}

    return curve


def _rewards(curves: Curves) -> dict[int, float]:
    return dict(enumerate(curves.rewards))


def mean_of(curves: list[dict[int, float]]) -> dict[int, float]:
    """Where all of them have a value."""
    shared = sorted(set.intersection(*map(set, curves)))
    return {x: fmean(curve[x] for curve in curves) for x in shared}


def _panel(
    axis: Any,  # matplotlib is not there for the type checker
    title: str,
    found: list[Curves],
    curve: Curve,
    *,
    labels: tuple[str, str] = ("mean of the seeds (thin: each seed)", "control: rewards shuffled"),
) -> None:
    _learning(axis, found, curve, BLUE, labels[0])
    for control in (curves for curves in found if curves.is_control):
        values = curve(control)
        axis.plot(list(values), list(values.values()), color=GREY, linestyle="--", linewidth=2, label=labels[1])
    axis.set_title(title, fontsize=11)
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _learning(axis: Any, found: list[Curves], curve: Curve, color: str, label: str) -> None:
    """Each seed thin, their mean thick, what lies between the lowest and the highest shaded."""
    learning = [curve(curves) for curves in found if not curves.is_control]
    for values in learning:
        axis.plot(list(values), list(values.values()), color=color, alpha=0.45, linewidth=1)
    mean = mean_of(learning)
    lowest, highest = ([choose(values[x] for values in learning) for x in mean] for choose in (min, max))
    axis.fill_between(list(mean), lowest, highest, color=color, alpha=0.12, linewidth=0)
    axis.plot(list(mean), list(mean.values()), color=color, linewidth=2.5, marker="o", markersize=4, label=label)
