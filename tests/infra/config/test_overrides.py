import pytest

from infra.config import RunConfig, SamplingConfig
from infra.config.tools.overrides import flattened, with_overrides


def refusal_of(*changes: str) -> str:
    with pytest.raises(ValueError) as caught:
        with_overrides(RunConfig(), list(changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_values_are_read_as_json_or_else_as_text() -> None:
    changed = with_overrides(
        RunConfig(),
        [
            "trainer.lora.rank=4",
            "sampling.temperature=0.7",
            "data.source=openai/gsm8k",
            "data.subset=main",
            "data.instruction=Give x = 4.",
            "engine.deterministic=false",
            'engine.extra_flags=["--schedule-policy", "lpm"]',
        ],
    )
    assert changed.trainer.lora.rank == 4
    assert changed.sampling.temperature == 0.7
    assert (changed.data.source, changed.data.subset, changed.data.instruction) == ("openai/gsm8k", "main", "Give x = 4.")
    assert changed.engine.deterministic is False
    assert changed.engine.extra_flags == ("--schedule-policy", "lpm")
    assert with_overrides(changed, ["data.subset=null"]).data.subset is None


def test_what_is_not_named_stays() -> None:
    base = RunConfig(name="base", seed=3, sampling=SamplingConfig(group_size=4))
    assert with_overrides(base, []) == base
    assert with_overrides(base, ["sampling.max_output_tokens=8"]).sampling == base.sampling.but(max_output_tokens=8)


def test_the_name_of_the_run_can_be_given_beside_the_changes() -> None:
    assert with_overrides(RunConfig(), ["seed=1"], name="other") == RunConfig(name="other", seed=1)


def test_the_last_of_two_changes_of_one_field_holds() -> None:
    assert with_overrides(RunConfig(), ["seed=1", "seed=2"]).seed == 2


def test_changes_that_only_fit_together_may_come_in_any_order() -> None:
    changes = ["trainer.lora.rank=64", "engine.max_lora_rank=64"]
    assert with_overrides(RunConfig(), changes) == with_overrides(RunConfig(), changes[::-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "trainer.lora.rnak=4",
            "field 'trainer.lora.rnak' does not exist; the nearest is trainer.lora.rank; known there: rank, alpha, target_modules",
        ),
        (
            "trianer.lora.rank=4",
            "field 'trianer' does not exist; the nearest is trainer.lora.rank; known there: name, model, seed, num_steps, data, ",
        ),
        ("learning_rate=1", "field 'learning_rate' does not exist; the nearest is trainer.learning_rate; known there: name, "),
        ("trainer.lr=1", "field 'trainer.lr' does not exist; the nearest is trainer.learning_rate; known there: lora, "),
        ("lr=1", "field 'lr' does not exist; the nearest is trainer.learning_rate; known there: name, "),
        ("trainer.rank=1", "field 'trainer.rank' does not exist; the nearest is trainer.lora.rank; known there: lora, "),
        ("trainer.kl=1", "field 'trainer.kl' does not exist; the nearest is trainer.loss.kl."),
        (
            "sampling.max_tokens=1",
            "field 'sampling.max_tokens' does not exist; the nearest is sampling.max_output_tokens; known there: ",
        ),
        ("seed.low=4", "field 'seed.low' does not exist; the nearest is seed; known there: nothing"),
        ("=4", "field '' does not exist"),
        ("seed", "'seed' is no FIELD=VALUE"),
    ],
)
def test_a_field_that_does_not_exist_is_named_with_those_that_do(change: str, message: str) -> None:
    assert refusal_of(change).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('reward.functions=[{"nam": "x"}]', "reward.functions.0.name is missing; reward.functions.0.nam does not exist"),
        ('reward.functions=[{"name": "x"', """reward.functions = '[{"name": "x"': this is no valid JSON"""),
        ('data.sources=[{"source": "a"}]', "data.sources.0 = {'source': 'a'}: Input should be a valid string"),
        ('seed={"a": 1}', "seed = {'a': 1}: Input should be a valid integer"),
    ],
)
def test_a_list_that_is_written_wrongly_is_said_by_its_place(change: str, message: str) -> None:
    assert refusal_of(change) == message


def test_values_that_do_not_fit_are_all_named_in_one_line() -> None:
    message = refusal_of("sampling.group_size=none", "trainer.lora.rank=0")
    assert "sampling.group_size = 'none': " in message
    assert "trainer.lora.rank = 0: " in message


def test_a_value_is_said_once() -> None:
    assert refusal_of("name=a/b").startswith("name: run name 'a/b' must be 1 to 80 letters")
    assert refusal_of("name=a/b").count("a/b") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trainer.lora.rank=32", "trainer.lora.rank 32 is above the engine's maximum, engine.max_lora_rank 16"),
        ("trainer.tensor_parallel=2", "num_processes 1 is no multiple of tensor_parallel 2"),
    ],
)
def test_values_that_do_not_fit_together_are_said_without_the_whole_section(change: str, message: str) -> None:
    assert refusal_of(change) == message


def test_a_configuration_can_be_flat() -> None:
    assert flattened({"trainer": {"lora": {"rank": 8}}, "seed": 0}) == {"trainer.lora.rank": 8, "seed": 0}
