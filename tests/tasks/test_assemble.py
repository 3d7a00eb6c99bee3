import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from turns import TWO_TURNS, sampled, turns_apart

from infra.config import BatchConfig, OverlongConfig
from infra.data.advantages import grpo
from infra.data.packing import packed
from infra.records import FinishReason, ScoredRollouts
from infra.store import routes
from infra.store.files import DigestMismatch, record_of
from infra.store.samples import Sample, read_samples, write_samples
from tasks.assemble import assemble, with_advantages, with_overlong_penalty, without_zero_std_groups

SCORED = Sample(
    prompt_id=0,
    sample_index=0,
    prompt_tokens=[11, 12, 13],
    output_tokens=[21, 22],
    output_logprobs=[-0.5, -1.5],
    finish_reason="stop",
    adapter_version=1,
    adapter_sha256="abc",
    reward=1.0,
    reward_parts={"reward": 1.0},
)


def scored(*groups: list[float], finish_reason: FinishReason = "stop") -> list[Sample]:
    return [
        replace(SCORED, prompt_id=prompt, sample_index=index, reward=reward, finish_reason=finish_reason)
        for prompt, rewards in enumerate(groups)
        for index, reward in enumerate(rewards)
    ]


def test_a_group_is_compared_with_itself_only() -> None:
    samples = with_advantages(scored([1, 0], [9, 9], [5, 7]), BatchConfig(advantage="dr_grpo"))
    assert [sample.advantage for sample in samples] == [0.5, -0.5, 0, 0, -1, 1]
    assert [replace(sample, advantage=None) for sample in samples] == scored([1, 0], [9, 9], [5, 7])
    assert with_advantages(scored([1, 0]), BatchConfig())[0].advantage == grpo([1, 0])[0]


def test_sequences_lie_one_behind_the_other_with_all_figures_at_the_place_of_their_token() -> None:
    samples = [
        replace(SCORED, advantage=0.5),
        replace(
            SCORED, prompt_id=5, prompt_tokens=[14], output_tokens=[23, 24, 25], output_logprobs=[-1, -2, -3], advantage=-2.0
        ),
    ]
    tensors = packed(samples, BatchConfig())
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "tokens": [11, 12, 13, 21, 22, 14, 23, 24, 25],
        "cu_seqlens": [0, 5, 9],
        "loss_mask": [0, 0, 0, 1, 1, 0, 1, 1, 1],
        "rollout_logprobs": [0, 0, 0, -0.5, -1.5, 0, -1, -2, -3],
        "advantages": [0, 0, 0, 0.5, 0.5, 0, -2, -2, -2],
        "groups": [0, 5],
        "rewards": [1, 1],
    }
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "tokens": np.int64,
        "cu_seqlens": np.int64,
        "loss_mask": np.uint8,
        "rollout_logprobs": np.float32,
        "advantages": np.float32,
        "groups": np.int64,
        "rewards": np.float32,
    }


def test_truncated_samples_leave_the_loss_and_nothing_else_where_that_is_asked_for() -> None:
    samples = [replace(SCORED, advantage=1.0, finish_reason="length"), replace(SCORED, advantage=-1.0)]
    plain, masked = packed(samples, BatchConfig()), packed(samples, BatchConfig(mask_truncated=True))
    assert plain["loss_mask"].tolist() == [0, 0, 0, 1, 1] * 2
    assert masked["loss_mask"].tolist() == [0] * 5 + [0, 0, 0, 1, 1]
    assert all((plain[name] == masked[name]).all() for name in plain.keys() - {"loss_mask"})


def test_a_truncated_sample_still_counts_in_the_mean_of_its_group() -> None:
    truncated, other = scored([1, 0])
    samples = [replace(truncated, finish_reason="length"), other]
    config = BatchConfig(advantage="dr_grpo", mask_truncated=True)
    assert [sample.advantage for sample in with_advantages(samples, config)] == [0.5, -0.5]


def recorded(workspace: Path, samples: list[Sample], num_trainable_groups: int = 1) -> ScoredRollouts:
    return ScoredRollouts(
        run="run",
        step=2,
        adapter_version=1,
        adapter_sha256="abc",
        file=record_of(write_samples(workspace / "scored.parquet", samples)),
        num_prompts=2,
        group_size=2,
        temperature=0.7,
        num_samples=len(samples),
        mean_reward=0.5,
        std_reward=0.5,
        num_trainable_groups=num_trainable_groups,
    )


def test_the_batch_file_says_whose_samples_it_holds_at_which_temperature(workspace: Path) -> None:
    made = assemble.fn(BatchConfig(), recorded(workspace, scored([1, 0], [1, 1])))
    path = workspace / "runs/run/steps/000002/batch.safetensors"
    assert made.file == record_of(path)
    assert (made.num_sequences, made.num_tokens, made.num_loss_tokens) == (4, 20, 8)
    assert (made.adapter_version, made.adapter_sha256) == (1, "abc")
    with safetensors.safe_open(path, "numpy") as batch:
        assert batch.metadata() == {"adapter_version": "1", "adapter_sha256": "abc", "temperature": "0.7", "advantage": "grpo"}
    samples = read_samples(path.with_name("assembled.parquet"))
    expected = packed(samples, BatchConfig())
    assert all((tensor == expected[name]).all() for name, tensor in safetensors.numpy.load_file(path).items())
    assert samples == with_advantages(scored([1, 0], [1, 1]), BatchConfig())


def with_routes(samples: list[Sample]) -> list[Sample]:
    """Four rows of one layer, two experts each, other ones in each sample."""
    rows = [np.arange(8, dtype=np.uint8).reshape(4, 1, 2) + 8 * n for n in range(len(samples))]
    return [replace(sample, routes=routes.serialized(found)) for sample, found in zip(samples, rows, strict=True)]


def test_routes_are_at_the_place_of_their_token_and_not_in_the_table_for_people(workspace: Path) -> None:
    samples = with_routes(scored([1, 0]))
    assemble.fn(BatchConfig(), recorded(workspace, samples))
    folder = workspace / "runs/run/steps/000002"
    found = safetensors.numpy.load_file(folder / "batch.safetensors")["routes"]
    assert found.dtype == np.uint8
    assert found[:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 0], [8, 9], [10, 11], [12, 13], [14, 15], [0, 0]]
    assert [sample.routes for sample in read_samples(folder / "assembled.parquet")] == [None, None]
    with pytest.raises(ValueError, match="routes of sample 0 of prompt 0 have 4 rows, its tokens have 5"):
        packed([replace(samples[0], prompt_tokens=[11, 12, 13, 14])], BatchConfig())


def test_retracted_samples_are_dropped_before_advantages_are_computed(workspace: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = with_routes(scored([1, 0, 9], [1, 0]))
    samples = [replace(s, routes=None) if (s.prompt_id, s.sample_index) in ((0, 2), (1, 0)) else s for s in samples]
    with caplog.at_level(logging.WARNING):
        made = assemble.fn(BatchConfig(advantage="dr_grpo"), recorded(workspace, samples))
    assert "2 of 5 samples of step 2 are dropped: the engine retracted them" in caplog.text
    shown = read_samples(workspace / "runs/run/steps/000002/assembled.parquet")
    assert [(s.prompt_id, s.sample_index, s.advantage) for s in shown] == [(0, 0, 0.5), (0, 1, -0.5)], (
        "a group of one is dropped too"
    )
    assert made.num_sequences == 2


def test_the_same_samples_make_the_same_batch_to_the_byte(workspace: Path) -> None:
    rollouts = recorded(workspace, scored([1, 0], [1, 1]))
    assert len({assemble.fn(BatchConfig(), rollouts).file.sha256 for _ in range(10)}) == 1


def test_a_batch_with_nothing_to_learn_from_is_refused(workspace: Path) -> None:
    rollouts = recorded(workspace, scored([1, 0], [1, 1], finish_reason="length"))
    with pytest.raises(ValueError, match="all 4 samples of step 2 ran into max_output_tokens and are masked"):
        assemble.fn(BatchConfig(mask_truncated=True), rollouts)
    assert assemble.fn(BatchConfig(), rollouts).num_loss_tokens == 8


def test_a_step_of_equal_rewards_goes_on_with_a_warning(workspace: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = assemble.fn(BatchConfig(), recorded(workspace, scored([1, 1], [0, 0]), num_trainable_groups=0))
    assert "every group of step 2 has equal rewards" in caplog.text
    assert not safetensors.numpy.load_file(workspace / made.file.path)["advantages"].any()


def test_a_table_of_samples_that_cannot_be_written_stops_the_step(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = recorded(workspace, scored([1, 0]))

    def full(path: Path, samples: list[Sample]) -> Path:
        raise OSError(f"no room for {path.name}")

    monkeypatch.setitem(assemble.fn.__globals__, "write_samples", full)
    with pytest.raises(OSError, match=r"no room for assembled\.parquet"):
        assemble.fn(BatchConfig(), rollouts)


def test_what_has_changed_on_the_disk_is_not_assembled(workspace: Path) -> None:
    rollouts = recorded(workspace, scored([1, 0]))
    write_samples(workspace / "scored.parquet", scored([0, 1]))
    with pytest.raises(DigestMismatch, match=r"scored\.parquet has changed"):
        assemble.fn(BatchConfig(), rollouts)


@pytest.mark.parametrize(("length", "penalty"), [(50, 0), (80, 0), (90, -0.5), (100, -1), (110, -1)])
def test_the_overlong_penalty_is_that_of_dapo_in_trl(length: int, penalty: float) -> None:
    """Source: TRL, TestSoftOverlongPunishmentReward of tests/test_rewards.py at f2cd577; DAPO (arXiv 2503.14476) eq. 13."""
    samples = [replace(SCORED, output_tokens=[1] * length, reward=0.25)]
    config = OverlongConfig(max_output_tokens=100, buffer_tokens=20)
    assert with_overlong_penalty(samples, config)[0].reward == pytest.approx(0.25 + penalty)
    assert with_overlong_penalty(samples, config.but(penalty=0.5))[0].reward == pytest.approx(0.25 + 0.5 * penalty)
    assert with_overlong_penalty(samples, OverlongConfig()) == samples


def test_the_overlong_penalty_comes_before_the_advantages(workspace: Path) -> None:
    short, long = scored([1, 1])
    long = replace(long, output_tokens=[1] * 4, output_logprobs=[-1.0] * 4)
    config = BatchConfig(
        advantage="dr_grpo", overlong=OverlongConfig(max_output_tokens=4, buffer_tokens=2), drop_zero_std_groups=True
    )
    made = assemble.fn(config, recorded(workspace, [short, long]))
    tensors = safetensors.numpy.load_file(workspace / made.file.path)
    assert tensors["rewards"].tolist() == [1, 0]
    assert tensors["advantages"].tolist() == [0] * 3 + [0.5] * 2 + [0] * 3 + [-0.5] * 4


def test_flat_groups_are_left_out_where_that_is_asked_for_and_the_counts_say_so(workspace: Path) -> None:
    rollouts = recorded(workspace, scored([1, 0], [1, 1], [0, 2]))
    made = assemble.fn(BatchConfig(drop_zero_std_groups=True), rollouts)
    assert (made.num_sequences, made.num_tokens, made.num_loss_tokens, made.num_dropped_groups) == (4, 20, 8, 1)
    assert safetensors.numpy.load_file(workspace / made.file.path)["groups"].tolist() == [0, 0, 2, 2]
    assert assemble.fn(BatchConfig(), rollouts).num_dropped_groups == 0


def test_more_groups_than_are_wanted_make_a_full_batch_although_some_are_flat(workspace: Path) -> None:
    rollouts = recorded(workspace, scored([1, 1], [1, 0], [2, 2], [0, 2], [3, 0]))
    made = assemble.fn(BatchConfig(drop_zero_std_groups=True, max_groups=2), rollouts)
    assert safetensors.numpy.load_file(workspace / made.file.path)["groups"].tolist() == [1, 1, 3, 3]
    assert (made.num_sequences, made.num_dropped_groups) == (4, 3)


def test_where_all_groups_are_flat_none_is_dropped(workspace: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its prompts and samples are made: a run that refused them could never go on."""
    rollouts = recorded(workspace, scored([1, 1], [0, 0]), num_trainable_groups=0)
    made = assemble.fn(BatchConfig(drop_zero_std_groups=True), rollouts)
    assert (made.num_sequences, made.num_dropped_groups) == (4, 0)
    assert "every group of step 2 has equal rewards: this step teaches nothing" in caplog.text


def test_groups_of_equal_rewards_teach_something_where_the_batch_is_the_baseline(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts = recorded(workspace, scored([1], [0], [1]), num_trainable_groups=0)
    assemble.fn(BatchConfig(advantage="reinforce_pp"), rollouts)
    assert "teaches nothing" not in caplog.text


def test_masked_samples_do_not_count_in_reinforce_pp() -> None:
    truncated, *others = scored([100, 1, 0])
    config = BatchConfig(advantage="reinforce_pp", mask_truncated=True)
    made = with_advantages([replace(truncated, finish_reason="length"), *others], config)
    assert [sample.advantage for sample in made[1:]] == [sample.advantage for sample in with_advantages(others, config)]


def flat_group(*, of_turns: tuple[tuple[float, float], tuple[float, float]]) -> list[Sample]:
    """Two episodes of reward 1, each of two turns that are trajectories."""
    wholes = [replace(sampled(*TWO_TURNS, index=index), reward=1.0, turn_rewards=each) for index, each in enumerate(of_turns)]
    return [turn for whole in wholes for turn in turns_apart(whole, TWO_TURNS)]


def test_a_group_whose_episodes_have_equal_turns_is_flat_although_its_trajectories_differ() -> None:
    equal, different = flat_group(of_turns=((0.0, 1.0), (0.0, 1.0))), flat_group(of_turns=((0.0, 1.0), (1.0, 0.0)))
    assert without_zero_std_groups(equal, "turn") == without_zero_std_groups(different, "episode") == []
    assert without_zero_std_groups(different, "turn") == different


def test_an_episode_of_several_trajectories_has_one_overlong_penalty() -> None:
    """Its turns have 2 and 3 sampled tokens."""
    found = with_overlong_penalty(flat_group(of_turns=((0, 1), (0, 1))), OverlongConfig(max_output_tokens=6, buffer_tokens=2))
    assert [each.reward for each in found] == [0.5] * 4
