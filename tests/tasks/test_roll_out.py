"""The task's own part: what was sampled is found again by what decides it, whenever it was interrupted."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shared import untrained_adapter

from infra.concurrency.gc_freeze import pass_over_what_is_here
from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.interface import RolloutMeasures
from infra.engines.sampling import begun_by, inputs_key
from infra.engines.scripted import ScriptedEngine
from infra.failures import DigestMismatch, EngineUnavailable, WrongAnswer
from infra.records import AdapterVersion, File, PromptBatch, Rollouts
from infra.store.files import path_of, read_json, record_of, write_json_lines
from infra.store.layout import StepFolder, step_folder
from infra.store.samples import read_samples
from infra.telemetry import program_versions
from tasks.roll_out import roll_out
from tasks.support.rollout import engine_ran, left_over

ENGINE, SAMPLING = EngineConfig(kind="scripted"), SamplingConfig(group_size=3)


@pytest.fixture
def adapter(model_folder: Path) -> AdapterVersion:
    return untrained_adapter(model_folder)


@pytest.fixture
def prompts(workspace: Path) -> Iterator[PromptBatch]:
    rows = [Prompt(n, n, "2 + 2?", "#### 4", [4, 5, 6 + n], 70 + n)._asdict() for n in range(2)]
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", rows)
    yield PromptBatch(run="r", step=0, file=record_of(path), num_prompts=2, dataset_fingerprint="f", first_row=0)
    ScriptedEngine.stop_in(workspace)


def fault(workspace: Path, name: str) -> None:
    (workspace / "fault").write_text(name)


def sampled(prompts: PromptBatch, adapter: AdapterVersion, engine: EngineConfig = ENGINE) -> tuple[Rollouts, dict[str, float]]:
    """With the measures of the attempt that ended."""
    made = roll_out.fn(engine, SAMPLING, prompts, adapter)
    return made, read_json(step_folder(prompts) / "measures/roll_out.json")


def test_in_a_rollout_the_collector_passes_over_what_was_there_before(prompts: PromptBatch, adapter: AdapterVersion) -> None:
    gc.unfreeze()
    pass_over_what_is_here.cache_clear()
    before = ["there"]
    sampled(prompts, adapter)
    assert not any(each is before for each in gc.get_objects())


def test_an_interrupted_rollout_ends_as_an_undisturbed_one_and_counts_only_its_own_tokens(
    workspace: Path, prompts: PromptBatch, adapter: AdapterVersion
) -> None:
    undisturbed, _ = sampled(prompts, adapter)
    (StepFolder.of(prompts).samples_inputs).unlink()
    fault(workspace, "dies")
    for num_kept in (1, 2):  # each attempt gets one sample further
        with pytest.raises(EngineUnavailable):
            sampled(prompts, adapter)
        assert len((StepFolder.of(prompts).journal).read_bytes().splitlines()) == 1 + num_kept
    fault(workspace, "")
    made, figures = sampled(prompts, adapter)
    assert made == undisturbed
    assert figures["num_kept"] == 2
    assert 0 < figures["num_new_output_tokens"] < made.num_output_tokens
    assert not (StepFolder.of(prompts).journal).exists()


def test_a_finished_rollout_is_found_without_an_engine(workspace: Path, prompts: PromptBatch, adapter: AdapterVersion) -> None:
    made, _ = sampled(prompts, adapter)
    fault(workspace, "dies")
    patient = ENGINE.but(request_timeout_s=5, max_running_requests=1)  # decides no sample
    assert sampled(prompts, adapter, patient)[0] == made


def test_a_rollout_that_died_before_it_said_that_it_was_finished_generates_nothing_again(
    workspace: Path, prompts: PromptBatch, adapter: AdapterVersion
) -> None:
    fault(workspace, "dies")
    for _ in range(6):
        with pytest.raises(EngineUnavailable):
            sampled(prompts, adapter)
    made, figures = sampled(prompts, adapter)  # the fault would still strike at the first sample
    assert (made.num_samples, figures["num_kept"], figures["num_new_output_tokens"]) == (6, 6, 0)


def test_samples_of_another_engine_are_not_mixed_in(workspace: Path, prompts: PromptBatch, adapter: AdapterVersion) -> None:
    fault(workspace, "dies")
    with pytest.raises(EngineUnavailable):
        sampled(prompts, adapter)
    fault(workspace, "")
    _, figures = sampled(prompts, adapter, ENGINE.but(dtype="bfloat16"))
    assert figures["num_kept"] == 0
    assert (step_folder(prompts) / "samples.journal.aside-0").exists()


@pytest.mark.parametrize("change", ["adapter", "prompts", "sampling", "engine", "num_oversampled", "begun"])
def test_whatever_decides_a_sample_is_in_the_fence(prompts: PromptBatch, adapter: AdapterVersion, change: str) -> None:
    parts = {
        "engine": ENGINE,
        "sampling": SAMPLING,
        "prompts": prompts.file,
        "adapter": adapter,
        "num_oversampled": 0,
        "begun": None,
    }
    others = {
        "engine": ENGINE.but(deterministic=False),
        "sampling": SAMPLING.but(temperature=0.5),
        "prompts": prompts.file.model_copy(update={"sha256": "1"}),
        "adapter": adapter.model_copy(update={"weights": prompts.file}),
        "num_oversampled": 1,
        "begun": prompts.file,
    }
    assert inputs_key(**parts) != inputs_key(**parts | {change: others[change]})  # type: ignore[arg-type]


def test_a_wrong_answer_is_kept_in_the_step_and_named_in_the_error(
    workspace: Path, prompts: PromptBatch, adapter: AdapterVersion
) -> None:
    fault(workspace, "NaN")
    path = step_folder(prompts) / "evidence/roll_out-0.json"
    with pytest.raises(WrongAnswer, match=f"log-probability nan cannot be; the evidence is in {path}"):
        sampled(prompts, adapter)
    kept = json.loads(path.read_bytes())["evidence"]["sample"]
    assert (kept["prompt_id"], kept["sample_index"]) == (0, 0)
    assert kept["output_logprobs"][0] != kept["output_logprobs"][0]
    with pytest.raises(WrongAnswer, match=r"roll_out-1\.json"):
        sampled(prompts, adapter)


def test_a_changed_samples_file_is_not_taken_for_the_finished_rollout(prompts: PromptBatch, adapter: AdapterVersion) -> None:
    sampled(prompts, adapter)
    with StepFolder.of(prompts).samples.open("ab") as file:
        file.write(b"x")
    with pytest.raises(DigestMismatch, match=r"samples\.parquet has changed"):
        sampled(prompts, adapter)


def test_what_lies_there_before_the_engines_last_answer_does_not_count_without_it(
    workspace: Path, prompts: PromptBatch, adapter: AdapterVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = SAMPLING.but(group_size=2)
    before, folder, sample = roll_out.fn(ENGINE, smaller, prompts, adapter), step_folder(prompts), ScriptedEngine.sample

    def goes_wrong_at_its_end(*arguments: Any, **options: Any) -> RolloutMeasures:
        how = sample(*arguments, **options)
        fault(workspace, "garbage")
        return how

    with monkeypatch.context() as patch, pytest.raises(WrongAnswer, match="golden check"):
        patch.setattr(ScriptedEngine, "sample", goes_wrong_at_its_end)
        sampled(prompts, adapter)
    assert len(read_samples(StepFolder(folder).samples)) == 6, "they were written while the engine was asked"
    assert not StepFolder(folder).samples_inputs.exists(), "nor does what is said of the file that lay there"
    fault(workspace, "")
    assert roll_out.fn(ENGINE, smaller, prompts, adapter) == before
    assert sampled(prompts, adapter)[1]["num_kept"] == 0


def test_what_is_broken_off_is_recorded_with_the_rollout_and_found_again_with_it(
    prompts: PromptBatch, adapter: AdapterVersion
) -> None:
    partial = prompts.model_copy(update={"num_oversampled_prompts": 1, "partial_rollouts": True})
    made, _ = sampled(partial, adapter)
    left = made.left_over
    assert left is not None and (left.prompt_ids, left.prompts) == ((1,), prompts.file)
    assert [(sample.prompt_id, sample.sample_index) for sample in read_samples(path_of(left.samples))] == [(1, 0), (1, 1), (1, 2)]
    assert sampled(partial, adapter)[0] == made, "found, not made again"
    path_of(left.samples).write_bytes(b"x")
    with pytest.raises(DigestMismatch, match="left_over"):
        sampled(partial, adapter)
    assert sampled(prompts, adapter)[0].left_over is None


def other_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(program_versions, "SCRIPTED", {"scripted": version})


def test_a_rollout_that_one_version_began_is_not_ended_by_another(
    workspace: Path, prompts: PromptBatch, adapter: AdapterVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(workspace, "dies")
    with pytest.raises(EngineUnavailable):
        sampled(prompts, adapter)
    fault(workspace, "")
    other_versions(monkeypatch, "2")
    _, figures = sampled(prompts, adapter)
    assert figures["num_kept"] == 0
    assert (step_folder(prompts) / "samples.journal.aside-0").exists()
    assert engine_ran(step_folder(prompts)).versions == {"scripted": "2"}


@pytest.mark.parametrize("damaged", ['{"inputs": ', "{}", '{"engine": {}}', "[1]"])
def test_a_damaged_record_of_the_engine_is_one_line_with_a_cure(
    prompts: PromptBatch, adapter: AdapterVersion, damaged: str
) -> None:
    sampled(prompts, adapter)
    StepFolder(step_folder(prompts)).samples_inputs.write_text(damaged)
    with pytest.raises(ValueError, match=r"samples\.inputs_key\.json .*; drop the step with `ratchet drop`") as caught:
        engine_ran(step_folder(prompts))
    assert "\n" not in str(caught.value)


def test_an_engine_that_is_of_another_version_than_its_interpreter_was_a_moment_ago_samples_nothing(
    prompts: PromptBatch, adapter: AdapterVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake = ScriptedEngine.wake

    def installs_another(engine: ScriptedEngine) -> bool:
        engine.versions = {"scripted": "2"}
        return wake(engine)

    monkeypatch.setattr(ScriptedEngine, "wake", installs_another)
    with pytest.raises(EngineUnavailable, match="environment has changed since this rollout began: scripted 1 -> scripted 2"):
        sampled(prompts, adapter)
    assert not StepFolder.of(prompts).samples.exists()


def test_what_another_version_has_begun_is_sampled_from_its_beginning(
    prompts: PromptBatch, adapter: AdapterVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled(prompts.model_copy(update={"num_oversampled_prompts": 1, "partial_rollouts": True}), adapter)
    left = engine_left_over(step_folder(prompts))
    following = prompts.model_copy(
        update={"step": 1, "partial_rollouts": True, "begun": left, "num_begun_prompts": 1, "begun_engine_versions": "scripted 1"}
    )
    assert begun_by(ENGINE, following) == left
    step_folder(following).mkdir(parents=True)
    assert sampled(following, adapter)[1]["num_new_output_tokens"] < sum_of_tokens(following)
    other_versions(monkeypatch, "2")
    assert begun_by(ENGINE, following) is None
    assert sampled(following, adapter)[1]["num_new_output_tokens"] == sum_of_tokens(following)


def engine_left_over(folder: Path) -> File:
    left = left_over(folder)
    assert left is not None
    return left.samples


def sum_of_tokens(batch: PromptBatch) -> int:
    return sum(len(sample.output_tokens) for sample in read_samples(StepFolder.of(batch).samples))
