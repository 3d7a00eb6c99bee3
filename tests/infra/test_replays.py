from infra.records import AdapterVersion, BaseModelRef, File, PromptBatch
from infra.replays import files_in, moved

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


def test_all_files_of_records_are_found() -> None:
    assert files_in(
        ADAPTER, None, PromptBatch(run="old", step=2, file=FILE, num_prompts=1, dataset_fingerprint="", first_row=0)
    ) == [
        ADAPTER.weights,
        ADAPTER.exp_avg,
        ADAPTER.exp_avg_sq,
        FILE,
    ]
