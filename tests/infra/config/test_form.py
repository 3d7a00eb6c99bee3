"""The schema of a form of changes: what it shows, and what it lets pass."""

from collections.abc import Iterator
from typing import Any

import pytest
from prefect.utilities.schema_tools import ValidationError, validate
from pydantic import BaseModel

from infra.comparison.config import ComparisonConfig
from infra.config import RunConfig
from infra.config.tools.form import changes_in, schema_of

MODELS: list[type[BaseModel]] = [RunConfig, ComparisonConfig]


def alternatives(schema: dict[str, Any]) -> list[str]:
    return [part["title"] for part in schema["anyOf"]]


def shown(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field and section that the form can show, by its dotted name, in its order."""
    (change,) = [part for part in schema["anyOf"] if part["title"] == "change"]
    for name, field in change["properties"].items():
        yield prefix + name, field
        if "anyOf" in field and "change" in alternatives(field):
            yield from shown(field, f"{prefix}{name}.")


FORM = schema_of(RunConfig, leaves_out=("name", "num_steps"))
FIELDS = dict(shown(FORM))


def test_sections_stand_in_the_order_model_data_reward_learning_hardware() -> None:
    assert [name for name in FIELDS if "." not in name] == [
        *("model", "seed", "layout", "data", "sampling", "reward", "environment", "batch", "trainer", "evaluation"),
        *("engine", "retention", "export", "tracking"),
    ]


def test_a_section_shows_its_own_fields_before_the_sections_in_it() -> None:
    trainer = [name for name in FIELDS if name.startswith("trainer.")]
    assert trainer[0] == "trainer.num_minibatches"
    assert trainer.index("trainer.sleep_weights") < trainer.index("trainer.lora") < trainer.index("trainer.loss.kl")


@pytest.mark.parametrize("model", MODELS)
def test_every_field_and_section_has_help_and_its_own_name(model: type[BaseModel]) -> None:
    for name, field in shown(schema_of(model)):
        assert len(field["description"]) > 10, name
        assert field["title"] == name.rpartition(".")[2]


def test_help_says_unit_and_range() -> None:
    assert FIELDS["data.num_prompts"]["description"] == "Prompts (= groups) per step. [>= 1]"
    assert FIELDS["sampling.max_output_tokens"]["description"].endswith("[tokens, >= 1]")
    assert FIELDS["trainer.adam_beta2"]["description"].endswith("[>= 0 < 1]")
    assert (FIELDS["trainer.adam_beta2"]["minimum"], FIELDS["trainer.adam_beta2"]["exclusiveMaximum"]) == (0, 1)


@pytest.mark.parametrize("model", MODELS)
def test_all_is_closed_and_empty_until_it_is_to_differ(model: type[BaseModel]) -> None:
    schema = schema_of(model)
    assert alternatives(schema) == ["unchanged", "change", "JSON"]
    for name, field in shown(schema):
        assert "default" not in field, name
        if "anyOf" in field:
            assert alternatives(field) in (["unchanged", "change"], ["unchanged", "set"], ["value", "none"]), name


def test_what_has_a_place_elsewhere_is_not_shown_and_passes() -> None:
    assert not {"name", "num_steps"} & FIELDS.keys()
    validate({"config": {"name": "r", "num_steps": 3}}, {"properties": {"config": FORM}}, raise_on_error=True)


@pytest.mark.parametrize("config", [None, {}, {"data": None}, {"trainer": {"loss": None, "recompute": None}}])
def test_nothing_is_a_valid_change(config: Any) -> None:
    validate({"config": config}, {"properties": {"config": FORM}}, raise_on_error=True)
    assert changes_in(RunConfig, config or {}) in ({}, {"trainer": {}})


@pytest.mark.parametrize("model", MODELS)
def test_a_whole_configuration_passes(model: type[BaseModel]) -> None:
    validate({"config": model().model_dump(mode="json")}, {"properties": {"config": schema_of(model)}}, raise_on_error=True)


WRONG: list[tuple[Any, str]] = [
    ({"trainer": {"learning_rate": -1}}, "field 'config.trainer.learning_rate'.*-1 is less than or equal to the minimum of 0"),
    ({"trainer": {"lora": {"rank": 2.5}}}, "field 'config.trainer.lora.rank'.*2.5 is not of type 'integer'"),
    ({"batch": {"advantage": "gpro"}}, "field 'config.batch.advantage'.*'gpro' is not one of .'grpo', 'dr_grpo'"),
    ({"trainer": {"lerning_rate": 1}}, "field 'config.trainer'.*'lerning_rate' is not one of .*'learning_rate'"),
    ({"traner": {}}, "field 'config'.*'traner' is not one of .*'trainer'"),
    ({"tracking": {"experiment": "a b"}}, "field 'config.tracking.experiment'.*'a b' does not match"),
    ({"retention": {"keep_last": 0}}, "field 'config.retention.keep_last'.*0 is less than the minimum of 1"),
    ({"evaluation": {"pass_at_k": ["x"]}}, "'x' is not of type 'integer'"),
    ("text", "field 'config'.*'text' is not of type 'object'"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=str)
def test_what_is_wrong_is_named_with_its_place_and_value(config: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        validate({"config": config}, {"properties": {"config": FORM}}, raise_on_error=True)


def test_null_is_a_change_only_where_a_field_can_be_null() -> None:
    sent = {"data": None, "engine": {"deterministic": None}, "trainer": {"max_mismatch": None, "loss": {"dual_clip": 3.0}}}
    assert changes_in(RunConfig, sent) == {"engine": {}, "trainer": {"max_mismatch": None, "loss": {"dual_clip": 3.0}}}


def test_a_field_that_does_not_exist_stays_for_the_check_that_names_it() -> None:
    assert changes_in(RunConfig, {"traner": None, "trainer": {"x": 1}}) == {"traner": None, "trainer": {"x": 1}}
