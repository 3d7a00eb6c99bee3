"""The figures of a run's steps and evaluations, read from its files."""

from typing import NamedTuple

from infra.config import EvalConfig
from infra.runs import evaluations
from infra.store.files import read_json
from infra.store.layout import StepFolder

Figures = dict[str, float]
NUM_FIRST, NUM_RECENT = 3, 10


class History(NamedTuple):
    """The steps with which a step is compared. Only a few steps of a long run, so that step 1000 costs no more than step 10."""

    first: list[Figures]
    """Figures of the run's first steps, before this one."""
    recent: list[Figures]
    """Figures of the latest steps before this one, in order."""


def figures_at(run: str, step: int) -> Figures | None:
    """Return a step's figures. None if the step does not exist: not made yet, or the run started with a replay of a later one."""
    path = StepFolder.at(run, step).report
    if not path.exists():
        return None
    figures: Figures = read_json(path)["metrics"]
    return figures


def history_before(run: str, step: int) -> History:
    """Return the history of the run's steps before this one."""
    first = range(min(step, NUM_FIRST))
    return History(_known(run, first), _known(run, range(max(0, step - NUM_RECENT), step)))


def history_in(steps: list[Figures], number: int) -> History:
    """The same, from figures that have been read already."""
    return History(steps[: min(number, NUM_FIRST)], steps[max(0, number - NUM_RECENT) : number])


def _known(run: str, steps: range) -> list[Figures]:
    return [figures for step in steps if (figures := figures_at(run, step)) is not None]


class LastEvaluation(NamedTuple):
    """The latest of a run's own evaluations, and the previous one."""

    version: int
    """Version of the evaluated adapter."""
    pass_at_1: float
    before: float | None
    first: float
    """Score of the run's first evaluation."""


def last_evaluation(run: str, eval_config: EvalConfig, upto: int) -> LastEvaluation | None:
    """Return the last evaluation of adapter versions up to this one."""
    found = [each for each in evaluations.of_run(run, eval_config) if each.step <= upto]
    if not found:
        return None
    return LastEvaluation(
        found[-1].step, found[-1].pass_at_1, found[-2].pass_at_1 if len(found) > 1 else None, found[0].pass_at_1
    )
