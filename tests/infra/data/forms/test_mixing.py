"""Several sources in one run."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infra.config import DataConfig, EvaluationConfig, RunConfig
from infra.data import dataset, prompts
from infra.data.forms.mixing import most_in, sources_at


def lines(path: Path, num: int, name: str = "") -> Path:
    rows = [{"question": f"{name or path.stem} {n}?", "answer": "1"} for n in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mixed(*sources: str, **fields: Any) -> DataConfig:
    return DataConfig(sources=sources, **fields)


def drawn(config: DataConfig, folder: Path, steps: range, seed: int = 0) -> list[list[str]]:
    return [[prompt.question for prompt in prompts.draw(config, folder, step=step, seed=seed)] for step in steps]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0, 4.5), (100.0, 1.0)])
def test_every_stretch_has_each_source_s_share(weights: tuple[float, ...]) -> None:
    sequence = sources_at(weights, 0, 600)
    assert sources_at(weights, 100, 200) == sequence[100:200]
    for size in (8, 64):
        for begin in range(600 - size):
            counts = Counter(sequence[begin : begin + size])
            for source, weight in enumerate(weights):
                share = size * weight / sum(weights)
                assert abs(counts[source] - share) < 2 and counts[source] <= most_in(weights, source, size)


def test_weights_decide_how_many_prompts_of_each_source_a_step_has(tmp_path: Path, model_folder: Path) -> None:
    config = mixed(f"{lines(tmp_path / 'a.jsonl', 40)}?weight=3", f"{lines(tmp_path / 'b.jsonl', 40)}?weight=1", num_prompts=8)
    steps = drawn(config, model_folder, range(12))
    assert all(Counter(question[0] for question in step) == {"a": 6, "b": 2} for step in steps)
    assert all(len(set(step)) == 8 for step in steps), "no row twice in a step, over several passes of a"
    whole = [question for step in steps for question in step if question[0] == "a"]
    assert sorted(whole[:40]) == sorted({f"a {n}?" for n in range(40)})


def test_a_step_is_found_again_and_the_seed_decides_the_rows(tmp_path: Path, model_folder: Path) -> None:
    config = mixed(f"{lines(tmp_path / 'a.jsonl', 20)}?weight=1", f"{lines(tmp_path / 'b.jsonl', 20)}?weight=2", num_prompts=4)
    steps = drawn(config, model_folder, range(6))
    assert drawn(config, model_folder, range(5, 6)) == steps[5:]
    assert drawn(config, model_folder, range(6), seed=1) != steps
    heavier = mixed(config.sources[0], config.sources[1].replace("weight=2", "weight=5"), num_prompts=4)
    assert drawn(heavier, model_folder, range(6)) != steps


def test_without_weights_shares_are_as_the_numbers_of_rows(tmp_path: Path, model_folder: Path) -> None:
    config = mixed(str(lines(tmp_path / "a.jsonl", 60)), str(lines(tmp_path / "b.jsonl", 20)), num_prompts=8)
    counts = Counter(question[0] for step in drawn(config, model_folder, range(10)) for question in step)
    assert counts == {"a": 60, "b": 20}


def test_each_source_has_its_own_layout_columns_and_filter(tmp_path: Path) -> None:
    (tmp_path / "verl.jsonl").write_text(
        json.dumps({"data_source": "x", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "7"}})
        + "\n"
    )
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"task": f"{n}?", "truth": n, "level": n}) + "\n" for n in range(3)))
    own = f"{tmp_path / 'own.jsonl'}?question_column=task&answer_column=truth&filter=level%20%3E%200"
    config = mixed(f"{tmp_path / 'verl.jsonl'}", own)
    assert [(row.question, row.answer) for row in dataset.rows(config)] == [("?", "7"), ("1?", "1"), ("2?", "2")]
    assert dataset.loaded(config).num_filtered == 1
    assert "verl.jsonl: verl's layout" in dataset.loaded(config).layout and "question and answer" in dataset.loaded(config).layout
    assert config.source == "mixed"


def test_a_part_of_all_sources_is_held_out_unless_evaluations_ask_elsewhere(tmp_path: Path, model_folder: Path) -> None:
    data = mixed(f"{lines(tmp_path / 'a.jsonl', 40)}?weight=9", f"{lines(tmp_path / 'b.jsonl', 40)}?weight=1", num_prompts=4)
    config = RunConfig(data=data)
    trained, asked = dataset.part_rows(config.training), dataset.part_rows(config.eval_config.data)
    assert (len(asked), sorted([*trained, *asked])) == (20, list(range(80)))
    assert len(prompts.held_out(config.eval_config.data, model_folder)) == 20
    elsewhere = config.but(evaluation=EvaluationConfig(source=str(lines(tmp_path / "test.jsonl", 5, name="a"))))
    assert dataset.contaminated_rows(elsewhere.training) == {0, 1, 2, 3, 4}
    assert len(dataset.part_rows(elsewhere.eval_config.data)) == 5
    prompts.check_repeats(config.training, model_folder, num_steps=3, seed=0)


def test_a_source_with_too_few_rows_for_its_weight_is_named(tmp_path: Path, model_folder: Path) -> None:
    config = mixed(f"{lines(tmp_path / 'a.jsonl', 40)}?weight=1", f"{lines(tmp_path / 'b.jsonl', 5)}?weight=1", num_prompts=8)
    with pytest.raises(
        ValueError, match=r"data\.sources '.*b\.jsonl\?weight=1' has 5 usable rows for up to 5 of the 8 prompts of a step"
    ):
        prompts.check_repeats(config, model_folder, num_steps=1, seed=0)
    assert len(drawn(config.but(allow_repeats=True), model_folder, range(1))[0]) == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sources": ("a.jsonl?wieght=2",)},
            r"data\.sources 'a\.jsonl\?wieght=2': option 'wieght' is unknown; known are weight, subset",
        ),
        ({"sources": ("a.jsonl?weight=0",)}, r"weight '0' is no number above 0"),
        ({"sources": ("a.jsonl?weight=2", "b.jsonl")}, r"data\.sources 'b\.jsonl' has no weight, others have: give all or none"),
        (
            {"sources": ("a.jsonl",), "source": "b.jsonl"},
            r"data\.sources \['a\.jsonl'\] with data\.source 'b\.jsonl': give one of the two",
        ),
        ({"source": "mixed"}, r"data\.source 'mixed' needs data\.sources"),
        ({"sources": ("a.jsonl?filter=level",)}, r"data\.filter 'level' is no condition"),
    ],
)
def test_sources_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)
