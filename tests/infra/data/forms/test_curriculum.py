"""A curriculum: which rows a step draws by their measured pass rates, and where those come from."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shared import sample

from infra.config import DataConfig, RunConfig
from infra.config.eval_sets import eval_config
from infra.data import prompts
from infra.data.forms import curriculum
from infra.data.forms.curriculum import PassRate, ordered, rates_of
from infra.data.prompt_batch import rates_after
from infra.records import File, ScoredBefore
from infra.store.files import DigestMismatch, path_of, record_of, write_json_lines
from infra.store.samples import Sample, write_samples

UNCERTAIN = DataConfig(curriculum="uncertain", num_prompts=4, max_draws=2)
BETWEEN = DataConfig(curriculum="between", pass_rate_between=(0.2, 0.8), num_prompts=4)
SAMPLE = sample()


def rates(*values: float, num_judged: int = 8, step: int = 0) -> dict[int, PassRate]:
    return {number: PassRate(value, num_judged, step) for number, value in enumerate(values)}


def scored(prompt_id: int, *rewards: float | None) -> list[Sample]:
    return [replace(SAMPLE, prompt_id=prompt_id, sample_index=index, reward=reward) for index, reward in enumerate(rewards)]


def test_a_row_is_drawn_first_as_often_as_p_times_one_minus_p_says() -> None:
    known = rates(0.0, 0.5, 1.0, 0.25)
    first = Counter(ordered(UNCERTAIN, range(5), known, step=step, seed=3)[0] for step in range(4000))
    expected = [1 / 10, 5 / 10, 9 / 10, 3 / 10, 1 / 2]  # (passed + 1) / (judged + 2); row 4 is unseen
    weights = [p * (1 - p) for p in expected]
    for number, weight in enumerate(weights):
        assert first[number] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_the_order_depends_on_seed_step_and_rates_and_on_nothing_else() -> None:
    known = rates(*[number / 40 for number in range(40)])
    order = ordered(UNCERTAIN, range(40), known, step=5, seed=3)
    assert sorted(order) == list(range(40))
    assert order == ordered(UNCERTAIN, range(40), rates_of(curriculum.lines_of(known)), step=5, seed=3)
    others = [(known, 6, 3), (known, 5, 4), (rates(*[0.5] * 40), 5, 3)]
    assert order not in [ordered(UNCERTAIN, range(40), rates, step=step, seed=seed) for rates, step, seed in others]


def test_the_draws_of_a_step_share_no_row_and_have_places_of_their_own(model_folder: Path) -> None:
    known = rates(*[0.5] * 20)
    for step in range(3):
        places = [prompts.place_of(UNCERTAIN, step, draw) for draw in (1, 2)]
        drawn = [prompts.draw(UNCERTAIN, model_folder, step=place, seed=1, rates=known) for place in places]
        both = [prompt for draw in drawn for prompt in draw]
        assert len({prompt.row_number for prompt in both}) == len({prompt.prompt_id for prompt in both}) == 8


def test_rows_outside_of_the_interval_come_last_and_those_that_were_not_measured_for_longest_first() -> None:
    known = rates(0.0, 0.2, 0.5, 0.8, 1.0) | {5: PassRate(1.0, 8, 2), 6: PassRate(0.0, 8, 1)}
    order = ordered(BETWEEN, range(8), known, step=3, seed=3)
    assert set(order[:4]) == {1, 2, 3, 7}, "7 is unseen"
    assert set(order[4:6]) == {0, 4} and order[6:] == [6, 5]
    assert curriculum.counts_of(BETWEEN, known, order[:5])["curriculum/num_outside"] == 1


def test_the_newest_group_of_a_row_is_its_pass_rate_and_unjudged_samples_have_none(tmp_path: Path, workspace: Path) -> None:
    known = write_json_lines(workspace / "pass_rates.jsonl", curriculum.lines_of(rates(0.25, 0.25, 0.25)))
    asked = write_json_lines(workspace / "prompts.jsonl", [{"prompt_id": 70 + row, "row_number": row} for row in (1, 2, 3)])
    groups = [*scored(71, 1.0, None, 0.0, 2.0), *scored(72, None, None), *scored(73, -1.0, 1.0)]
    groups.append(replace(groups[0], branch=1))  # of the same episode
    samples = write_samples(workspace / "scored.parquet", groups)
    measured = ScoredBefore(pass_rates=record_of(known), prompts=record_of(asked), groups=record_of(samples))
    found = rates_after(measured, 7)
    assert found == rates(0.25, 0.25, 0.25) | {1: PassRate(2 / 3, 3, 7), 3: PassRate(0.5, 2, 7)}
    lines = [
        {"row_number": 1, "num_judged": 2, "pass_rate": 0.5, "reason": "equal rewards"},
        {"row_number": 2, "num_judged": 0, "pass_rate": None, "reason": "not finished"},
    ]
    draws = record_of(write_json_lines(workspace / "draws.jsonl", lines))
    assert rates_after(measured.model_copy(update={"groups": draws}), 7)[1] == PassRate(0.5, 2, 7)
    assert rates_after(ScoredBefore(), -1) == {}


@pytest.mark.parametrize("damaged", ["pass_rates", "prompts", "groups"])
def test_a_file_that_is_not_what_it_was_is_refused(damaged: str, workspace: Path) -> None:
    def file(name: str, *lines: dict[str, Any]) -> File:
        return record_of(write_json_lines(workspace / name, lines))

    measured = ScoredBefore(
        pass_rates=file("pass_rates.jsonl", *curriculum.lines_of(rates(0.5))),
        prompts=file("prompts.jsonl", {"prompt_id": SAMPLE.prompt_id, "row_number": 0}),
        groups=record_of(write_samples(workspace / "scored.parquet", scored(SAMPLE.prompt_id, 1.0))),
    )
    assert rates_after(measured, 0)
    path = path_of(getattr(measured, damaged))
    path.write_bytes(path.read_bytes()[:-3] + b"9}\n")
    with pytest.raises(DigestMismatch, match=path.name):
        rates_after(measured, 0)


def test_a_data_set_that_leaves_nothing_to_choose_is_refused(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(f'{{"question": "{number} + 1?", "answer": "1"}}\n' for number in range(8)))
    config = UNCERTAIN.but(source=str(path))
    with pytest.raises(ValueError, match=r"'uncertain' with 8 usable rows of data set .*: a step draws all 8 of them"):
        prompts.check_repeats(config, model_folder, num_steps=1, seed=0)
    with pytest.raises(ValueError, match=r"8 usable rows for the 10 prompts of a step"):
        prompts.check_repeats(config.but(num_prompts=5), model_folder, num_steps=1, seed=0)
    prompts.check_repeats(config.but(num_prompts=3), model_folder, num_steps=1, seed=0)


def test_copies_of_a_text_that_could_fill_half_a_step_are_refused_before_the_run(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "copies.jsonl"
    path.write_text("".join(f'{{"question": "{max(number, 4)} + 1?", "answer": "1"}}\n' for number in range(20)))
    with pytest.raises(ValueError, match=r"'uncertain' with data set .*, where 5 rows have equal text: .* a step's 4 prompts"):
        prompts.check_repeats(UNCERTAIN.but(source=str(path)), model_folder, num_steps=1, seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"curriculum": "between"}, r"data.curriculum 'between' with no data.pass_rate_between"),
        ({"curriculum": "uncertain", "pass_rate_between": (0.1, 0.9)}, r"'uncertain' with data.pass_rate_between \[0.1, 0.9\]"),
        ({"pass_rate_between": (0.1, 0.9)}, r"'none' with data.pass_rate_between \[0.1, 0.9\]: give it with 'between'"),
        ({"curriculum": "between", "pass_rate_between": (0.9, 0.1)}, r"\[0.9, 0.1\] is no interval"),
        ({"curriculum": "between", "pass_rate_between": (0.5, 0.5)}, r"\[0.5, 0.5\] is no interval"),
        ({"curriculum": "between", "pass_rate_between": (-0.1, 0.9)}, r"\[-0.1, 0.9\] is no interval"),
        ({"curriculum": "between", "pass_rate_between": (0.1, 1.1)}, r"\[0.1, 1.1\] is no interval"),
        (
            {"curriculum": "uncertain", "sources": ("a.jsonl", "b.jsonl")},
            r"with data.sources \['a.jsonl', 'b.jsonl'\] is not supp",
        ),
        ({"curriculum": "uncertain", "allow_repeats": True}, r"'uncertain' with data.allow_repeats True is not supported"),
        ({"curriculum": "uncertain", "partial_rollouts": True}, r"'uncertain' with data.partial_rollouts True is not supported"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)


def test_an_evaluation_asks_the_same_questions_with_a_curriculum_as_without() -> None:
    plain = RunConfig()
    drawn = plain.but(data=plain.data.but(curriculum="between", pass_rate_between=(0.1, 0.9)))
    of_both = [eval_config(each, each.evaluation.asked[0]).data for each in (plain, drawn)]
    assert of_both[0] == of_both[1] and of_both[1].curriculum == "none"
