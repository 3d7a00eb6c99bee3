import pytest

from infra.config import RunConfig
from infra.config.tools.grid import MAX_VARIANTS, axis_of, overrides_between, variants
from infra.config.tools.overrides import with_overrides
from infra.runs.replay import first_to_run_again

BASE = RunConfig(name="rates")


def test_the_grid_is_made_in_the_order_in_which_it_is_written() -> None:
    made = variants(BASE, ["trainer.learning_rate=1e-4,3e-4", "seed=0,1"])
    assert [variant.name for variant in made] == [
        "rates-learning_rate-0.0001-seed-0",
        "rates-learning_rate-0.0001-seed-1",
        "rates-learning_rate-0.0003-seed-0",
        "rates-learning_rate-0.0003-seed-1",
    ]
    assert [(variant.trainer.learning_rate, variant.seed) for variant in made] == [(1e-4, 0), (1e-4, 1), (3e-4, 0), (3e-4, 1)]
    assert {variant.tracking.sweep for variant in made} == {"rates"}


def test_a_variant_differs_from_the_base_in_what_is_swept_alone() -> None:
    (variant,) = variants(BASE, ["batch.advantage=rloo"])
    assert overrides_between(BASE, variant) == ['batch.advantage="rloo"', 'tracking.sweep="rates"']
    assert with_overrides(BASE, overrides_between(BASE, variant), name=variant.name) == variant


def test_values_that_hold_commas_are_given_as_json() -> None:
    assert axis_of('trainer.lora.target_modules=[["q_proj"], ["q_proj", "v_proj"]]').values == (["q_proj"], ["q_proj", "v_proj"])
    names = [each.name for each in variants(BASE, ['trainer.lora.target_modules=[["q_proj"], ["q_proj", "v_proj"]]'])]
    assert names == ["rates-target_modules-q_proj", "rates-target_modules-q_proj_v_proj"]


def test_two_fields_that_end_alike_are_told_apart_in_the_names() -> None:
    (variant,) = variants(BASE, ["evaluation.split=test", "data.split=train"])
    assert variant.name == "rates-evaluation.split-test-data.split-train"


def test_nothing_is_a_value_too() -> None:
    names = [each.name for each in variants(BASE, ["trainer.loss.dual_clip=null,3", 'data.instruction=["", "Think."]'])]
    assert names[:2] == ["rates-dual_clip-null-instruction-none", "rates-dual_clip-null-instruction-Think."]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ([], "a sweep needs a field with values"),
        (["trainer.learning_rate"], "is no FIELD=VALUE,VALUE"),
        (["trainer.learning_rate="], "is no FIELD=VALUE,VALUE"),
        (["=1"], "is no FIELD=VALUE,VALUE"),
        (
            ["trainer.learning_rat=1e-4"],
            "field 'trainer.learning_rat' does not exist; the nearest is trainer.learning_rate; known there: lora, loss",
        ),
        (["trainer.learning_rate=1e-4,0"], "trainer.learning_rate = 0: Input should be greater than 0"),
        (["seed=1,1"], "names the value 1 twice"),
        (["seed=1", "seed=2"], "seed is swept twice"),
        (["seed=[1"], "begins like a JSON list of values and is none"),
        (["seed=[]"], "names no value"),
        (["name=a,b"], "name cannot be swept"),
        (["tracking.experiment=a,b"], "tracking.experiment cannot be swept"),
        (["sampling.temperature=1,1.0"], "cannot be told apart"),
        (['data.instruction=["a b", "a_b"]'], "cannot be told apart"),
        ([f"seed={','.join(map(str, range(MAX_VARIANTS + 1)))}"], f"{MAX_VARIANTS} or fewer"),
        ([f'data.instruction=["{"x" * 80}"]'], "must be 1 to 80 letters"),
    ],
)
def test_what_cannot_be_swept_is_refused(over: list[str], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        variants(BASE, over)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ("trainer.learning_rate=1e-5", "train"),
        ("trainer.lora.rank=4", "train"),
        ("batch.advantage=rloo", "assemble"),
        ("reward.name=gsm8k_verl_strict", "score"),
        ("sampling.temperature=0.5", "roll_out"),
        ("engine.dtype=bfloat16", "roll_out"),
        ("environment.name=mine.Game", "roll_out"),
        ("engine.colocation=restart", "train"),
        ("seed=1", "draw_prompts"),
        ("data.num_prompts=8", "draw_prompts"),
        ("model=tiny-moe", "draw_prompts"),
        ("num_steps=40", "train"),
    ],
)
def test_what_differs_between_two_runs_says_from_where_the_second_has_to_be_made(change: str, first: str) -> None:
    assert first_to_run_again(BASE, with_overrides(BASE, [change], name="other")) == first


def test_of_an_environments_fields_those_that_decide_about_its_episodes_count() -> None:
    played = with_overrides(BASE, ["environment.name=mine.Game"], name="played")
    assert first_to_run_again(played, played.but(environment=played.environment.but(max_turns=2))) == "roll_out"
    assert first_to_run_again(played, played.but(environment=played.environment.but(workers=2))) == "train"


def test_of_several_differences_the_earliest_counts() -> None:
    assert first_to_run_again(BASE, with_overrides(BASE, ["trainer.lora.rank=4", "reward.shuffle_seed=1"])) == "score"
    assert first_to_run_again(BASE, BASE) == "train"
