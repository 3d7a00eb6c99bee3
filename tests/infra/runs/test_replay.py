import pytest

from infra.config import DataConfig, EnvironmentConfig, RunConfig
from infra.records import AdapterVersion, BaseModelRef, CarriedOver, File, PromptBatch, Rollouts
from infra.runs.replay import check_changes, files_in, moved

FILE = File(path="runs/old/adapters/000002/adapter_model.safetensors", sha256="a" * 64, num_bytes=3)
ADAPTER = AdapterVersion(
    run="old",
    version=2,
    num_optimizer_steps=5,
    base=BaseModelRef(id="tiny", sha256="b"),
    rank=8,
    alpha=16,
    target_modules=("q_proj",),
    seed=4,
    weights=FILE,
    exp_avg=FILE.model_copy(update={"path": "runs/old/adapters/000002/state/exp_avg.safetensors"}),
    exp_avg_sq=FILE.model_copy(update={"path": "runs/old/adapters/000002/state/exp_avg_sq.safetensors"}),
)

BASE = AdapterVersion(run="old", version=0, base=ADAPTER.base, rank=8, alpha=16, target_modules=("q_proj",), seed=4)


def test_a_record_moves_to_another_run_with_its_files_and_nothing_else() -> None:
    there = moved(ADAPTER, "new")
    assert there.weights and there.exp_avg and there.exp_avg_sq
    assert there.weights.path == "runs/new/adapters/000002/adapter_model.safetensors"
    assert there.exp_avg.path == "runs/new/adapters/000002/state/exp_avg.safetensors"
    assert there.exp_avg_sq.path == "runs/new/adapters/000002/state/exp_avg_sq.safetensors"
    assert there.served_name == "new-v000002-aaaaaaaaaaaa"
    assert moved(there, "old") == ADAPTER


def test_a_run_whose_name_begins_another_s_name_keeps_its_own_place() -> None:
    prompts = PromptBatch(
        run="o",
        step=0,
        file=File(path="runs/o/steps/000000/x", sha256="a", num_bytes=1),
        num_prompts=1,
        dataset_fingerprint="",
        first_row=0,
    )
    assert moved(prompts, "o2").file.path == "runs/o2/steps/000000/x"


def test_what_a_step_left_is_among_its_files_and_moves_with_them() -> None:
    other = FILE.model_copy(update={"path": "runs/old/steps/000002/left_over.parquet"})
    about = {"adapter_version": 2, "adapter_sha256": "a", "num_prompts": 1, "group_size": 2, "temperature": 1.0}
    counts = {"num_samples": 2, "num_output_tokens": 3, "num_truncated": 0}
    left = CarriedOver(prompts=FILE, prompt_ids=(7,), samples=other)
    rollouts = Rollouts.model_validate({"run": "old", "step": 2, "file": FILE, **about, **counts, "left_over": left})
    assert files_in(rollouts) == [FILE, FILE, other]
    gone = moved(rollouts, "new").left_over
    assert gone is not None and gone.samples.path == "runs/new/steps/000002/left_over.parquet" and gone.prompt_ids == (7,)


def test_a_replay_that_holds_out_other_rows_draws_its_prompts_again() -> None:
    """Otherwise a question that the old step trained on could be asked in the new run's evaluations."""
    before = RunConfig(data=DataConfig(source="own.jsonl"))
    fewer = before.but(evaluation=before.evaluation.but(num_prompts=8))
    with pytest.raises(ValueError, match=r"evaluation\.num_prompts = 8 .* changes what draw_prompts made"):
        check_changes(before, fewer, "train", BASE)
    assert check_changes(before, fewer, "draw_prompts", BASE) == ["evaluation.num_prompts"]
    folder = before.but(data=DataConfig(source="own"))
    assert check_changes(folder, folder.but(evaluation=fewer.evaluation), "train", BASE) == ["evaluation.num_prompts"]


def test_a_replay_that_takes_over_the_samples_takes_no_other_environment() -> None:
    before = RunConfig(environment=EnvironmentConfig(name="mine.Game"))
    with pytest.raises(
        ValueError, match=r"environment\.max_turns = 2 .* changes what roll_out made, .* replay from roll_out to change it"
    ):
        check_changes(before, before.but(environment=before.environment.but(max_turns=2)), "score", BASE)
    assert check_changes(before, before.but(environment=before.environment.but(workers=2)), "score", BASE) == []


def test_what_an_adapter_was_made_with_cannot_change_even_if_it_is_the_first() -> None:
    """Version 0 may be an adapter that the run started from."""
    before = RunConfig()
    other = before.but(trainer=before.trainer.but(lora=before.trainer.lora.but(rank=4)))
    assert check_changes(before, other, "train", BASE) == ["trainer.lora.rank"]
    with pytest.raises(
        ValueError, match=r"trainer\.lora\.rank = 4 .* cannot be: adapter 0, from which the step starts, was made with it"
    ):
        check_changes(before, other, "train", ADAPTER.model_copy(update={"version": 0}))
    started = before.but(trainer=before.trainer.but(lora=before.trainer.lora.but(start_from="/sft")))
    with pytest.raises(ValueError, match=r"trainer\.lora\.start_from = '/sft' .* cannot be"):
        check_changes(before, started, "train", BASE)


def test_all_files_of_records_are_found() -> None:
    assert files_in(
        ADAPTER, None, PromptBatch(run="old", step=2, file=FILE, num_prompts=1, dataset_fingerprint="", first_row=0)
    ) == [
        ADAPTER.weights,
        ADAPTER.exp_avg,
        ADAPTER.exp_avg_sq,
        FILE,
    ]
