from dataclasses import replace
from pathlib import Path

import pytest
from shared import sample
from turns import ONE_TURN, THREE_TURNS, sampled, turns_apart

from infra.config import BatchConfig, RewardConfig
from infra.data.prompts import Prompt
from infra.records import PromptBatch, Rollouts
from infra.rewards import client
from infra.rewards.outcome import Outcome
from infra.rewards.scores import ScoreJournal
from infra.store.files import DigestMismatch, record_of, write_json_lines
from infra.store.samples import Sample, read_samples, write_samples
from infra.telemetry.timings import measures_of
from tasks import rewards
from tasks.assemble import assemble
from tasks.commit_step import metrics_of
from tasks.rewards.apply import judged
from tasks.score import num_trainable_groups, score, shuffled
from tasks.support.rollout import counts_of

PROMPTS = [Prompt(8, 0, "2 + 2?", "#### 4", [1], 0), Prompt(9, 1, "2 + 3?", "#### 5", [2], 0)]
SAMPLED = sample(prompt_id=8)


def saying(*texts: str) -> list[Sample]:
    """Two samples of each of the two prompts."""
    return [replace(SAMPLED, prompt_id=8 + n // 2, sample_index=n % 2, text=text) for n, text in enumerate(texts)]


def two_parts(*, question: str, completion: str, answer: str) -> dict[str, float]:
    return {"asked": float(question == "2 + 3?"), "half": 0.5 * (completion == answer)}


def lost(*, question: str, completion: str, answer: str) -> float:
    return float("nan")


def rewarded(samples: list[Sample], prompts: list[Prompt], name: str) -> list[Sample]:
    return judged(RewardConfig(name=name), samples, prompts, Path("not_used"), {})


def recorded(workspace: Path, samples: list[Sample]) -> tuple[Rollouts, PromptBatch]:
    asked = write_json_lines(workspace / "prompts.jsonl", (prompt._asdict() for prompt in PROMPTS))
    said = write_samples(workspace / "samples.parquet", samples)
    rollouts = Rollouts(
        run="run",
        step=3,
        adapter_version=1,
        adapter_sha256="abc",
        file=record_of(said),
        num_prompts=2,
        group_size=2,
        temperature=0.7,
        num_samples=4,
        num_output_tokens=4,
        num_truncated=0,
    )
    prompts = PromptBatch(run="run", step=3, file=record_of(asked), num_prompts=2, dataset_fingerprint="", first_row=8)
    return rollouts, prompts


def test_each_sample_is_measured_by_the_answer_of_its_own_prompt() -> None:
    samples = saying("#### 4", "#### 5", "#### 4", "#### 5")
    scored = rewarded(samples, PROMPTS[::-1], "gsm8k_numeric")
    assert [sample.reward for sample in scored] == [1.0, 0.0, 0.0, 1.0]
    assert [replace(sample, reward=None, reward_parts=None) for sample in scored] == samples


def test_a_reward_is_the_sum_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(judged.__globals__["rewards"].BUILT_IN, "two_parts", two_parts)
    scored = rewarded(saying("#### 4", "no", "#### 4", "#### 5"), PROMPTS, "two_parts")
    assert [sample.reward for sample in scored] == [0.5, 0.0, 1.0, 1.5]
    assert scored[3].reward_parts == {"asked": 1.0, "half": 0.5}


def test_a_reward_that_is_no_number_stops_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(judged.__globals__["rewards"].BUILT_IN, "lost", lost)
    with pytest.raises(
        ValueError, match=r"reward 'lost' could not judge 1 of 1 samples \(no number 1\), .*: returned nan for 'reward'"
    ):
        rewarded(saying("#### 4"), PROMPTS, "lost")


def test_a_group_of_equal_rewards_is_not_trainable() -> None:
    samples = saying("#### 4", "#### 5", "no", "no")
    assert num_trainable_groups(rewarded(samples, PROMPTS, "gsm8k_numeric")) == 1
    assert num_trainable_groups(rewarded(saying("4", "4", "5", "5"), PROMPTS, "gsm8k_numeric")) == 0


def test_the_record_says_what_the_file_holds(workspace: Path) -> None:
    rollouts, prompts = recorded(workspace, saying("#### 4", "no", "no", "no"))
    scored = score.fn(RewardConfig(name="gsm8k_numeric"), rollouts, prompts)
    path = workspace / "runs/run/steps/000003/scored.parquet"
    assert scored.file == record_of(path)
    assert [sample.reward for sample in read_samples(path)] == [1.0, 0.0, 0.0, 0.0]
    assert (scored.mean_reward, scored.num_trainable_groups, scored.num_samples) == (0.25, 1, 4)
    assert scored.std_reward == pytest.approx(0.1875**0.5)
    shared = {"run", "step", "adapter_version", "adapter_sha256", "num_prompts", "group_size", "temperature"}
    assert scored.model_dump(include=shared) == rollouts.model_dump(include=shared)
    assert measures_of("run", 3)["score"]["seconds"] > 0


def test_scoring_twice_gives_the_same_record(workspace: Path) -> None:
    rollouts, prompts = recorded(workspace, saying("#### 4", "no", "no", "no"))
    assert score.fn(RewardConfig(), rollouts, prompts) == score.fn(RewardConfig(), rollouts, prompts)


@pytest.mark.parametrize("name", ["samples.parquet", "prompts.jsonl"])
def test_what_has_changed_on_the_disk_is_not_scored(workspace: Path, name: str) -> None:
    rollouts, prompts = recorded(workspace, saying("#### 4", "no", "no", "no"))
    (workspace / name).write_bytes(b"")
    with pytest.raises(DigestMismatch, match=name):
        score.fn(RewardConfig(), rollouts, prompts)


def test_the_control_has_the_same_rewards_at_other_samples(workspace: Path) -> None:
    samples = [
        replace(SAMPLED, prompt_id=8 + n // 8, sample_index=n % 8, reward=float(n), reward_parts={"x": float(n)})
        for n in range(64)
    ]
    mixed = shuffled(samples, seed=3, step=0)
    assert [replace(sample, reward=None, reward_parts=None) for sample in mixed] == [
        replace(sample, reward=None, reward_parts=None) for sample in samples
    ]
    found = [sample.reward for sample in mixed]
    assert sorted(found) == list(range(64))  # type: ignore[type-var]
    assert sum(reward == number for number, reward in enumerate(found)) < 8
    assert all(sample.reward_parts == {"x": sample.reward} for sample in mixed)
    assert mixed == shuffled(samples, seed=3, step=0)
    assert mixed != shuffled(samples, seed=3, step=1)
    assert mixed != shuffled(samples, seed=4, step=0)


def test_rewards_are_shuffled_only_where_that_is_asked_for(workspace: Path) -> None:
    rollouts, prompts = recorded(workspace, saying("#### 4", "#### 4", "no", "no"))
    plain = score.fn(RewardConfig(), rollouts, prompts)
    assert [sample.reward for sample in read_samples(workspace / plain.file.path)] == [1, 1, 0, 0]
    orders = set()
    for seed in range(8):
        control = score.fn(RewardConfig(shuffle_seed=seed), rollouts, prompts)
        assert control.mean_reward == plain.mean_reward
        orders.add(tuple(sample.reward for sample in read_samples(workspace / control.file.path)))
    assert len(orders) > 2


def test_parts_of_a_reward_become_metrics_of_the_step(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(judged.__globals__["rewards"].BUILT_IN, "two_parts", two_parts)
    rollouts, prompts = recorded(workspace, saying("#### 4", "no", "#### 4", "#### 5"))
    scored = score.fn(RewardConfig(name="two_parts"), rollouts, prompts)
    trained = {"peak_memory_gib": 0.0, "metrics": {}, "seconds": {}}
    metrics = metrics_of(rollouts, scored, trained, {})
    parts = {name: value for name, value in metrics.items() if name.startswith("reward_parts/")}
    assert parts == {
        "reward_parts/asked/mean": 0.5,
        "reward_parts/asked/std": 0.5,
        "reward_parts/half/mean": 0.25,
        "reward_parts/half/std": 0.25,
    }
    plain = score.fn(RewardConfig(name="gsm8k_numeric"), rollouts, prompts)
    assert not any(name.startswith("reward_parts/") for name in metrics_of(rollouts, plain, trained, {}))


def test_a_step_with_a_reward_of_a_users_own_says_what_is_unjudged_and_leaves_no_journal(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(*, completion):\n    return None if completion == 'no' else float(completion[-1])\n"
    )
    rollouts, prompts = recorded(workspace, saying("#### 4", "no", "#### 4", "#### 5"))
    config = RewardConfig(name=f"{tmp_path}/mine.py:score", max_unjudged_frac=0.25)
    scored = score.fn(config, rollouts, prompts)
    client.close_all()
    assert (scored.mean_reward, scored.num_trainable_groups, scored.num_samples) == (pytest.approx(13 / 3), 1, 4)
    assert (scored.num_unjudged, scored.num_unjudged_groups) == ({"returned None": 1}, 1)
    trained = {"peak_memory_gib": 0.0, "metrics": {}, "seconds": {}}
    metrics = {name: value for name, value in metrics_of(rollouts, scored, trained, {}).items() if "unjudged" in name}
    assert metrics == {
        "reward/unjudged_frac": 0.25,
        "reward/unjudged/returned_None_frac": 0.25,
        "reward/frac_unjudged_groups": 0.5,
    }
    assert not list((workspace / "runs/run/steps/000003").glob("*.journal*"))
    batch = assemble.fn(BatchConfig(), scored)
    assert (batch.num_sequences, batch.num_dropped_groups) == (2, 0)


def test_a_reward_whose_file_changes_while_it_judges_gives_all_samples_their_scores_by_one_state_of_it(
    workspace: Path, tmp_path: Path
) -> None:
    """Here its first call changes it. The manifest gets the digest of what gave the scores."""
    place = tmp_path / "mine.py"
    after = "def score(*, completion):\n    return 2.0 + float(completion)\n"
    place.write_text(f"def score(*, completion):\n    open(__file__, 'w').write({after!r})\n    return float(completion)\n")
    rollouts, prompts = recorded(workspace, saying("0", "1", "2", "3"))
    config = RewardConfig(name=f"{place}:score", workers=1)
    before = rewards.source_digests(config)
    scored = score.fn(config, rollouts, prompts)
    assert [each.reward for each in read_samples(workspace / scored.file.path)] == [2.0, 3.0, 4.0, 5.0]
    assert scored.reward_source == rewards.source_digests(config) != before
    assert before not in {key[3] for key in client._POOLS}, "a worker that began meanwhile has another state than the pool's"
    client.close_all()


def test_after_a_change_of_the_reward_the_warning_is_of_its_scores_and_not_of_the_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = tmp_path / "scores.journal"
    for inputs in ({"reward": "before"}, {"reward": "mended"}):
        with ScoreJournal(journal, inputs) as opened:
            opened.add(("mine.py:score", 1, 0, "ab"), Outcome(1.0))
    assert caplog.messages == [
        f"{journal} belongs to another rollout, or another state of the reward: it is set aside as {journal}.aside-0, its scores are not used"
    ]


def of_three_and_one_turns() -> list[Sample]:
    """Two episodes of one prompt, each turn a trajectory: rewards 1 and 0."""
    long, short = (
        replace(sampled(*turns, index=n), prompt_id=8, reward=1.0 - n) for n, turns in enumerate((THREE_TURNS, ONE_TURN))
    )
    return [*turns_apart(long, THREE_TURNS), *turns_apart(short, ONE_TURN)]


def test_an_episode_counts_once_in_the_figures_of_a_step_however_many_trajectories_it_has(workspace: Path) -> None:
    rollouts, prompts = recorded(workspace, of_three_and_one_turns())
    rollouts = rollouts.model_copy(update={"is_judged": True, **counts_of(of_three_and_one_turns(), of_episodes=True)})
    scored = score.fn(RewardConfig(), rollouts, prompts)
    assert (scored.num_samples, scored.mean_reward, scored.std_reward) == (2, 0.5, 0.5)
    assert (rollouts.num_samples, rollouts.num_turns, rollouts.num_output_tokens, rollouts.num_given_tokens) == (2, 4, 6, 6)
    metrics = metrics_of(rollouts, scored, {"peak_memory_gib": 0.0, "metrics": {}, "seconds": {}}, {})
    alone = metrics_of(
        rollouts, scored.model_copy(update={"group_size": 1}), {"peak_memory_gib": 0.0, "metrics": {}, "seconds": {}}, {}
    )
    assert metrics.keys() - alone.keys() == {"reward/frac_zero_std_groups"}  # a group of one cannot differ
    assert (metrics["episodes/mean_turns"], metrics["rollout/mean_output_tokens"]) == (2, 3)


def test_the_errors_of_tools_are_figures_of_a_step_in_all_and_by_tool(workspace: Path) -> None:
    rollouts, prompts = recorded(workspace, of_three_and_one_turns())
    rollouts = rollouts.model_copy(update={"is_judged": True, **counts_of(of_three_and_one_turns(), of_episodes=True)})
    engine = dict.fromkeys(("num_new_output_tokens", "num_kept", "ttft_s", "prefix_cache_hit_frac", "memory_gib"), 0.0)
    played = engine | {"seconds": 1.0, "tool_errors": 3.0, "tool_errors/book": 2.0, "tool_errors/pay": 1.0}
    trained = {"peak_memory_gib": 0.0, "metrics": {}, "seconds": {}}
    metrics = metrics_of(rollouts, score.fn(RewardConfig(), rollouts, prompts), trained, {"roll_out": played})
    assert {name: value for name, value in metrics.items() if "errors" in name} == {
        "episodes/tool_errors": 3.0,
        "episodes/tool_errors/book": 2.0,
        "episodes/tool_errors/pay": 1.0,
    }


def test_an_episode_that_ran_into_a_limit_counts_once_as_truncated() -> None:
    cut = [replace(each, finish_reason="length") for each in of_three_and_one_turns()]
    assert counts_of(cut, of_episodes=True)["num_truncated"] == 2


def test_the_control_leaves_the_trajectories_of_an_episode_one_reward() -> None:
    mixed = [shuffled(of_three_and_one_turns(), seed, 0) for seed in range(8)]
    assert {tuple(each.reward for each in samples) for samples in mixed} == {(1, 1, 1, 0), (0, 0, 0, 1)}
