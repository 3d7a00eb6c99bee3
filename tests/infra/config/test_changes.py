import re

import pytest

from infra.config import DataConfig, RunConfig
from infra.config.tools.changes import MAY_CHANGE, changes, check_goes_on, may_change
from infra.config.tools.overrides import flattened, with_overrides
from infra.settings import CHECKOUT


def refusal_of(*given: str) -> str:
    with pytest.raises(ValueError) as caught:
        check_goes_on(RunConfig(name="mine"), with_overrides(RunConfig(name="mine"), list(given)))
    return str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        "model=tiny-moe",
        "seed=1",
        "data.num_prompts=8",
        "data.split=test",
        "engine.kind=scripted",
        "engine.dtype=bfloat16",
        "engine.deterministic=false",
        "sampling.temperature=0.5",
        "sampling.group_size=4",
        "reward.name=gsm8k_verl_strict",
        "reward.shuffle_seed=1",
        "batch.advantage=rloo",
        "trainer.lora.rank=4",
        "trainer.loss.clip_high=0.2",
        "trainer.num_minibatches=2",
        "trainer.adam_beta2=0.99",
        "trainer.dtype=bfloat16",
        "tracking.experiment=other",
    ],
)
def test_what_the_run_is_may_not_change(given: str) -> None:
    field, _, value = given.partition("=")
    message = refusal_of(given, "num_steps=40")
    assert message.startswith("run 'mine' was begun with another configuration and cannot go on with this one: ")
    assert re.search(rf"{re.escape(field)} \S+ -> '?{value.title() if value == 'false' else value}", message)
    assert "num_steps" not in message


@pytest.mark.parametrize(
    "given",
    [
        "num_steps=40",
        "evaluation.every=1",
        "retention.keep_last=2",
        "export.what=merged",
        "trainer.learning_rate=1e-5",
        "trainer.mode=persistent",
        "trainer.timeout_s=5",
        "engine.max_running_requests=3",
    ],
)
def test_how_it_is_made_may_change(given: str) -> None:
    check_goes_on(RunConfig(), with_overrides(RunConfig(), [given]))
    assert len(changes(RunConfig(), with_overrides(RunConfig(), [given]))) == 1


def test_the_held_out_rows_of_a_single_file_may_not_change() -> None:
    before = RunConfig(name="mine", data=DataConfig(source="own.jsonl"))
    for given in ("evaluation.num_prompts=8", "evaluation.every=0", "evaluation.source=other.jsonl"):
        with pytest.raises(ValueError, match=rf"cannot go on with this one: {given.partition('=')[0]} \S+ -> "):
            check_goes_on(before, with_overrides(before, [given]))
    check_goes_on(before, with_overrides(before, ["evaluation.every=1", "evaluation.num_samples=4", "evaluation.pass_at_k=[4]"]))


def test_all_differences_are_shown() -> None:
    message = refusal_of("seed=1", "data.num_prompts=8")
    assert "seed 0 -> 1; data.num_prompts 16 -> 8" in message


def test_every_entry_of_the_table_is_a_field_and_the_page_shows_it() -> None:
    fields = flattened(RunConfig().model_dump())
    page = (CHECKOUT / "docs/runs.md").read_text()
    for entry, why in MAY_CHANGE.items():
        assert any(field == entry or field.startswith(f"{entry}.") for field in fields), entry
        assert f"| `{entry}` | {why} |" in page
    assert may_change("evaluation.every") and not may_change("evaluations")
