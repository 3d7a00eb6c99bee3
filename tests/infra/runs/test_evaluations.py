from pathlib import Path

import pytest

from infra.config import EvaluationConfig, RunConfig
from infra.eval_records import Evaluation
from infra.records import AdapterVersion, BaseModelRef, File
from infra.runs import evaluations
from infra.store.files import read_json, write_json
from infra.store.layout import run_folder


def evaluation(version: int, score: float, eval_digest: str = "e") -> Evaluation:
    return Evaluation(
        run="r",
        step=version,
        adapter_sha256=f"{version:064d}",
        eval_digest=eval_digest,
        file=File(path="x", sha256="x", num_bytes=1),
        num_prompts=10,
        num_overlapping=0,
        pass_at_1=score,
        pass_at_k={"1": 0.25, "4": 0.5},
        truncated_frac=0.0,
    )


def stalls(scores: list[float], **config: object) -> bool:
    found = [evaluation(number, score) for number, score in enumerate(scores)]
    return evaluations.has_stalled(EvaluationConfig.model_validate(config), found)


def test_a_run_is_evaluated_before_training_every_n_steps_and_at_the_end() -> None:
    config = EvaluationConfig(every=4)
    assert [version for version in range(11) if evaluations.is_due(config, version, 10)] == [0, 4, 8, 10]
    assert not any(evaluations.is_due(EvaluationConfig(every=0), version, 10) for version in range(11))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([], False),
        ([0.5], False),
        ([0.5, 0.4], False),
        ([0.5, 0.4, 0.5], True),
        ([0.5, 0.4, 0.51], False),
        ([0.3, 0.5, 0.4, 0.4], True),
        ([0.3, 0.5, 0.4, 0.6], False),
    ],
)
def test_a_run_stalls_when_as_many_evaluations_as_its_patience_were_no_better(scores: list[float], expected: bool) -> None:
    assert stalls(scores, patience=2) is expected


def test_evaluations_by_another_state_of_the_reward_neither_choose_the_best_nor_stall() -> None:
    """Here the second state gives less."""
    found = [evaluation(version, score) for version, score in enumerate((0.2, 0.9, 0.3, 0.5, 0.4))]
    found = [each.model_copy(update={"reward_source": "second" if each.step > 1 else "first"}) for each in found]
    best = evaluations.best_of(EvaluationConfig(), found)
    assert best and best.step == 3
    assert evaluations.best_of(EvaluationConfig(), found[:2]) == found[1]
    assert evaluations.best_steps(EvaluationConfig(), found) == {1, 3}, "retention keeps both"
    assert not evaluations.has_stalled(EvaluationConfig(patience=2), found)
    assert evaluations.has_stalled(EvaluationConfig(patience=1), found)
    older = [each.model_copy(update={"reward_source": ""}) for each in found[:2]]
    assert evaluations.best_of(EvaluationConfig(), [*older, *found[2:]]) == older[1], "an older version did not record it"


def test_better_means_by_more_than_min_delta() -> None:
    assert stalls([0.5, 0.52], patience=1, min_delta=0.02)
    assert not stalls([0.5, 0.53], patience=1, min_delta=0.02)
    assert not stalls([0.5, 0.4, 0.3, 0.2, 0.1])


def test_the_best_is_the_earliest_of_the_highest() -> None:
    best = evaluations.best_of(EvaluationConfig(), [evaluation(0, 0.1), evaluation(2, 0.3), evaluation(4, 0.3)])
    assert best is not None and best.step == 2
    assert evaluations.best_of(EvaluationConfig(), []) is None


def test_an_exam_of_an_earlier_version_keeps_its_digest() -> None:
    config = RunConfig()
    assert evaluations.eval_digest(config.eval_config) == "8d557dba5775f7a6"
    for field, value in {"template": "raw", "filter": ("level > 1",), "too_long": "drop", "hold_out": True}.items():
        other = config.but(data=config.data.but(**{field: value}))
        assert evaluations.eval_digest(other.eval_config) != "8d557dba5775f7a6", field


def test_what_is_measured_makes_the_exam_and_when_it_is_measured_does_not() -> None:
    base = RunConfig(evaluation=EvaluationConfig(num_samples=4, pass_at_k=(4,)))

    def digest(config: RunConfig) -> str:
        return evaluations.eval_digest(config.eval_config)

    same = [
        base.but(evaluation=base.evaluation.but(every=1, patience=3, min_delta=0.1)),
        base.but(num_steps=7, data=base.data.but(num_prompts=3, max_draws=3)),
        base.but(reward=base.reward.but(shuffle_seed=1), seed=9),
        base.but(evaluation=base.evaluation.but(pass_at_k=(4, 4), max_output_tokens=base.sampling.max_output_tokens)),
    ]
    assert {digest(config) for config in same} == {digest(base)}
    others = [{"num_prompts": 8}, {"split": "train"}, {"temperature": 0.5}, {"max_output_tokens": 9}, {"pass_reward": 0.5}]
    assert len({digest(base), *(digest(base.but(evaluation=base.evaluation.but(**change))) for change in others)}) == 6


def test_evaluations_of_one_exam_are_read_in_the_order_of_versions(workspace: Path) -> None:
    eval_config = RunConfig().eval_config
    for version, name in ((10, "own"), (2, "own"), (3, "other")):
        adapter = AdapterVersion(
            run="r", version=version, base=BaseModelRef(id="m", sha256="b"), rank=1, alpha=1, target_modules=("q_proj",), seed=0
        )
        made = evaluation(version, 0.1, evaluations.eval_digest(eval_config) if name == "own" else "other")
        evaluations.write(evaluations.folder_of(adapter, eval_config), made)
    assert [each.step for each in evaluations.of_run("r", eval_config)] == [2, 10]
    assert [each.step for each in evaluations.of_run("r")] == [2, 3, 10]


@pytest.mark.parametrize("is_copied", [False, True])
def test_figures_that_were_changed_or_copied_choose_no_adapter(workspace: Path, is_copied: bool) -> None:
    folders = [run_folder("r") / "evaluations" / name for name in ("000001-a-b", "000002-c-d")]
    paths = [evaluations.write(folder, evaluation(n, 0.1 * n, "e")) for n, folder in enumerate(folders, start=1)]
    content = read_json(paths[1])
    changed = content if is_copied else content | {"record": content["record"] | {"pass_at_1": 0.9}}
    write_json(paths[not is_copied], changed)
    with pytest.raises(ValueError, match=rf"{paths[not is_copied]} is not what was written there: .*remove its folder"):
        evaluations.of_run("r")


def test_the_sampled_pass_at_1_has_a_name_of_its_own() -> None:
    assert evaluation(1, 0.4).metrics == {
        "eval/pass_at_1": 0.4,
        "eval/sampled_pass_at_1": 0.25,
        "eval/pass_at_4": 0.5,
        "eval/truncated_frac": 0.0,
    }


def graded(version: int, mean: float, *, is_binary: bool = False, passed: float = 0.0) -> Evaluation:
    figures = {"mean_reward": mean, "max_reward": mean + 0.1, "mean_output_tokens": 7.0, "is_binary": is_binary}
    return Evaluation.model_validate(evaluation(version, passed).model_dump() | figures)


def best(config: EvaluationConfig, *found: Evaluation) -> int | None:
    chosen = evaluations.best_of(config, found)
    return chosen.step if chosen else None


def test_rewards_between_0_and_1_choose_the_best_by_their_mean() -> None:
    found = [graded(0, 0.2), graded(2, 0.5), graded(4, 0.4)]
    assert best(EvaluationConfig(), *found) == 2
    assert not evaluations.has_stalled(EvaluationConfig(patience=1), found[:2])
    assert evaluations.has_stalled(EvaluationConfig(patience=1), found)


def test_rewards_of_0_and_1_choose_the_best_by_pass_at_1_and_a_named_metric_has_the_last_word() -> None:
    found = [graded(0, 0.6, is_binary=True, passed=0.6), graded(2, 0.5, is_binary=True, passed=0.7)]
    assert best(EvaluationConfig(), *found) == 2
    assert best(EvaluationConfig(best_by="mean_reward"), *found) == 0
    assert best(EvaluationConfig(pass_reward=2.0), *found) == 0, "no reward of 0 or 1 can pass: pass@1 says nothing"


def test_a_metric_that_is_not_measured_is_refused() -> None:
    assert EvaluationConfig(best_by="pass_at_4", num_samples=4, pass_at_k=(4,)).best_by == "pass_at_4"
    with pytest.raises(
        ValueError, match=r"evaluation\.best_by 'pass_at_8' is not measured; .* auto, pass_at_1, mean_reward, pass_at_4"
    ):
        EvaluationConfig(best_by="pass_at_8", num_samples=4, pass_at_k=(4,))


def test_a_threshold_that_no_answer_reached_is_named_with_the_numbers() -> None:
    said = evaluations.unreached_threshold(EvaluationConfig(), [graded(0, 0.2), graded(2, 0.5)])
    assert said is not None
    assert (
        "2 evaluations reached evaluation.pass_reward 1," in said
        and "highest reward was 0.6, the mean reward 0.2 at first and 0.5" in said
    )
    assert evaluations.unreached_threshold(EvaluationConfig(pass_reward=0.6), [graded(0, 0.2), graded(2, 0.5)]) is None
    assert evaluations.unreached_threshold(EvaluationConfig(), [evaluation(0, 0.0)]) is None


def test_the_lowest_value_may_be_the_best_and_unjudged_evaluations_do_not_count() -> None:
    shortest = EvaluationConfig(best_by="mean_output_tokens", best_is="lowest", patience=1)
    found = [
        Evaluation.model_validate(graded(version, 0.5).model_dump() | {"mean_output_tokens": length, "is_eligible": eligible})
        for version, (length, eligible) in enumerate([(9.0, True), (7.0, True), (1.0, False), (8.0, True)])
    ]
    assert best(shortest, *found) == 1
    assert evaluations.has_stalled(shortest, found) and not evaluations.has_stalled(shortest, found[:2])


def test_evaluations_of_sets_with_equal_configurations_are_kept_apart(workspace: Path) -> None:
    config = RunConfig(name="r", evaluation=EvaluationConfig(sets=[{"name": "a"}, {"name": "b"}]))  # type: ignore[list-item]
    base = BaseModelRef(id="tiny", sha256="b")
    adapter = AdapterVersion(run="r", version=1, base=base, rank=8, alpha=16, target_modules=(), seed=0)
    for name, of_set in config.eval_configs.items():
        made = evaluation(1, 0.1, evaluations.eval_digest(of_set)).model_copy(update={"set_name": name})
        evaluations.write(evaluations.folder_of(adapter, of_set), made)
    assert [each.set_name for each in evaluations.of_run("r", config.eval_config)] == ["a"]
    assert [each.set_name for each in evaluations.of_other_sets(config)] == ["b"]
