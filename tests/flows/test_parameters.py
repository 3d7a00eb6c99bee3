"""What the parameters of a flow come to, and the name that its flow run gets."""

from pathlib import Path
from typing import Any

import pytest

from flows.parameters import as_overrides, resolved, resolved_comparison
from flows.presets import arithmetic, preset, smoke
from infra.comparison.config import ComparisonConfig
from infra.config import RunConfig
from infra.store.files import write_json
from infra.store.layout import RunFolder

MINE = smoke().but(name="mine", seed=7)


@pytest.fixture
def mine(workspace: Path) -> None:
    write_json(RunFolder.of("mine").config, MINE.model_dump(mode="json"))


def test_nothing_given_is_the_preset_of_the_flow(workspace: Path) -> None:
    assert resolved(None) == arithmetic()
    assert resolved(None, otherwise="smoke") == smoke()


def test_a_preset_with_a_name_steps_and_fields(workspace: Path) -> None:
    config = resolved({"trainer": {"learning_rate": 1e-4}, "data": None}, "gsm8k-qwen2.5-0.5b", "mine", 3)
    base = preset("gsm8k-qwen2.5-0.5b")
    assert config == base.but(name="mine", num_steps=3, trainer=base.trainer.but(learning_rate=1e-4))


def test_a_configuration_is_taken_as_it_is(workspace: Path) -> None:
    assert resolved(MINE) is MINE
    assert resolved(MINE, name="other").name == "other"


@pytest.mark.parametrize("chosen", ["auto", "arithmetic", "gsm8k"])
def test_a_whole_configuration_as_json_is_the_same_over_any_preset(workspace: Path, chosen: str) -> None:
    assert resolved(MINE.model_dump(mode="json"), chosen) == MINE


def test_auto_is_the_configuration_of_the_run_that_is_named(mine: None) -> None:
    assert resolved(None, name="mine") == MINE
    assert resolved({"seed": 8}, name="mine", num_steps=5) == MINE.but(seed=8, num_steps=5)
    assert resolved(None, name="other") == arithmetic().but(name="other")
    assert resolved(None, "arithmetic", "mine") == arithmetic().but(name="mine")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"preset": "arithmetik"}, "preset 'arithmetik' is unknown; the nearest is arithmetic; known are arithmetic, arithmetic-gpu"),
    ({"name": "my run"}, "name: run name 'my run' must be 1 to 80 letters"),
    ({"num_steps": -1}, "num_steps = -1: Input should be greater than or equal to 1"),
    (
        {"config": {"trainer": {"lerning_rate": 1}}},
        "field 'trainer.lerning_rate' does not exist; the nearest is trainer.learning_rate",
    ),
    ({"config": {"traner": None}}, "field 'traner' does not exist"),
    ({"config": {"trainer": {"learning_rate": -1}}}, "trainer.learning_rate = -1: Input should be greater than 0"),
    ({"config": {"sampling": {"group_size": 1}}}, "sampling.group_size 1 with advantage 'grpo': a group needs 2 samples or more"),
    ({"config": "smoke"}, "config 'smoke' is no set of fields: give names with values"),
]


@pytest.mark.parametrize(("parameters", "message"), WRONG, ids=str)
def test_bad_input_is_one_line_with_the_value(workspace: Path, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        resolved(**{"config": None, **parameters})
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_a_comparison_has_its_defaults_with_what_differs() -> None:
    assert resolved_comparison({"mode": "training", "trainer": None}, "fast", 5) == ComparisonConfig(
        mode="training", name="fast", num_steps=5
    )
    with pytest.raises(ValueError, match="field 'modus' does not exist; the nearest is mode"):
        resolved_comparison({"modus": "training"})


def test_changes_of_a_replay_are_those_of_the_form_without_a_name() -> None:
    assert as_overrides({"name": "x", "trainer": {"learning_rate": 1e-5, "max_mismatch": None}, "data": None}) == [
        "trainer.learning_rate=1e-05",
        "trainer.max_mismatch=null",
    ]
    assert as_overrides(None) == as_overrides(RunConfig()) == []
