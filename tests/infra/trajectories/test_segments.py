"""Segments and trajectories: what they refuse, their JSON form and their digest."""

from dataclasses import replace

import orjson
import pytest

from infra.trajectories.segments import Segment, Trajectory

PROMPT = Segment("given", (1, 2, 3))
ANSWER = Segment("sampled", (4, 5), 0, (-0.5, -0.1), 3, "a" * 64, 17, "stop")
RESULT = Segment("given", (6,), 1)
NEXT = Segment("sampled", (7,), 1, (-0.25,), 4, "b" * 64, 18, "length")
TRAJECTORY = Trajectory("5/0", (PROMPT, ANSWER, RESULT, NEXT), stop_reason="max_turns")


def test_a_trajectory_knows_its_tokens_and_which_were_sampled() -> None:
    assert TRAJECTORY.tokens == (1, 2, 3, 4, 5, 6, 7)
    assert TRAJECTORY.is_sampled == (False, False, False, True, True, False, True)
    assert (TRAJECTORY.num_turns, TRAJECTORY.num_sampled_tokens) == (2, 3)


def test_the_json_form_comes_back_equal() -> None:
    again = Trajectory.from_json(orjson.loads(orjson.dumps(TRAJECTORY.to_json())))
    assert again == TRAJECTORY
    assert again.sha256 == TRAJECTORY.sha256


@pytest.mark.parametrize(
    "changed",
    [
        replace(ANSWER, tokens=(4, 6)),
        replace(ANSWER, logprobs=(-0.5, -0.2)),
        replace(ANSWER, adapter_version=4),
        replace(ANSWER, adapter_sha256="c" * 64),
        replace(ANSWER, sampling_seed=18),
        replace(ANSWER, finish_reason="length"),
    ],
)
def test_the_digest_covers_every_field_of_a_segment(changed: Segment) -> None:
    assert replace(TRAJECTORY, segments=(PROMPT, changed, RESULT, NEXT)).sha256 != TRAJECTORY.sha256


def test_the_digest_covers_episode_branch_and_reason() -> None:
    others = [replace(TRAJECTORY, episode="6/0"), replace(TRAJECTORY, branch=1), replace(TRAJECTORY, stop_reason="done")]
    assert len({TRAJECTORY.sha256, *(other.sha256 for other in others)}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": (-0.5,)}, "2 tokens with 1 log-probabilities"),
        ({"logprobs": (-0.5, float("nan"))}, "log-probability nan"),
        ({"logprobs": (-0.5, 0.1)}, "log-probability 0.1"),
        ({"adapter_version": None}, "names no adapter"),
        ({"adapter_sha256": ""}, "names no adapter"),
        ({"finish_reason": None}, "finish reason None"),
        ({"tokens": (), "logprobs": ()}, "no tokens"),
        ({"tokens": (4, -5)}, "token -5"),
        ({"kind": "given"}, "only sampled segments"),
        ({"kind": "said"}, "kind is 'said'"),
        ({"turn": -1}, "from 0"),
    ],
)
def test_a_segment_refuses_what_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(ANSWER, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((), "begin with a given"),
        ((ANSWER,), "begin with a given"),
        ((PROMPT, ANSWER, replace(NEXT, turn=0)), "not aborted"),
        ((PROMPT, ANSWER, replace(RESULT, turn=0)), "begins the next turn"),
        ((PROMPT, replace(ANSWER, turn=1)), "turn 1 follows turn 0"),
    ],
)
def test_a_trajectory_refuses_segments_out_of_order(segments: tuple[Segment, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trajectory("5/0", segments)


def test_an_aborted_answer_is_continued_by_another_adapter_in_the_same_turn() -> None:
    begun = replace(ANSWER, finish_reason="abort")
    whole = Trajectory("5/0", (PROMPT, begun, replace(NEXT, turn=0)))
    assert whole.num_turns == 1


def test_json_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="not a trajectory"):
        Trajectory.from_json({"episode": "5/0"})
