"""Samples of several turns in files."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from shared import sample
from turns import ONE_TURN, THREE_TURNS, TWO_TURNS, sampled, trajectory

from infra.store.samples import SCHEMA, is_judged, read_samples, sample_of, trajectory_of, write_samples
from infra.trajectories.segments import Segment, Trajectory
from infra.trajectories.spans import turn_of_each


def test_a_trajectory_comes_back_from_a_file_with_its_digest(tmp_path: Path) -> None:
    whole = trajectory(*THREE_TURNS, stop="max_turns")
    rewarded = replace(sample_of(whole, 5, 0), reward=1.0, turn_rewards=(0.0, 0.25, 0.75), turn_advantages=(0.5, -0.5, 1.0))
    plain = replace(sample(9), sample_index=1)
    found = read_samples(write_samples(tmp_path / "x.parquet", [rewarded, plain]))
    assert found == [rewarded, plain]
    assert trajectory_of(found[0]) == whole
    assert trajectory_of(found[0]).sha256 == whole.sha256
    assert (found[1].segments, found[1].turn_rewards, found[1].num_turns) == ((), None, 1)


def test_a_file_without_turns_has_the_columns_that_it_had(tmp_path: Path) -> None:
    assert pq.read_schema(write_samples(tmp_path / "x.parquet", [sample()])).names == SCHEMA.names


def test_output_tokens_are_all_after_the_prompt_and_given_ones_have_no_log_probability() -> None:
    two = sampled(*TWO_TURNS)
    assert (two.prompt_tokens, two.output_tokens) == ([1, 2, 3], [4, 5, 6, 7, 8, 9])
    assert two.output_logprobs == [-0.5, -0.125, 0.0, -0.25, -0.375, -0.4375]
    assert two.is_sampled.tolist() == [True, True, False, True, True, True]
    assert (two.num_sampled_tokens, two.num_turns) == (5, 2)
    assert turn_of_each(two.segments).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_an_episode_that_a_limit_ended_is_truncated() -> None:
    assert not sampled(*TWO_TURNS).is_truncated
    assert [sampled(*TWO_TURNS, stop=stop).is_truncated for stop in ("max_turns", "context", "time_out")] == [True] * 3
    assert replace(sample(), finish_reason="length").is_truncated


def test_segments_that_do_not_fit_their_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="segments of 9 tokens do not fit 8"):
        trajectory_of(replace(sampled(*TWO_TURNS), output_tokens=[4, 5, 6, 7, 8]))


def test_a_trajectory_without_sampled_tokens_is_no_sample() -> None:
    with pytest.raises(ValueError, match="no sampled token"):
        sample_of(Trajectory("5/0", (Segment("given", (1,)),)), 5, 0)


def test_a_prompt_in_two_pieces_is_one_prompt() -> None:
    first, *rest = trajectory(*TWO_TURNS).segments
    pieces = (replace(first, tokens=first.tokens[:1]), replace(first, tokens=first.tokens[1:]))
    assert sample_of(Trajectory("5/0", (*pieces, *rest), 0, "done"), 5, 0, "text") == sampled(*TWO_TURNS)


def test_two_branches_of_one_episode_are_no_group() -> None:
    branches = [replace(sampled(*ONE_TURN, branch=branch), reward=1.0) for branch in (0, 1)]
    other = sampled(*ONE_TURN, index=1)
    assert not is_judged([*branches, other])
    assert is_judged([*branches, replace(other, reward=0.0)])
