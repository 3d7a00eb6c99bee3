"""A curriculum: which rows a step draws, by the pass rate that was measured when a row was drawn last.

step k: pass_rates.jsonl + scored groups  -->  step k + 1: pass_rates.jsonl --> its rows

A step's pass_rates.jsonl is all that its draws depend on, besides the run's seed and the step's number. It is recorded by its digest, so a
step that is resumed, replayed or made on another machine draws the same rows.

Sources: Foster et al., Learning to Reason at the Frontier of Learnability (arXiv 2502.12272), which draws by p(1 - p); Bae et al., Online
Difficulty Filtering for Reasoning Oriented Reinforcement Learning (arXiv 2504.03380), which keeps rows whose pass rate is in an interval.
Unlike there, nothing is sampled only to measure: the rates are those of the groups that steps have sampled anyway.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from infra.config import DataConfig

PRIOR_PASSED, PRIOR_JUDGED = 1, 2
"""What counts as seen of every row before its samples: one of two passed. So no row's weight is 0, and an unseen row has the largest, 1/4."""


class PassRate(NamedTuple):
    """The newest measurement of a row; but for `row_number`, a line of pass_rates.jsonl."""

    pass_rate: float
    """Mean reward of the judged samples, each cut to 0 to 1."""
    num_judged: int
    step: int

    @property
    def expected(self) -> float:
        """The pass rate with the prior, strictly between 0 and 1."""
        return (self.pass_rate * self.num_judged + PRIOR_PASSED) / (self.num_judged + PRIOR_JUDGED)


PassRates = Mapping[int, PassRate]
"""By row number."""
UNSEEN = PassRate(pass_rate=0.0, num_judged=0, step=-1)


def pass_rate_of(rewards: Sequence[float]) -> float:
    """Mean of the rewards of a row's samples, each cut to 0 to 1."""
    return fmean(min(1.0, max(0.0, reward)) for reward in rewards)


def lines_of(rates: PassRates) -> list[dict[str, Any]]:  # Any: JSON
    """The lines of pass_rates.jsonl, by row number."""
    return [{"row_number": number} | rates[number]._asdict() for number in sorted(rates)]


def rates_of(lines: Iterable[dict[str, Any]]) -> dict[int, PassRate]:  # Any: JSON
    """Return the pass rates of the lines of pass_rates.jsonl, by row number."""
    return {line["row_number"]: PassRate(line["pass_rate"], line["num_judged"], line["step"]) for line in lines}


def ordered(config: DataConfig, usable: Sequence[int], rates: PassRates, *, step: int, seed: int) -> list[int]:
    """Put the rows of a data set in the order in which a step draws them. Each is there once; the first draw takes the first ones.

    With `between`, rows outside of the interval come last, those first that were not measured for longest. They are drawn where there are too
    few others.

    Source of the weighted order: Efraimidis and Spirakis, Weighted random sampling with a reservoir (2006): the key -log(u) / weight.
    """
    chance = random.Random(f"curriculum/{seed}/{step}")
    keys = {number: -math.log(1.0 - chance.random()) for number in usable}
    if config.curriculum == "between":
        outside = {number for number in usable if not is_inside(config, rates.get(number, UNSEEN))}
        return sorted(usable, key=lambda number: (rates[number].step if number in outside else -1, keys[number]))
    expected = {number: rates.get(number, UNSEEN).expected for number in usable}
    return sorted(usable, key=lambda number: keys[number] / (expected[number] * (1 - expected[number])))


def is_inside(config: DataConfig, rate: PassRate) -> bool:
    """Whether a row's pass rate is in data.pass_rate_between. An unseen row's is."""
    assert config.pass_rate_between, "the section has it with this curriculum"
    low, high = config.pass_rate_between
    return not rate.num_judged or low <= rate.pass_rate <= high


def counts_of(config: DataConfig, rates: PassRates, drawn: Sequence[int]) -> dict[str, float]:
    """Return a step's metrics of its curriculum.

    drawn: Row numbers of its (first) draw.
    """
    seen = [rates[number] for number in drawn if number in rates]
    found = {
        "curriculum/num_measured_rows": float(len(rates)),
        "curriculum/unseen_frac": 1 - len(seen) / len(drawn),
    }
    if seen:
        found["curriculum/mean_pass_rate"] = fmean(rate.pass_rate for rate in seen)
    if config.curriculum == "between":
        found["curriculum/num_outside"] = float(sum(not is_inside(config, rate) for rate in seen))
    return found
