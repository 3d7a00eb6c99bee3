from infra.config import RunConfig
from infra.config.tools.overrides import flattened, with_overrides
from infra.config.tools.schema import fields_of, origins, shown

FIELDS = {field.name: field for field in fields_of(RunConfig)}


def test_every_field_of_the_models_is_there_once_with_its_default() -> None:
    assert {name: field.default for name, field in FIELDS.items()} == flattened(RunConfig().model_dump())


def test_a_field_says_type_bounds_unit_default_and_meaning() -> None:
    assert FIELDS["engine.request_timeout_s"].help == (
        "Longest silence from the engine, in which no request of a rollout is answered. One sample has to fit, at 20 tokens a second; waiting "
        "for a place among engine.max_running_requests does not count. [float > 0, seconds; default 600]"
    )
    assert FIELDS["trainer.lora.rank"].help == (
        "Rank of the adapter's matrices; engine.max_lora_rank or less. [int >= 1; default 8]"
    )
    assert FIELDS["data.num_prompts"].unit == "count"
    assert FIELDS["trainer.lr_warmup_steps"].unit == "steps"
    assert FIELDS["sampling.max_output_tokens"].unit == "tokens"
    assert FIELDS["batch.advantage"].type == "grpo|dr_grpo|rloo|reinforce_pp"
    assert FIELDS["data.subset"].help.endswith("[str|null; default null]")
    assert FIELDS["trainer.lora.target_modules"].type == "list of str"


def test_a_default_is_shown_as_it_could_be_given() -> None:
    changes = [f"{name}={shown(field.default)}" for name, field in FIELDS.items()]
    assert with_overrides(RunConfig(), changes) == RunConfig()
    assert [shown(value) for value in (True, None, (1, 2), ("a",), "")] == ["true", "null", "[1, 2]", '["a"]', '""']
    assert shown(({"name": "held-out", "every": None},)) == '[{"name": "held-out"}]', "what is left out, is; and it can be typed"
    assert not [field.name for field in FIELDS.values() if "Annotated" in field.kind]


def test_each_value_says_where_it_comes_from() -> None:
    base = RunConfig()
    preset = base.but(trainer=base.trainer.but(learning_rate=1e-3, adam_beta2=0.9))
    config = with_overrides(preset, ["trainer.learning_rate=1e-5", "seed=0"])
    found = {origin.field: (origin.value, origin.source) for origin in origins(config, preset, {"trainer.learning_rate", "seed"})}
    assert found["trainer.learning_rate"] == (1e-5, "command line")
    assert found["trainer.adam_beta2"] == (0.9, "preset")
    assert found["trainer.adam_beta1"] == (0.9, "default")
    assert found["seed"] == (0, "command line")
    assert len(found) == len(FIELDS)
    assert {source for _, source in [*found.values()]} == {"default", "preset", "command line"}
