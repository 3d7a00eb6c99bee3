import json
from pathlib import Path

import pytest

from infra.config import DataConfig
from infra.data import dataset, prompts
from infra.data.forms.row import Row
from infra.models import base_model

QUESTIONS = ["2 + 2?", "What is " + "1 + " * 20 + "1?", "How many?"]


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Three rows, two prompts a step: a row is met again after a step and a half."""
    rows = [{"question": question, "answer": f"#### {n}"} for n, question in enumerate(QUESTIONS)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(source=str(tmp_path / "data.jsonl"), num_prompts=2)


def test_a_prompt_is_the_question_in_the_chat_template_with_the_answer_opened(data: DataConfig, model_folder: Path) -> None:
    tokens = prompts.tokenized(data.but(instruction="Think."), model_folder, "2 + 2?")
    assert (
        base_model.tokenizer(model_folder).decode(tokens) == "<|im_start|>user\n2 + 2? Think.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert all(type(token) is int for token in tokens)
    assert prompts.tokenized(data, model_folder, "2 + 2?") != tokens


def test_prompts_carry_their_row(data: DataConfig, model_folder: Path) -> None:
    for prompt in prompts.draw(data, model_folder, step=0, seed=0):
        assert (prompt.question, prompt.answer, prompt.row) == dataset.rows(data)[prompt.row_number][:3]
        assert prompt.row == {"question": prompt.question, "answer": prompt.answer}
        assert prompt.prompt_tokens == prompts.tokenized(data, model_folder, prompt.question)


def test_ids_and_seeds_are_unique_over_steps_and_epochs(data: DataConfig, model_folder: Path) -> None:
    drawn = [prompt for step in range(6) for prompt in prompts.draw(data, model_folder, step=step, seed=0)]
    assert [prompt.prompt_id for prompt in drawn] == list(range(12))
    assert [sorted(prompt.row_number for prompt in drawn[n : n + 3]) for n in range(0, 12, 3)] == [[0, 1, 2]] * 4
    seeds = [prompts.sample_seed(prompt.seed, index) for prompt in drawn for index in range(8)]
    assert len(set(seeds) | {prompt.seed for prompt in drawn}) == 12 * 8 + 12
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_with_partial_rollouts_each_place_is_drawn_once_and_spare_ones_only_where_nothing_goes_on(
    data: DataConfig, model_folder: Path
) -> None:
    partial = data.but(num_oversampled_prompts=1, partial_rollouts=True, allow_repeats=True)

    def drawn(step: int, goes_on: bool) -> list[int]:
        return [prompt.prompt_id for prompt in prompts.draw(partial, model_folder, step=step, seed=0, goes_on=goes_on)]

    assert [drawn(0, False), drawn(1, True), drawn(2, True)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [drawn(3, False), drawn(4, True)] == [[6, 7, 8], [9, 10]], "a run that begins with its fourth step"


def numbered(path: Path, num: int) -> DataConfig:
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(num)))
    return DataConfig(source=str(path))


@pytest.mark.parametrize("num_rows", [16, 17, 20, 37])
def test_no_row_is_twice_in_a_step_over_several_passes_of_the_data(tmp_path: Path, model_folder: Path, num_rows: int) -> None:
    data = numbered(tmp_path / "few.jsonl", num_rows).but(num_prompts=12, num_oversampled_prompts=4)
    drawn: list[int] = []
    for step in range(2 * num_rows):
        rows = [prompt.row_number for prompt in prompts.draw(data, model_folder, step=step, seed=0)]
        assert len(set(rows)) == 16, f"step {step}"
        drawn += rows
    passes = [drawn[begin : begin + num_rows] for begin in range(0, len(drawn), num_rows)]
    assert all(sorted(each) == list(range(num_rows)) for each in passes), "each pass has every row once"
    assert len({tuple(each) for each in passes}) > 1


def test_with_partial_rollouts_no_row_is_twice_in_a_step_and_the_one_before(tmp_path: Path, model_folder: Path) -> None:
    data = numbered(tmp_path / "few.jsonl", 18).but(num_prompts=4, num_oversampled_prompts=2, partial_rollouts=True)
    before: list[int] = []
    for step in range(40):
        rows = [prompt.row_number for prompt in prompts.draw(data, model_folder, step=step, seed=0, goes_on=step > 0)]
        assert len({*rows, *before}) == len(rows) + len(before), f"step {step}"
        before = rows
    with pytest.raises(ValueError, match=r"has 17 usable rows for the .* take 18 or more"):
        prompts.draw(numbered(tmp_path / "fewer.jsonl", 17).but(**partial_fields(data)), model_folder, step=0, seed=0)


def partial_fields(data: DataConfig) -> dict[str, object]:
    return data.model_dump(include={"num_prompts", "num_oversampled_prompts", "partial_rollouts"})


def test_a_step_is_drawn_alike_each_time_and_otherwise_with_another_seed(data: DataConfig, model_folder: Path) -> None:
    first = prompts.draw(data, model_folder, step=3, seed=1)
    assert prompts.draw(data, model_folder, step=3, seed=1) == first
    others = prompts.draw(data, model_folder, step=3, seed=2)
    assert [prompt.prompt_id for prompt in others] == [prompt.prompt_id for prompt in first]
    assert not {prompt.seed for prompt in others} & {prompt.seed for prompt in first}


def test_seeds_of_samples_do_not_move_from_one_version_to_the_next() -> None:
    assert [prompts.sample_seed(7, index) for index in range(3)] == [215689894, 1776908988, 231060907]
    assert len({prompts.sample_seed(7, 0, num_begun) for num_begun in range(50)}) == 50


def test_a_prompt_that_is_too_long_stops_the_step_and_is_named(data: DataConfig, model_folder: Path) -> None:
    length = len(prompts.tokenized(data, model_folder, QUESTIONS[1]))
    exact = data.but(num_prompts=3, max_prompt_tokens=length)
    assert len(prompts.draw(exact, model_folder, step=0, seed=0)) == 3
    message = rf"prompt \d of '{data.source}' has {length} tokens, data\.max_prompt_tokens is {length - 1}"
    with pytest.raises(ValueError, match=message):
        prompts.draw(exact.but(max_prompt_tokens=length - 1), model_folder, step=0, seed=0)


def test_a_prompt_that_is_too_long_is_found_before_it_is_drawn(data: DataConfig, model_folder: Path) -> None:
    lengths = [len(prompts.tokenized(data, model_folder, question)) for question in QUESTIONS]
    prompts.check_lengths(data.but(max_prompt_tokens=max(lengths)), model_folder)
    message = (
        rf"1 of 3 prompts of '{data.source}' have more .*max_prompt_tokens {max(lengths) - 1}, that of row 1 has {max(lengths)}: "
    )
    with pytest.raises(ValueError, match=message):
        prompts.check_lengths(data.but(max_prompt_tokens=max(lengths) - 1), model_folder)
    prompts.check_lengths(data.but(max_prompt_tokens=max(lengths) - 1, too_long="drop"), model_folder)


def test_prompts_that_are_too_long_can_be_left_out(data: DataConfig, model_folder: Path) -> None:
    length = len(prompts.tokenized(data, model_folder, QUESTIONS[1]))
    short = data.but(too_long="drop", max_prompt_tokens=length - 1)
    for step in range(4):
        assert {prompt.row_number for prompt in prompts.draw(short, model_folder, step=step, seed=0)} == {0, 2}
    all_fit = data.but(too_long="drop", max_prompt_tokens=length, num_prompts=3)
    assert {prompt.row_number for prompt in prompts.draw(all_fit, model_folder, step=0, seed=0)} == {0, 1, 2}


def test_prompts_that_are_too_long_can_lose_their_beginning(data: DataConfig, model_folder: Path) -> None:
    whole = prompts.tokenized(data, model_folder, QUESTIONS[1])
    cut = data.but(too_long="truncate_left", max_prompt_tokens=len(whole) - 5, num_prompts=3)
    drawn = {prompt.row_number: prompt for prompt in prompts.draw(cut, model_folder, step=0, seed=0)}
    assert drawn[1].prompt_tokens == whole[5:]
    assert drawn[0].prompt_tokens == prompts.tokenized(data, model_folder, QUESTIONS[0])
    assert prompts.long_rows(cut, model_folder) == (1,)
    prompts.check_lengths(cut, model_folder)


def test_a_data_set_of_long_prompts_only_is_refused(data: DataConfig, model_folder: Path) -> None:
    with pytest.raises(ValueError, match=rf"no prompt of '{data.source}' has 3 tokens or fewer \(data\.max_prompt_tokens\)"):
        prompts.draw(data.but(too_long="drop", max_prompt_tokens=3), model_folder, step=0, seed=0)


def test_spare_prompts_are_drawn_besides_and_no_row_is_passed_over(data: DataConfig, model_folder: Path) -> None:
    spare = data.but(num_prompts=1, num_oversampled_prompts=1)
    for step in range(3):
        assert prompts.draw(spare, model_folder, step=step, seed=0) == prompts.draw(data, model_folder, step=step, seed=0)
    assert len(prompts.held_out(spare, model_folder)) == 1


def test_prompts_that_are_tokenized_together_are_as_they_are_alone(
    data: DataConfig, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "NUM_AT_A_TIME", 2)
    assert prompts.all_tokenized(data, model_folder, [Row(question, "") for question in QUESTIONS]) == [
        prompts.tokenized(data, model_folder, question) for question in QUESTIONS
    ]
    assert prompts.all_tokenized(data, model_folder, []) == []
