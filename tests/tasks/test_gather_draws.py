"""Dynamic sampling: which groups a step has of its draws, how many prompts a further draw has, and where each draw's prompts come from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shared import sample

from infra.config import DataConfig
from infra.data import prompts
from infra.records import Draw
from infra.store.samples import Sample
from tasks.gather_draws import DrawnGroup, chosen, counts_of, num_wanted

SAMPLE = sample()
USEFUL, FLAT, UNJUDGED = [0.0, 1.0], [1.0, 1.0], [1.0, None]
Rewards = list[float | None]


def groups(*rewards: Any) -> list[list[Sample]]:
    return [
        [replace(SAMPLE, prompt_id=number, sample_index=index, reward=reward) for index, reward in enumerate(group)]
        for number, group in enumerate(rewards)
    ]


def test_the_first_useful_groups_are_kept_and_the_others_have_a_reason() -> None:
    found = chosen(groups(FLAT, USEFUL, UNJUDGED, USEFUL, USEFUL, FLAT), 2)
    assert found == ["equal rewards", "useful", "fewer than two judged", "useful", "more than are needed", "equal rewards"]


def test_where_useful_groups_are_too_few_the_first_judged_ones_fill_up() -> None:
    assert chosen(groups(UNJUDGED, FLAT, USEFUL, FLAT, FLAT), 3) == [
        "fewer than two judged",
        "fills up",
        "useful",
        "fills up",
        "equal rewards",
    ]
    assert chosen(groups(UNJUDGED, FLAT), 3) == ["fewer than two judged", "fills up"]


def drawn(*draws: tuple[int, int]) -> list[Draw]:
    """Draws, each with a number of groups and of useful groups."""
    scored = [type("Scored", (), {"num_prompts": num, "num_trainable_groups": useful})() for num, useful in draws]
    return [Draw.model_construct(scored=each) for each in scored]


def test_a_further_draw_has_as_many_prompts_as_the_share_of_useful_groups_says() -> None:
    config = DataConfig(num_prompts=16, max_draws=4)
    assert num_wanted(config, []) is None, "a whole draw"
    assert num_wanted(config, drawn((16, 8))) == 16
    assert num_wanted(config, drawn((16, 12))) == 6, "4 are missing, 3 of 4 are useful"
    assert num_wanted(config, drawn((16, 12), (6, 4))) == 0
    assert num_wanted(config, drawn((16, 0), (16, 0), (16, 0))) == 16
    assert num_wanted(config, drawn(*[(16, 0)] * 4)) == 0, "the last draw"
    assert num_wanted(config.but(num_oversampled_prompts=2), drawn((16, 12))) is None, "early stop needs a whole draw"


def test_no_row_is_drawn_twice_in_a_step_and_its_prompts_do_not_depend_on_the_draws_of_the_steps_before(
    model_folder: Path,
) -> None:
    config = DataConfig(num_prompts=8, max_draws=3)
    found = [
        [prompts.draw(config, model_folder, step=prompts.place_of(config, step, draw), seed=5) for draw in (1, 2, 3)]
        for step in range(4)
    ]
    for draws in found:
        numbers = [prompt.row_number for draw in draws for prompt in draw]
        assert len(set(numbers)) == len(numbers) == 24
    ids = [prompt.prompt_id for draws in found for draw in draws for prompt in draw]
    assert ids == list(range(96)), "each place of the sequence belongs to one draw of one step"
    one = DataConfig(num_prompts=8)
    assert prompts.place_of(one, 7, 0) == 7


def test_too_few_rows_for_all_draws_of_a_step_are_refused(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(f'{{"question": "{number} + 1?", "answer": "1"}}\n' for number in range(20)))
    config = DataConfig(source=str(path), num_prompts=8, max_draws=3)
    with pytest.raises(ValueError, match=r"20 usable rows for the 24 prompts of a step \(data.num_prompts 8, data.max_draws 3\)"):
        prompts.draw(config, model_folder, step=0, seed=0)


def test_the_metrics_count_groups_and_the_mean_reward_is_that_of_all_that_was_judged() -> None:
    lines = [
        DrawnGroup(1, 0, 0, "useful", 0.5, 2, 2, None),
        DrawnGroup(1, 1, 1, "equal rewards", 1.0, 2, 2, None),
        DrawnGroup(2, 2, 2, "more than are needed", 0.25, 4, 4, None),
        DrawnGroup(2, 3, 3, "fewer than two judged", None, 0, 2, None),
        DrawnGroup(2, 4, 4, "not finished", None, 0, 0, None),
    ]
    assert counts_of(lines) == {
        "draws/num_draws": 2,
        "draws/num_groups": 5,
        "draws/useful_frac": 0.5,
        "draws/num_equal_rewards": 1,
        "draws/num_more_than_needed": 1,
        "draws/num_filled_up": 0,
        "draws/mean_reward": (1 + 2 + 1) / 8,
    }
