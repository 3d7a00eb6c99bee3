"""Each row of the table is raised by what it is for, and by nothing less."""

import pytest

from infra.reporting import step_warnings
from infra.reporting.step_warnings import WARNING_RULES
from infra.runs.history import Figures, History, history_in
from infra.settings import CHECKOUT

CALM: Figures = {
    "train/entropy": 0.8,
    "mismatch/mean_abs_logprob_diff": 0.004,
    "mismatch/ess": 0.98,
    "rollout/truncated_frac": 0.02,
    "reward/frac_zero_std_groups": 0.3,
    "train/loss": 0.03,
    "train/grad_norm": 0.4,
    "train/clip_frac": 0.01,
    "train/kl_ref": 0.05,
    "reward/mean": 0.4,
    "eval/pass_at_1": 0.42,
    "rollout/tokens_per_s": 1000.0,
    "rollout/lost_replicas": 0.0,
    "memory/after_release_gib": 2.0,
}
ALARMING = {
    "entropy collapse": (0.1, 0.3),
    "mismatch drift": (0.02, 0.01),
    "few effective samples": (0.4, 0.6),
    "many truncated": (0.3, 0.2),
    "most groups flat": (0.6, 0.5),
    "loss spike": (-0.5, 0.25),
    "gradient spike": (2.5, 1.5),
    "much clipping": (0.4, 0.25),
    "far from the base model": (1.5, 0.9),
    "rewards fell": (0.1, 0.25),
    "worse than at first on held-out questions": (0.3, 0.4),
    "rollout became slow": (400.0, 600.0),
    "replica lost": (1.0, 0.0),
    "memory stays in use": (2.6, 2.3),
}
"""By name: a value that raises it after calm steps, and one near it that does not."""
BEFORE = history_in([CALM] * 5, 5)


def names_of(found: list[step_warnings.Triggered]) -> list[str]:
    return [each.alarm.name for each in found]


def test_every_row_is_tested() -> None:
    assert [alarm.name for alarm in WARNING_RULES] == list(ALARMING)


def test_calm_steps_raise_nothing() -> None:
    assert step_warnings.triggered(CALM, BEFORE) == []


@pytest.mark.parametrize("alarm", WARNING_RULES, ids=lambda alarm: alarm.name)
def test_a_figure_beyond_the_limit_raises_its_row_and_no_other(alarm: step_warnings.WarningRule) -> None:
    found = step_warnings.triggered(CALM | {alarm.figure: ALARMING[alarm.name][0]}, BEFORE)
    assert names_of(found) == [alarm.name]
    assert alarm.figure in str(found[0]) and alarm.advice
    assert str(found[0]).endswith(")") == bool(alarm.of), "a limit of its own is said once"


@pytest.mark.parametrize("alarm", WARNING_RULES, ids=lambda alarm: alarm.name)
def test_a_figure_near_the_limit_raises_nothing(alarm: step_warnings.WarningRule) -> None:
    assert step_warnings.triggered(CALM | {alarm.figure: ALARMING[alarm.name][1]}, BEFORE) == []


@pytest.mark.parametrize("alarm", [alarm for alarm in WARNING_RULES if alarm.of], ids=lambda alarm: alarm.name)
def test_without_steps_to_compare_with_nothing_is_raised(alarm: step_warnings.WarningRule) -> None:
    alarming = CALM | {alarm.figure: ALARMING[alarm.name][0]}
    assert step_warnings.triggered(alarming, History([], [])) == []
    if not alarm.figure.startswith("eval/"):
        assert step_warnings.triggered(alarming, history_in([CALM] * 2, 2)) == []


def test_noise_of_figures_that_are_next_to_nothing_raises_nothing() -> None:
    quiet = CALM | {"mismatch/mean_abs_logprob_diff": 2e-7, "train/loss": 1e-6, "train/grad_norm": 1e-9, "reward/mean": 0.01}
    louder = quiet | {"mismatch/mean_abs_logprob_diff": 2e-6, "train/loss": 1e-3, "train/grad_norm": 1e-7, "reward/mean": 0.0}
    assert step_warnings.triggered(louder, history_in([quiet] * 5, 5)) == []


def test_a_figure_that_was_not_measured_raises_nothing() -> None:
    assert step_warnings.triggered({}, BEFORE) == []


def test_drift_is_measured_against_the_first_steps_however_slowly_it_came() -> None:
    slow = [CALM | {"mismatch/mean_abs_logprob_diff": 0.004 * 1.05**step} for step in range(60)]
    assert names_of(step_warnings.triggered(slow[-1], history_in(slow, 59))) == ["mismatch drift"]
    assert step_warnings.triggered(slow[20], history_in(slow, 20)) == []


def test_the_documentation_lists_the_table_as_it_is() -> None:
    lines = (CHECKOUT / "docs/runs.md").read_text().splitlines()
    rows = [f"| {alarm.name} | `{alarm.figure}` {step_warnings.said(alarm)} | {alarm.advice} |" for alarm in WARNING_RULES]
    assert [row for row in rows if row not in lines] == []
