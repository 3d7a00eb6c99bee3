"""Samples that no committed step was trained on, counted from the files of a run."""

from dataclasses import replace
from pathlib import Path

import pytest
from shared import commit, sample

from infra.config import RunConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.interface import RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.rollout_collector import RolloutCollector
from infra.records import AdapterVersion, BaseModelRef, CarriedOver, PromptBatch, Rollouts
from infra.runs.accounting import unused
from infra.store.files import read_note, record_of, write_json
from infra.store.layout import StepFolder
from infra.store.samples import Sample, write_samples

RUN = "mine"


def some(prompts: range, group_size: int = 2) -> list[Sample]:
    return [replace(sample(prompt), sample_index=index) for prompt in prompts for index in range(group_size)]


def finished(step: int, samples: list[Sample], inputs: str = "these") -> StepFolder:
    """A finished rollout, as its task leaves it."""
    folder = StepFolder.at(RUN, step)
    unused.note_replaced(folder.path)
    write_samples(folder.samples, samples)
    write_json(folder.samples_inputs, {"inputs": {"all": inputs}, "file": record_of(folder.samples).model_dump()})
    return folder


def committed(step: int, **metrics: float) -> None:
    commit(RunConfig(name=RUN), step, {"reward/mean": 0.5, **metrics})


@pytest.fixture(autouse=True)
def here(workspace: Path) -> None:
    finished(0, some(range(4)))
    committed(0)


def test_a_run_whose_samples_are_all_trained_on_has_none() -> None:
    assert unused.of_run(RUN).line == ""


def test_rollouts_of_steps_that_are_not_committed_are_counted_whole_or_under_way() -> None:
    finished(1, some(range(4, 8)))
    with Journal(StepFolder.at(RUN, 2).journal, {}) as journal:
        for each in some(range(8, 10))[:3]:
            journal.add(each)
        half = StepFolder.at(RUN, 2).journal.read_bytes()
    StepFolder.at(RUN, 2).journal.write_bytes(half[:-5])  # the last line is cut off
    found = unused.of_run(RUN)
    assert (found.num_waiting, found.num_prompts) == (8 + 2, 4 + 1)
    assert found.line == ("10 samples were not trained on, of 5 prompts nothing: 10 wait in steps that are not committed")
    committed(1)
    assert unused.of_run(RUN).num_waiting == 2


def test_groups_that_the_last_step_carried_over_are_counted_until_a_step_uses_them() -> None:
    folder = finished(0, some(range(4)))
    write_samples(folder.left_over, some(range(4, 5)))
    prompts = record_of(folder.samples)
    carried = CarriedOver(prompts=prompts, prompt_ids=(4, 5), samples=record_of(folder.left_over)).model_dump(mode="json")
    commit(RunConfig(name=RUN), 0, {"reward/mean": 0.5}, rollouts={"left_over": carried})
    found = unused.of_run(RUN)
    assert (found.num_carried_over, found.num_prompts) == (2, 2), "of prompt 5 nothing was sampled yet"
    finished(1, some(range(4, 6)))
    found = unused.of_run(RUN)
    assert (found.num_carried_over, found.num_waiting, found.num_prompts) == (0, 4, 2), "none is counted twice"


def test_a_rollout_that_is_made_again_with_other_inputs_is_counted_once() -> None:
    finished(1, some(range(4, 8)), "an adapter")
    again = [replace(each, output_logprobs=[-0.25]) for each in some(range(4, 8))]
    folder = finished(1, again, "another adapter")
    unused.note_replaced(folder.path)  # killed before the new one was written: again
    unused.note_replaced(folder.path)
    assert unused.of_run(RUN).num_dropped == 8 + 8
    metrics = unused.metrics_of_step(_prompts(4), _rollouts(), 0)
    assert metrics == {"rollout/unused_samples": 16, "rollout/unused_prompts": 0}
    committed(1, **metrics)
    found = unused.of_run(RUN)
    assert (found.num_dropped, found.num_prompts) == (16, 0)
    assert "16 were dropped or made again" in found.line


def test_samples_of_a_quarantined_journal_are_counted() -> None:
    with Journal(StepFolder.at(RUN, 1).journal, {"adapter": "a"}) as journal:
        for each in some(range(4, 6)):
            journal.add(each)
    with Journal(StepFolder.at(RUN, 1).journal, {"adapter": "b"}) as journal:
        journal.add(some(range(4, 5))[0])
    found = unused.of_run(RUN)
    assert (found.num_dropped, found.num_waiting) == (4, 1)


@pytest.fixture
def adapter() -> AdapterVersion:
    return AdapterVersion(
        run=RUN,
        version=0,
        base=BaseModelRef(id="tiny", sha256="b"),
        rank=8,
        alpha=16,
        target_modules=("q_proj",),
        seed=0,
        weights=None,
    )


def test_over_sampled_groups_that_a_step_drops_are_counted(adapter: AdapterVersion) -> None:
    asked = [Prompt(n, n, "?", "#### 4", [1], seed=n) for n in range(4)]
    request = RolloutRequest(asked, SamplingConfig(group_size=2), adapter, num_oversampled_prompts=2)
    collector = RolloutCollector(request, SampleSink(), 100)
    made = [replace(each, adapter_version=0, adapter_sha256=adapter.sha256) for each in some(range(4))]
    for each in [made[4], *made[:4]]:  # one of prompt 2, all of prompts 0 and 1
        is_more_needed = collector.take(each)
    assert not is_more_needed
    assert not collector.take(made[6]), "it was under way"
    assert not collector.take(replace(made[7], finish_reason="abort"))
    assert collector.counts()["num_unused"] == 2
    found = unused.metrics_of_step(_prompts(4, num_oversampled=2), _rollouts(num_prompts=2), 2)
    assert found == {"rollout/unused_samples": 2, "rollout/unused_prompts": 2}


def test_a_step_without_unused_samples_has_no_such_metric() -> None:
    assert unused.metrics_of_step(_prompts(4), _rollouts(), 0) == {}


def test_a_rollout_whose_mark_is_damaged_is_counted_and_one_that_its_journal_still_has_is_not() -> None:
    folder = finished(1, some(range(4, 8)))
    folder.samples_inputs.write_bytes(folder.samples_inputs.read_bytes()[:20])
    assert read_note(folder.samples_inputs, dict[str, object]) is None  # as its task finds it
    unused.note_lost(folder.path)
    unused.note_lost(folder.path)  # killed before it was made again
    assert unused.of_run(RUN).num_dropped == 8
    killed = StepFolder.at(RUN, 2)
    with Journal(killed.journal, {}) as journal:
        for each in some(range(8, 10)):
            journal.add(each)
    write_samples(killed.samples, some(range(8, 10)))
    unused.note_lost(killed.path)
    assert unused.of_run(RUN).num_dropped == 8, "its samples come from the journal"


def _prompts(num: int, num_oversampled: int = 0) -> PromptBatch:
    file = record_of(StepFolder.at(RUN, 0).samples)
    place = {"run": RUN, "step": 1, "dataset_fingerprint": "f", "first_row": 0}
    return PromptBatch(**place, file=file, num_prompts=num, num_oversampled_prompts=num_oversampled)


def _rollouts(num_prompts: int = 4) -> Rollouts:
    place = {
        "run": RUN,
        "step": 1,
        "adapter_version": 0,
        "adapter_sha256": "base",
        "file": record_of(StepFolder.at(RUN, 0).samples),
    }
    counts = {"num_prompts": num_prompts, "group_size": 2, "num_samples": 2 * num_prompts}
    return Rollouts(**place, **counts, temperature=1.0, num_output_tokens=9, num_truncated=0)
