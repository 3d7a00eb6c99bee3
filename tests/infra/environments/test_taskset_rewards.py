"""What an episode of verifiers comes to: its reward, or an error, and never 0 in the place of one."""

from types import SimpleNamespace
from typing import Any

import pytest

from infra.environments.parts import RESTART, STOP, STOPS
from infra.environments.verifiers_tasks import episode_parts
from infra.environments.verifiers_tasks.episode_parts import parts_of


def trace(**changes: Any) -> Any:
    rewards = {"is_right": SimpleNamespace(score=1.0), "has form!": SimpleNamespace(score=0.5)}
    found = {"rewards": rewards, "metrics": {"letters": 7, "missing": None}, "reward": 1.05, "stop_condition": None, "errors": []}
    return SimpleNamespace(**found | changes)


def episode(*traces: Any, ok: bool = True, errors: tuple[Any, ...] = ()) -> Any:
    return SimpleNamespace(traces=list(traces), ok=ok, errors=list(errors))


def test_an_episodes_reward_is_the_weighted_one_and_its_parts_have_names_that_reports_take() -> None:
    found = parts_of(episode(trace()))
    assert found == {"is_right": 1.0, "has_form_": 0.5, "letters": 7.0, "reward": 1.05, STOP: STOPS.index("done")}


def test_an_episode_that_a_limit_of_turns_ended_says_so() -> None:
    assert parts_of(episode(trace(stop_condition="max_turns_reached")))[STOP] == STOPS.index("max_turns")


def test_an_episode_with_an_error_has_no_reward() -> None:
    error = SimpleNamespace(type="TaskError", message="the judge is\naway")
    with pytest.raises(RuntimeError, match="the taskset's episode failed: TaskError: the judge is away"):
        parts_of(episode(trace(errors=[error]), ok=False))


def test_a_reward_without_a_value_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the taskset's reward 'is_right' has no value"):
        parts_of(episode(trace(rewards={"is_right": None})))


def test_an_episode_with_two_runs_of_its_agent_is_refused() -> None:
    with pytest.raises(RuntimeError, match="2 runs of its agent, 1 is supported"):
        parts_of(episode(trace(), trace()))


def test_the_names_of_parts_are_those_of_other_environments() -> None:
    assert (episode_parts.STOP, episode_parts.RESTART) == (STOP, RESTART)
    assert (STOPS[int(episode_parts.DONE)], STOPS[int(episode_parts.MAX_TURNS)]) == ("done", "max_turns")
