import itertools
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from shared import sample

from infra.config import DataConfig, EngineConfig, EvaluationConfig, RunConfig
from infra.data import dataset
from infra.data.prompts import num_overlapping
from infra.engines.scripted import ScriptedEngine
from infra.failures import EngineUnavailable
from infra.runs import evaluations
from infra.runs.eval_figures import mean_pass_at_k, pass_at_k
from infra.runs.lineage import adapter_at
from infra.store import code_digest
from infra.store.files import read_json
from infra.store.samples import Sample, read_samples, write_samples
from tasks.evaluations.compare_adapters import difference
from tasks.evaluations.evaluate_adapter import evaluate_adapter

SAMPLE = sample()


def rewarded(*groups: list[float]) -> list[Sample]:
    return [
        replace(SAMPLE, prompt_id=number, sample_index=index, reward=reward)
        for number, group in enumerate(groups)
        for index, reward in enumerate(group)
    ]


@pytest.mark.parametrize(("num_samples", "num_passed"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_one_that_passes(num_samples: int, num_passed: int) -> None:
    passed = [number < num_passed for number in range(num_samples)]
    for k in range(1, num_samples + 1):
        chosen = list(itertools.combinations(passed, k))
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(fmean(any(choice) for choice in chosen))


def test_pass_at_k_of_the_paper() -> None:
    """arXiv 2107.03374: 1 - prod(1 - k / (n - c + 1 .. n)); n = 200, c = 10, k = 10, by that formula."""
    product = 1.0
    for divisor in range(200 - 10 + 1, 201):
        product *= 1 - 10 / divisor
    assert pass_at_k(200, 10, 10) == pytest.approx(1 - product)


def test_pass_at_k_is_a_mean_over_questions_and_a_reward_at_the_mark_passes() -> None:
    samples = rewarded([1.0, 0.0], [0.0, 0.0], [0.9, 1.5])
    assert mean_pass_at_k(samples, 1, 1.0) == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert mean_pass_at_k(samples, 2, 1.0) == pytest.approx(2 / 3)
    assert mean_pass_at_k(samples, 1, 0.9) == pytest.approx((0.5 + 0 + 1) / 3)


@pytest.fixture
def config(workspace: Path, model_folder: Path) -> RunConfig:
    return RunConfig(
        name="mine",
        model=str(model_folder),
        engine=EngineConfig(kind="scripted"),
        evaluation=EvaluationConfig(num_prompts=12, num_samples=4, pass_at_k=(1, 4)),
    )


def test_an_exam_asks_each_question_once_greedily_and_so_many_times_by_chance(config: RunConfig, workspace: Path) -> None:
    adapter = adapter_at(config, 0)
    made = evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter)
    ScriptedEngine.stop_in(workspace)
    folder = evaluations.folder_of(adapter, config.eval_config)
    greedy, sampled = (read_samples(folder / name) for name in ("greedy.parquet", "sampled.parquet"))
    assert (len(greedy), len(sampled), made.num_prompts) == (12, 48, 12)
    assert made.pass_at_1 == pytest.approx(fmean(sample.reward or 0.0 for sample in greedy))
    assert made.mean_reward == made.pass_at_1 and made.is_binary and made.max_reward == 1.0
    assert made.mean_output_tokens == pytest.approx(fmean(len(sample.output_tokens) for sample in greedy))
    assert made.pass_at_k["1"] == pytest.approx(fmean(sample.reward or 0.0 for sample in sampled))
    assert made.pass_at_k["1"] < made.pass_at_k["4"] <= 1
    assert read_json(folder / "evaluation.json")["record"] == made.model_dump(mode="json")
    assert evaluations.of_run("mine", config.eval_config) == [made]


def test_a_control_is_examined_with_true_rewards(config: RunConfig, workspace: Path) -> None:
    control = config.but(reward=config.reward.but(shuffle_seed=1))
    made = [evaluate_adapter.fn(each.engine, each.eval_config, each.data, adapter_at(each, 0)) for each in (config, control)]
    ScriptedEngine.stop_in(workspace)
    assert made[0] == made[1]


def test_questions_that_are_trained_on_are_counted(config: RunConfig, tmp_path: Path, workspace: Path) -> None:
    training, held_out = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    row = '{{"question": "{}", "answer": "#### 1"}}\n'
    training.write_text("".join(row.format(question) for question in ("What is  one?", "What is two?")))
    held_out.write_text("".join(row.format(question) for question in ("what is one?", "What is three?", "What is TWO?")))
    data = DataConfig(source=str(training))
    from infra.data import prompts

    exam = DataConfig(source=str(held_out), num_prompts=100)
    asked = prompts.held_out(exam, Path(config.model))
    assert [prompt.prompt_id for prompt in asked] == [0, 1, 2]
    assert num_overlapping(asked, exam, data) == 2
    own = prompts.held_out(config.eval_config.data, Path(config.model))
    assert num_overlapping(own, config.eval_config.data, config.data) == 0
    assert num_overlapping(own, config.eval_config.data, config.eval_config.data) == 12


def test_rewards_by_changed_code_are_told_apart(
    config: RunConfig, tmp_path: Path, workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step is scored by the changed file too; figures of evaluations are compared."""
    reward = tmp_path / "mine.py"
    reward.write_text("def score(*, completion):\n    return 1.0\n")
    config = config.but(
        reward=config.reward.but(name=f"{reward}:score"), evaluation=EvaluationConfig(num_prompts=2, num_samples=0)
    )
    base = adapter_at(config, 0)
    first = evaluate_adapter.fn(config.engine, config.eval_config, config.data, base)
    evaluate_adapter.fn(config.engine, config.eval_config, config.data, base)
    assert "has changed" not in caplog.text and first.mean_reward == 1.0
    reward.write_text("def score(*, completion):\n    return 0.5\n")
    code_digest.digest_of_file.cache_clear()  # another process
    later = base.model_copy(update={"version": 3})
    evaluate_adapter.fn(config.engine, config.eval_config, config.data, later)
    ScriptedEngine.stop_in(workspace)
    assert "has changed since adapters 0 of run mine were evaluated" in caplog.text
    assert "`ratchet evaluate mine --adapter 0` makes them again" in caplog.text


def test_questions_that_changed_are_another_exam_s(config: RunConfig, tmp_path: Path, workspace: Path) -> None:
    held_out = tmp_path / "test.jsonl"
    row = '{{"question": "What is {}?", "answer": "#### 1"}}\n'
    held_out.write_text("".join(row.format(number) for number in range(12)))
    config = config.but(evaluation=config.evaluation.but(source=str(held_out)))
    made = evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter_at(config, 0))
    held_out.write_text("".join(row.format(number) for number in range(1, 13)))
    for cache in (dataset.loaded, dataset.part_rows, dataset.fingerprint):
        cache.cache_clear()  # as another process sees it
    with pytest.raises(
        ValueError, match=rf"test\.jsonl' \(split 'test'\) has changed since adapter 0 .* recorded was {made.dataset_fingerprint}"
    ):
        evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter_at(config, 0))
    other = config.but(evaluation=config.evaluation.but(num_prompts=11))
    assert evaluate_adapter.fn(other.engine, other.eval_config, other.data, adapter_at(other, 0)).eval_digest != made.eval_digest
    ScriptedEngine.stop_in(workspace)


def test_an_exam_that_was_interrupted_asks_only_what_is_missing(config: RunConfig, workspace: Path) -> None:
    adapter = adapter_at(config, 0)
    undisturbed = evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter)
    folder = evaluations.folder_of(adapter, config.eval_config)
    (workspace / "fault").write_text("dies")  # after one sample of each attempt
    for num_kept in (1, 2):
        with pytest.raises(EngineUnavailable):
            evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter)
        assert len((folder / "greedy.journal").read_bytes().splitlines()) == 1 + num_kept
    (workspace / "fault").write_text("")
    assert evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter) == undisturbed
    ScriptedEngine.stop_in(workspace)
    assert not list(folder.glob("*.journal"))


def test_a_set_without_greedy_answers_has_figures_of_the_sampled_ones(config: RunConfig, workspace: Path) -> None:
    evaluation = config.evaluation.but(sets=[{"name": "mean", "greedy": False}])
    config, adapter = config.but(evaluation=evaluation), adapter_at(config, 0)
    made = evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter)
    ScriptedEngine.stop_in(workspace)
    folder = evaluations.folder_of(adapter, config.eval_config)
    sampled = read_samples(folder / "sampled.parquet")
    assert folder.name.startswith("000000-base-mean-") and not (folder / "greedy.parquet").exists()
    assert made.mean_at_n and made.num_samples == 4 and made.mean_at_n.num_questions == 12
    assert made.mean_reward == made.mean_at_n.mean == pytest.approx(fmean(each.reward or 0.0 for each in sampled))
    assert made.pass_at_1 == pytest.approx(made.pass_at_k["1"])
    assert {
        "eval/mean/mean_at_4",
        "eval/mean/mean_at_4_low",
        "eval/mean/mean_at_4_high",
        "eval/mean/pass_at_4",
    } <= made.metrics.keys()


def test_two_adapters_differ_by_what_their_answers_to_each_question_do(config: RunConfig, workspace: Path) -> None:
    first = evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter_at(config, 0))
    other = adapter_at(config, 0).model_copy(update={"run": "other"})
    second = evaluate_adapter.fn(config.engine, config.eval_config, config.data, other)
    ScriptedEngine.stop_in(workspace)
    same = difference(config.eval_config, first, second)
    assert same.reward and (same.reward.mean, same.reward.standard_error, same.reward.num_questions) == (0.0, 0.0, 12)
    path = evaluations.folder_of(other, config.eval_config) / "sampled.parquet"
    changed = [replace(each, reward=1.0 if each.prompt_id < 3 else 0.0) for each in read_samples(path)]
    write_samples(path, changed)
    found = difference(config.eval_config, first, second)
    assert found.reward and found.passed and found.first == "adapter 0 of mine" and found.second == "adapter 0 of other"
    assert first.mean_at_n and found.reward.mean == pytest.approx(3 / 12 - first.mean_at_n.mean)
    assert found.reward.low < found.reward.mean < found.reward.high
    fewer = config.but(evaluation=config.evaluation.but(num_prompts=11)).eval_config
    third = evaluate_adapter.fn(config.engine, fewer, config.data, other)
    ScriptedEngine.stop_in(workspace)
    with pytest.raises(ValueError, match="adapter 0 of mine and adapter 0 of other were evaluated with other questions"):
        difference(config.eval_config, first, third)
