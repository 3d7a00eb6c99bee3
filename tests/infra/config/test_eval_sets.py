"""Named evaluation sets: what each asks, when, and which rows are held out or not trained on because of them."""

from pathlib import Path
from typing import Any

import pytest

from infra.config import DataConfig, EvaluationConfig, RunConfig
from infra.config.tools.overrides import with_overrides
from infra.runs import evaluations

SETS = ["gsm8k?num_prompts=5&num_samples=4", {"name": "mine", "data": {"source": "/x/test.jsonl"}, "every": 3, "greedy": True}]


def of(sets: list[Any], **fields: Any) -> RunConfig:
    return RunConfig(evaluation=EvaluationConfig(sets=sets, **fields))


def test_a_set_is_as_the_sections_say_but_for_its_own_fields() -> None:
    config = of(SETS, num_prompts=9, temperature=0.7)
    gsm8k, mine = config.eval_configs.values()
    assert (gsm8k.name, gsm8k.data.num_prompts, gsm8k.num_samples, gsm8k.pass_at_k) == ("gsm8k", 5, 4, (1, 4))
    assert (gsm8k.data.source, gsm8k.data.subset, gsm8k.data.split, gsm8k.data.part) == ("openai/gsm8k", "main", "test", "all")
    assert gsm8k.reward.name == "gsm8k_numeric" and gsm8k.temperature == 0.7
    assert (mine.data.source, mine.data.num_prompts, mine.num_samples, mine.reward) == ("/x/test.jsonl", 9, 0, config.reward)
    assert config.eval_config == gsm8k


def test_a_local_file_takes_the_place_of_a_ready_set_s_data_set() -> None:
    math, aime = of(
        ["math-500?source=/x/m.jsonl&split=test", "aime-2024?greedy=false&num_samples=16&top_p=0.95"]
    ).eval_configs.values()
    assert (math.data.source, math.data.question_column, math.reward.name) == ("/x/m.jsonl", "problem", "math_verl")
    assert (aime.data.split, aime.reward.name, aime.greedy) == ("train", "boxed_integer", None)
    assert aime.sampled and (aime.sampled.nucleus, aime.sampled.group_size) == (0.95, 16)


def test_only_sets_of_the_run_s_own_rows_hold_rows_out() -> None:
    data = DataConfig(source="/x/train.jsonl")
    both = RunConfig(data=data, evaluation=EvaluationConfig(sets=["held-out?num_prompts=7", "few?num_prompts=3", *SETS]))
    held_out, few = both.eval_configs["held-out"].data, both.eval_configs["few"].data
    assert (held_out.part, held_out.num_prompts, held_out.num_held_out) == ("held_out", 7, 7)
    assert (few.part, few.num_prompts, few.num_held_out) == ("held_out", 3, 7), "of the same rows"
    assert both.training.num_held_out == 7
    assert [each.source for each in both.training.evaluated] == ["openai/gsm8k", "/x/test.jsonl"]
    assert RunConfig(data=data, evaluation=EvaluationConfig(sets=SETS)).training.num_held_out == 0


def test_each_set_is_due_by_its_own_number_of_steps_at_the_start_and_at_the_end() -> None:
    config = of(SETS, every=2).evaluation
    due = [evaluations.due_sets(config, version, 7) for version in range(8)]
    assert due == [["gsm8k", "mine"], [], ["gsm8k"], ["mine"], ["gsm8k"], [], ["gsm8k", "mine"], ["gsm8k", "mine"]]
    assert evaluations.due_sets(of(SETS, every=0).evaluation, 0, 7) == []


def test_the_only_set_keeps_its_digest_and_a_named_one_has_the_same() -> None:
    assert evaluations.eval_digest(of([{"name": "held-out"}]).eval_config) == evaluations.eval_digest(RunConfig().eval_config)
    changed = of([{"name": "a", "num_samples": 2, "top_p": 0.9}, {"name": "b", "num_samples": 2}]).eval_configs.values()
    assert len({evaluations.eval_digest(each) for each in changed}) == 2


def test_best_by_names_a_set_and_a_metric() -> None:
    config = of(SETS, best_by="mine/mean_reward")
    assert config.evaluation.deciding == ("mine", "mean_reward") and config.eval_config.name == "mine"
    assert of(SETS, best_by="mean_at_4").evaluation.deciding == ("gsm8k", "mean_at_4")


WRONG = [
    (["a", "a"], {}, "name 'a' is there twice"),
    (["a b"], {}, "name 'a b' must be 1 to 40"),
    ([{"name": "x", "data": {"sourse": "y"}}], {}, "evaluation.sets 'x' data or reward: 'sourse' is no field of theirs"),
    ([{"name": "x", "reward": {"nam": "y"}}], {}, "evaluation.sets 'x' data or reward: 'nam' is no field of theirs"),
    ([{"name": "x", "greedy": False}], {}, "evaluation.sets 'x' greedy false with num_samples 0"),
    ([{"name": "x", "num_samples": 2, "pass_at_k": [3]}], {}, "evaluation.sets 'x' pass_at_k 3 needs as many samples"),
    (SETS, {"best_by": "mine/mean_at_4"}, "best_by 'mine/mean_at_4' is not measured; .* gsm8k/mean_at_4"),
    (["x?max_output_tokens=9999"], {}, r"evaluation.sets 'x' max_output_tokens 9999 .* is more than"),
]


@pytest.mark.parametrize(("sets", "fields", "message"), WRONG, ids=str)
def test_a_set_that_does_not_fit_is_named(sets: list[Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(sets, **fields)


def test_a_set_of_held_out_rows_cannot_choose_others(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'hard' asks rows of '/x/t.jsonl' that are held out, and its data has 'filter'"):
        RunConfig(
            data=DataConfig(source="/x/t.jsonl"),
            evaluation=EvaluationConfig(sets=[{"name": "hard", "data": {"filter": ["level >= 4"]}}]),  # type: ignore[arg-type]
        )


def test_sets_given_as_text_or_json_come_to_the_same() -> None:
    text = with_overrides(RunConfig(), ['evaluation.sets=["x?source=/a.jsonl&num_prompts=3&reward=math_verl"]'])
    fields = {"name": "x", "data": {"source": "/a.jsonl"}, "num_prompts": 3, "reward": "math_verl"}
    assert text == of([fields])
    assert RunConfig.model_validate(text.model_dump(mode="json")) == text
