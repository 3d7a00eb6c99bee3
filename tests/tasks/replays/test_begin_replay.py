"""What a replay refuses, before it starts or writes anything."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from infra.config import DataConfig, EngineConfig, RunConfig
from infra.data.prompt_batch import drawn
from infra.data.prompts import counts_of
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CANARY
from infra.megatron.protocol.optimizer_files import MOMENTS
from infra.records import AdapterVersion, EngineRan, File, PromptBatch, Rollouts, ScoredRollouts, TrainBatch, TrainerRan
from infra.runs import lineage
from infra.runs.lineage import adapter_at, base_version, next_step
from infra.runs.manifest import Manifest, environment
from infra.runs.replay import TASKS, files_in
from infra.store.files import path_of, read_json, record_of, verified, write, write_json
from infra.store.layout import MANIFEST, adapter_folder, run_folder
from infra.telemetry import program_versions
from infra.telemetry.program_versions import of_engine, of_trainer
from tasks.open_step import open_step
from tasks.replays.begin_replay import begin_replay, plan_replay

SAMPLED = {
    "adapter_version": 1,
    "num_prompts": 2,
    "group_size": 4,
    "temperature": 1.0,
    "num_samples": 8,
}


@pytest.fixture
def config(workspace: Path, model_folder: Path) -> RunConfig:
    return RunConfig(name="old", model=str(model_folder), engine=EngineConfig(kind="scripted"), data=DataConfig(num_prompts=2))


def adapter_of(config: RunConfig, version: int) -> AdapterVersion:
    folder = adapter_folder(config.name, version)
    write_json(folder / ADAPTER_CONFIG, {"r": 8, "base_model_name_or_path": config.model})
    fields: dict[str, object] = {}
    for field, name in {"weights": ADAPTER_WEIGHTS, **MOMENTS, "canary": CANARY}.items():
        data = safetensors.numpy.save({"x": np.full(2, version)}) if name != CANARY else b"{}"
        fields[field] = record_of(write(folder / name, data))
    return AdapterVersion.model_validate(
        dict(base_version(config)) | {"version": version, "num_optimizer_steps": version} | fields
    )


@pytest.fixture
def manifest(config: RunConfig) -> Manifest:
    """Of step 1 of the run `old`, which lies in the workspace."""

    def product(name: str) -> File:
        return record_of(write(run_folder("old") / "steps/000001" / name, name.encode()))

    start = adapter_of(config, 1)
    about = SAMPLED | {"run": "old", "step": 1, "adapter_sha256": start.sha256}
    made = Manifest(
        run="old",
        step=1,
        config=config,
        adapter_in=start,
        prompts=PromptBatch(
            run="old", step=1, file=product("prompts.jsonl"), num_prompts=2, dataset_fingerprint="f", first_row=2
        ),
        rollouts=Rollouts(file=product("samples.parquet"), num_output_tokens=9, num_truncated=0, **about),
        scored=ScoredRollouts(file=product("scored.parquet"), mean_reward=0.5, std_reward=0.5, num_trainable_groups=1, **about),
        batch=TrainBatch(
            run="old",
            step=1,
            adapter_version=1,
            adapter_sha256=start.sha256,
            file=product("batch.safetensors"),
            num_sequences=8,
            num_tokens=20,
            num_loss_tokens=9,
            samples=product("assembled.parquet"),
        ),
        adapter_out=adapter_of(config, 2),
        colocation={"colocation": "keep_weights", "reason": "none"},
        engine=EngineRan(kind="scripted", identity="scripted-1", flags=(), versions=of_engine("scripted"), backends={}),
        trainer=TrainerRan(versions=of_trainer(), backends={}),
        reward_source="",
        committed_at=1.0,
        **dict(environment()),
    )
    write_json(run_folder("old") / "steps/000001" / MANIFEST, made.model_dump(mode="json"))
    return made


def refusal_of(*overrides: str, run: str = "old", step: int = 1, first: str = "train", name: str = "new") -> str:
    """The one line with which it is refused; nothing was written."""
    before = sorted(run_folder("old").parent.rglob("*"))
    with pytest.raises(ValueError) as caught:
        plan_replay(run, step, first, name, list(overrides))
        begin_replay.fn(run, step, first, name, list(overrides))
    assert "\n" not in str(caught.value)
    assert sorted(run_folder("old").parent.rglob("*")) == before
    return str(caught.value)


def test_an_unknown_run_step_or_task_is_refused_with_those_that_are_known(manifest: Manifest) -> None:
    assert refusal_of(run="odl").startswith("run 'odl' is unknown; known in ")
    assert refusal_of(run="odl").endswith("/runs are old")
    assert refusal_of(run="../runs/old").startswith("run '../runs/old' is unknown")
    for step in (0, 2, -1):
        assert refusal_of(step=step) == f"step {step} of run 'old' is not committed; committed are 1"
    assert refusal_of(first="learn") == (
        "task 'learn' cannot be where a replay begins; known are draw_prompts, roll_out, score, assemble, train"
    )


@pytest.mark.parametrize(
    ("change", "owner", "kept_by"),
    [
        ("data.num_prompts=3", "draw_prompts", ("roll_out", "score", "assemble", "train")),
        ("sampling.temperature=0.5", "roll_out", ("score", "assemble", "train")),
        ("engine.deterministic=false", "roll_out", ("score", "assemble", "train")),
        ("reward.name=gsm8k_verl_strict", "score", ("assemble", "train")),
        ("batch.advantage=rloo", "assemble", ("train",)),
        ("trainer.learning_rate=1e-5", "train", ()),
        ("engine.colocation=keep_weights", "train", ()),
        ("tracking.experiment=x", "train", ()),
    ],
)
def test_a_change_of_what_is_taken_over_is_refused_and_says_where_to_begin(
    manifest: Manifest, change: str, owner: str, kept_by: tuple[str, ...]
) -> None:
    for first in TASKS:
        if first in kept_by:
            message = refusal_of(change, first=first)
            assert message.startswith(f"{change.split('=')[0]} = ")
            assert message.endswith(
                f"changes what {owner} made, which a replay from {first} takes over: replay from {owner} to change it"
            )
        elif TASKS.index(first) <= TASKS.index(owner):  # type: ignore[arg-type]
            plan_replay("old", 1, first, "new", [change])


def test_what_the_adapter_hangs_on_cannot_be_changed(manifest: Manifest, model_folder: Path, tmp_path: Path) -> None:
    for change in ("seed=3", "trainer.lora.rank=4", 'trainer.lora.target_modules=["q_proj"]'):
        assert "cannot be: adapter 1, from which the step starts, was made with it" in refusal_of(change, first="draw_prompts")
    other = shutil.copytree(model_folder, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    assert "cannot be: adapter 1 was made for another base model; its digest is" in refusal_of(
        f"model={other}", first="draw_prompts"
    )


def test_a_base_model_that_is_not_the_recorded_one_is_refused(
    manifest: Manifest, model_folder: Path, tmp_path: Path, workspace: Path
) -> None:
    path = run_folder("old") / "steps/000001" / MANIFEST
    content = read_json(path)
    content["adapter_in"]["base"]["sha256"] = "0" * 64
    write_json(path, content)
    message = refusal_of()
    assert message.startswith(f"base model {str(model_folder)!r} is not the one that the step was made with: its digest is ")
    assert f"recorded was {'0' * 64}" in message


def of_version_0(manifest: Manifest, config: RunConfig) -> None:
    """As if it were a run's first step."""
    content = manifest.model_dump(mode="json") | {"adapter_in": base_version(config).model_dump(mode="json")}
    write_json(run_folder("old") / "steps/000001" / MANIFEST, content)


def test_the_base_model_itself_may_get_another_lora_and_from_the_first_task_on_another_model(
    manifest: Manifest, config: RunConfig, model_folder: Path, tmp_path: Path
) -> None:
    of_version_0(manifest, config)
    assert plan_replay("old", 1, "train", "new", ["trainer.lora.rank=4"]).origin.adapter.rank == 4
    other = shutil.copytree(model_folder, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    assert "replay from draw_prompts to change it" in refusal_of(f"model={other}", first="roll_out")
    assert plan_replay("old", 1, "draw_prompts", "new", [f"model={other}"]).origin.changed == ("model",)


def test_a_name_that_is_in_use_is_refused(manifest: Manifest, config: RunConfig) -> None:
    assert refusal_of(name="old") == "run 'old' exists already: give the new run another name"
    begin_replay.fn("old", 1, "train", "new", [])
    assert refusal_of("trainer.learning_rate=1e-5", name="new") == "run 'new' exists already: give the new run another name"
    assert refusal_of(first="assemble", name="new") == "run 'new' exists already: give the new run another name"
    write_json(run_folder("new") / "steps/000001" / MANIFEST, {})
    assert "this replay is committed in it" in refusal_of(name="new")
    assert refusal_of(name="no/name").startswith("name: run name 'no/name' must be")
    assert "cannot be set to 'other' as well" in refusal_of("name=other", name="third")


def test_the_steps_after_a_replay_that_took_prompts_over_draw_from_the_same_data_set(
    manifest: Manifest, config: RunConfig, model_folder: Path
) -> None:
    """Here the data set has changed since: the new run would begin with rows of the old one and go on with the new one's."""
    content = manifest.model_dump(mode="json")
    content["prompts"]["rows"] = counts_of(config.training, model_folder).model_dump()
    write_json(run_folder("old") / "steps/000001" / MANIFEST, content)
    _, step, adapter, _ = begin_replay.fn("old", 1, "score", "new", [])
    with pytest.raises(ValueError, match=r"has changed since run 'new' drew from it first: .* recorded was f\."):
        drawn(config.training, step.model_copy(update={"index": 2}), adapter)
    _, step, adapter, _ = begin_replay.fn("old", 1, "draw_prompts", "other", [])
    assert drawn(config.training, step, adapter).num_prompts == 2


def test_a_field_or_value_that_cannot_be_is_refused(manifest: Manifest) -> None:
    assert "field 'trainer.learning_rat' does not exist" in refusal_of("trainer.learning_rat=1")
    assert refusal_of("trainer.learning_rate=-1").startswith("trainer.learning_rate = -1")


FILES: dict[str, Callable[[Manifest], File | None]] = {
    "prompts.jsonl": lambda manifest: manifest.prompts.file,
    "batch.safetensors": lambda manifest: manifest.batch.file,
    "assembled.parquet": lambda manifest: manifest.batch.samples,
    ADAPTER_WEIGHTS: lambda manifest: manifest.adapter_in.weights,
    MOMENTS["exp_avg"]: lambda manifest: manifest.adapter_in.exp_avg,
    MOMENTS["exp_avg_sq"]: lambda manifest: manifest.adapter_in.exp_avg_sq,
}


@pytest.mark.parametrize("name", FILES)
def test_a_kept_file_that_is_not_what_it_was_is_named(manifest: Manifest, name: str) -> None:
    file = FILES[name](manifest)
    assert file
    path = path_of(file)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert refusal_of().startswith(f"cannot be replayed: {path} has changed since it was written")
    path.unlink()
    assert refusal_of().startswith(f"cannot be replayed: {path} is missing")


def test_both_moments_are_among_the_digests_of_a_step(manifest: Manifest) -> None:
    found = plan_replay("old", 1, "train", "new", []).origin.digests
    for way, adapter in (("in", manifest.adapter_in), ("out", manifest.adapter_out)):
        for which in MOMENTS:
            assert found[f"{which} {way}"] == adapter.moments[which].sha256


def test_a_step_of_an_earlier_version_whose_moments_lie_in_one_file_is_replayed(manifest: Manifest) -> None:
    path = write(adapter_folder("old", 1) / "state/optimizer.safetensors", b"both")
    content = manifest.model_dump(mode="json")
    for which, name in MOMENTS.items():
        (adapter_folder("old", 1) / name).unlink()
        del content["adapter_in"][which]
    content["adapter_in"]["optimizer"] = record_of(path).model_dump()
    write_json(run_folder("old") / "steps/000001" / MANIFEST, content)
    _, _, adapter, _ = begin_replay.fn("old", 1, "train", "new", [])
    assert verified(adapter.moments["optimizer"]) == adapter_folder("new", 1) / "state/optimizer.safetensors"
    assert plan_replay("old", 1, "train", "new", []).origin.digests["optimizer in"] == record_of(path).sha256


def test_what_is_not_needed_may_be_missing(manifest: Manifest, workspace: Path) -> None:
    for path in (path_of(manifest.rollouts.file), path_of(manifest.batch.file)):
        path.unlink()
    shutil.rmtree(adapter_folder("old", 2))
    assert plan_replay("old", 1, "roll_out", "new", []).kept.prompts is not None


def test_a_manifest_that_cannot_be_read_is_named(manifest: Manifest) -> None:
    path = run_folder("old") / "steps/000001" / MANIFEST
    path.write_text("{")
    assert refusal_of().startswith(f"{path} cannot be read: ")
    write_json(path, {"run": "old"})
    assert refusal_of().startswith(f"{path} is not a manifest that this version of Ratchet can read: ")


def test_a_replay_that_was_interrupted_while_files_were_copied_is_begun_again(manifest: Manifest, workspace: Path) -> None:
    (workspace / "runs/.new.partial/steps").mkdir(parents=True)
    config, step, adapter, kept = begin_replay.fn("old", 1, "train", "new", [])
    assert (step.run, step.index, adapter.run, adapter.version, config.name) == ("new", 1, "new", 1, "new")
    assert not (workspace / "runs/.new.partial").exists()
    assert kept.batch is not None and kept.batch.file.path == "runs/new/steps/000001/batch.safetensors"
    assert begin_replay.fn("old", 1, "train", "new", []) == (config, step, adapter, kept)


def test_a_replayed_step_that_was_dropped_is_replayed_again_with_the_files_that_it_takes_over(manifest: Manifest) -> None:
    """The drop says that the run goes on with it."""
    begin_replay.fn("old", 1, "train", "new", [])
    lineage.drop("new", 1)
    *_, adapter, kept = begin_replay.fn("old", 1, "train", "new", [])
    taken = files_in(adapter, kept.rollouts, kept.batch)
    assert all(verified(file).exists() for file in taken) and len(taken) > 4


def test_a_run_that_began_with_a_replay_counts_its_steps_from_there(manifest: Manifest) -> None:
    config, _, adapter, _ = begin_replay.fn("old", 1, "train", "new", [])
    assert next_step("new") == 1
    assert adapter_at(config, 1) == adapter
    with pytest.raises(ValueError, match="begins with a replay of step 1 of run 'old' that is not committed yet"):
        open_step.fn(config, None)
    write_json(run_folder("new") / "steps/000001" / MANIFEST, {})
    assert next_step("new") == 2


def test_an_engine_of_another_version_is_a_difference_where_samples_are_made_again(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_versions, "SCRIPTED", {"scripted": "2"})
    monkeypatch.setattr(program_versions, "of_trainer", lambda: manifest.trainer.versions | {"torch": "1.0"})
    trainer = f"trainer: torch {manifest.trainer.versions['torch']} -> 1.0"
    for first, expected in (("roll_out", ("engine scripted: scripted 1 -> 2", trainer)), ("score", (trainer,))):
        assert plan_replay("old", 1, first, "new", []).origin.replayed_from.differences[-len(expected) :] == expected


@pytest.mark.parametrize("first", ["draw_prompts", "roll_out"])
def test_a_step_with_tokens_of_two_adapters_is_replayed_from_its_rewards_or_later(manifest: Manifest, first: str) -> None:
    mixed = manifest.model_copy(update={"rollouts": manifest.rollouts.model_copy(update={"num_older_tokens": 3})})
    write_json(run_folder("old") / "steps/000001" / MANIFEST, mixed.model_dump(mode="json"))
    assert refusal_of(first=first) == (
        "step 1 of run 'old' has 3 tokens of the adapter before 1 (trainer.loss.correction.in_flight_updates), which a new run that begins with this "
        "step has not: replay it from score, assemble or train"
    )
