"""A sample of several turns is shown turn by turn."""

from dataclasses import replace
from pathlib import Path

import pytest
from shared import sample
from turns import sampled, turns_apart

from infra.models import base_model
from infra.reporting import shown_samples
from infra.reporting.shown_samples import turns_of
from infra.store.layout import StepFolder, step_folder_of


def test_a_trajectory_is_shown_turn_by_turn_with_the_reward_of_each(model_folder: Path) -> None:
    first, reply, second = (
        base_model.tokenizer(model_folder)(text, add_special_tokens=False)["input_ids"] for text in ("5 + 6 = 12", "no", "11")
    )
    made = replace(sampled(([7], first, [-0.5] * len(first)), (reply, second, [-0.5] * len(second))), turn_rewards=(0.0, 1.0))
    turns = (([7], first, [-0.5] * len(first)), ([7, *first, *reply], second, [-0.5] * len(second)))
    shown = turns_of(turns_apart(made, turns), model_folder)
    assert [heading for heading, _ in shown] == [
        f"turn 1, {len(first)} tokens, reward 0",
        f"context of turn 2, {len(first) + len(reply) + 2} tokens",
        f"turn 2, {len(second)} tokens, reward 1",
    ]
    assert "5 + 6 = 12no" in shown[1][1] and shown[2][1] == "11"
    assert turns_of([made], model_folder) == [
        (f"turn 1, {len(first)} tokens, reward 0", "5 + 6 = 12"),
        (f"given, {len(reply)} tokens", "no"),
        (f"turn 2, {len(second)} tokens, reward 1", "11"),
    ]


def test_one_prompt_and_one_answer_has_no_turns(model_folder: Path) -> None:
    assert turns_of([sample()], model_folder) == []


def test_samples_of_a_prompt_that_its_file_has_lost_are_said_with_the_file(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (step_folder_of("r", 0)).mkdir(parents=True)
    StepFolder.at("r", 0).prompts.touch()
    monkeypatch.setattr(shown_samples, "read_samples", lambda path: [sample()])
    with pytest.raises(ValueError, match=r"000000/prompts.jsonl has no prompt 0, of which .*assembled.parquet has samples"):
        shown_samples.best_and_worst_rows("r", 0, 4)
