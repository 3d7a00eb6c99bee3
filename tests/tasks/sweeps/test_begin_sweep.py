from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.config import RunConfig
from infra.store.files import write_json
from infra.store.layout import run_folder
from tasks.sweeps import begin_sweep
from tasks.sweeps.begin_sweep import check_sweep, shared_step


@pytest.fixture
def config(model_folder: Path, workspace: Path) -> RunConfig:
    base = RunConfig(name="rates", model=str(model_folder))
    return base.but(engine=base.engine.but(kind="scripted"), evaluation=base.evaluation.but(every=0))


def test_all_variants_are_checked_and_nothing_is_written(config: RunConfig, workspace: Path) -> None:
    made = check_sweep(config, ["trainer.learning_rate=1e-4,3e-4"])
    assert [variant.name for variant in made] == ["rates-learning_rate-0.0001", "rates-learning_rate-0.0003"]
    assert not (workspace / "runs").exists()


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ("reward.name=gsm8k_numeric,my.reward", "variant rates-name-my.reward: "),
        ("trainer.num_processes=1,3", None),
        ("trainer.tensor_parallel=1,3", "num_processes 1 is no multiple of tensor_parallel 3"),
        ("data.split=train,validation", "variant rates-split-validation: the generated data set 'arithmetic' has the splits"),
        (
            "engine.max_context_tokens=512,100000",
            "variant rates-max_context_tokens-100000: engine.max_context_tokens 100000 is more",
        ),
    ],
)
def test_what_one_variant_cannot_do_is_said_with_its_name(
    config: RunConfig, workspace: Path, over: str, said: str | None
) -> None:
    if said is None:
        assert len(check_sweep(config, [over])) == 2
        return
    with pytest.raises(ValueError) as caught:
        check_sweep(config, [over])
    assert said in str(caught.value)
    assert not (workspace / "runs").exists()


def test_a_name_that_another_run_has_is_refused_with_the_difference(config: RunConfig) -> None:
    (taken, _) = check_sweep(config, ["trainer.lora.rank=4,8"])
    write_json(run_folder(taken.name) / "config.json", taken.but(seed=7).model_dump(mode="json"))
    with pytest.raises(ValueError, match=r"variant rates-rank-4: run 'rates-rank-4' was begun with another .* seed 7 -> 0"):
        check_sweep(config, ["trainer.lora.rank=4,8"])


class Recorded:
    """Stands for the manifest of a committed step 0."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> list[RunConfig]:
    """Eight variants; the first has made its step 0."""
    made = check_sweep(config, ["seed=0,1", "trainer.learning_rate=1e-4,3e-4", "batch.advantage=grpo,rloo"])
    write_json(run_folder(made[0].name) / "steps/000000/manifest.json", {})
    monkeypatch.setattr(begin_sweep, "read_manifest", lambda folder: Recorded(made[0]))
    return made


def test_a_variant_takes_over_what_does_not_differ(committed: list[RunConfig]) -> None:
    found = [shared_step(variant, committed) for variant in committed]
    assert [shared.from_task if shared else None for shared in found[:4]] == [None, "assemble", "train", "assemble"]
    assert found[2] is not None and found[2].donor == committed[0].name
    assert found[2].overrides == ("trainer.learning_rate=0.0003",)


def test_a_variant_of_another_seed_samples_for_itself(committed: list[RunConfig]) -> None:
    assert [shared_step(variant, committed) for variant in committed[4:]] == [None] * 4


def test_a_variant_that_has_begun_by_itself_goes_on_by_itself(committed: list[RunConfig]) -> None:
    write_json(run_folder(committed[2].name) / "config.json", committed[2].model_dump(mode="json"))
    assert shared_step(committed[2], committed) is None


def test_a_variant_that_has_begun_goes_on_with_what_it_took_over(
    committed: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stands before its donor may have made step 0 meanwhile: with another origin it would be another run of the same name."""
    first, _, variant, donor, *_ = committed
    write_json(run_folder(donor.name) / "steps/000000/manifest.json", {})
    monkeypatch.setattr(begin_sweep, "read_manifest", lambda folder: Recorded(first if first.name in str(folder) else donor))
    assert (found := shared_step(variant, committed)) and found.donor == first.name
    replayed = SimpleNamespace(replayed_from=SimpleNamespace(run=donor.name))
    monkeypatch.setattr(begin_sweep, "origin_of", lambda run: replayed if run == variant.name else None)
    assert (found := shared_step(variant, committed)) and found.donor == donor.name
