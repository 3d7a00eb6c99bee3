"""In-flight updates with the scripted engine: every sample once, each token with its adapter, equal bytes after any kill."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shared import untrained_adapter

from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.rollout_collector import RolloutCollector
from infra.engines.scripted import ScriptedEngine
from infra.records import AdapterSwitch, AdapterVersion, PromptBatch, Rollouts
from infra.runs.accounting import unused
from infra.store.files import path_of, read_json, record_of, write, write_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import Sample, read_samples
from tasks.roll_out import roll_out
from tasks.support.rollout import made_from_drawn, sample_what_is_missing
from tasks.support.rollouts import in_flight
from tasks.support.rollouts.in_flight import MIXED, NotWanted

NUM_PROMPTS, GROUP_SIZE, PAUSE_AT = 3, 4, 2
NUM_SAMPLES = NUM_PROMPTS * GROUP_SIZE
ENGINE, SAMPLING = EngineConfig(kind="scripted"), SamplingConfig(group_size=GROUP_SIZE)
BY_TIME, BY_TOKEN = (AdapterSwitch(run="r", made_by_step=0, pause_at=pause_at) for pause_at in (0, PAUSE_AT))


class Killed(BaseException):
    """As a KeyboardInterrupt: no part of the product catches it."""


@pytest.fixture
def adapters(model_folder: Path, workspace: Path) -> tuple[AdapterVersion, AdapterVersion]:
    old = untrained_adapter(model_folder)
    weights = record_of(write(workspace / "runs/r/adapters/000001/adapter_model.safetensors", b"weights"))
    return old, old.model_copy(update={"version": 1, "weights": weights})


@pytest.fixture
def prompts(workspace: Path) -> Iterator[PromptBatch]:
    rows = [Prompt(n, n, "2 + 2?", "#### 4", [4, 5, 6 + n], 70 + n)._asdict() for n in range(NUM_PROMPTS)]
    path = write_json_lines(workspace / "runs/r/steps/000001/prompts.jsonl", rows)
    yield PromptBatch(run="r", step=1, file=record_of(path), num_prompts=NUM_PROMPTS, dataset_fingerprint="f", first_row=0)
    ScriptedEngine.stop_in(workspace)


@pytest.fixture
def comes(monkeypatch: pytest.MonkeyPatch, adapters: tuple[AdapterVersion, AdapterVersion]) -> Callable[[int | None], list[int]]:
    """Have the newer adapter come when this many samples were taken; None: never. Returns the adapter's version of each sample taken."""
    take, limit, taken = RolloutCollector.take, [0], list[int]()

    def counted(rollout: RolloutCollector, sample: Sample) -> bool:
        is_more_needed = take(rollout, sample)
        taken.append(sample.adapter_version)
        return is_more_needed

    def after(count: int | None) -> list[int]:
        limit[0] = 10**9 if count is None else count
        taken.clear()
        return taken

    monkeypatch.setattr(RolloutCollector, "take", counted)
    monkeypatch.setattr(in_flight, "newer_adapter", lambda switch: adapters[1] if len(taken) >= limit[0] else None)
    monkeypatch.setattr(in_flight.lineage, "adapter_after", lambda run, step: adapters[1])
    return after


def rolled_out(prompts: PromptBatch, adapter: AdapterVersion, switch: AdapterSwitch | None) -> tuple[Rollouts, list[Sample]]:
    made = roll_out.fn(ENGINE, SAMPLING, prompts, adapter, switch=switch)
    return made, read_samples(path_of(made.file))


def test_a_rollout_under_way_goes_on_with_the_next_adapter_and_every_sample_is_there_once(
    prompts: PromptBatch, adapters: tuple[AdapterVersion, AdapterVersion], comes: Callable[[int | None], list[int]]
) -> None:
    old, newer = adapters
    versions = comes(5)
    made, samples = rolled_out(prompts, old, BY_TIME)
    assert (made.adapter_version, made.adapter_sha256) == (newer.version, newer.sha256)
    assert [(each.prompt_id, each.sample_index) for each in samples] == [
        (prompt, index) for prompt in range(NUM_PROMPTS) for index in range(GROUP_SIZE)
    ]
    assert versions == sorted(versions), "nothing of the older adapter is taken after the switch"
    older = [each.num_older_tokens for each in samples]
    whole = [each for each in samples if each.num_older_tokens == len(each.output_tokens)]
    assert len(whole) == 5 and older[5:] == [0] * (NUM_SAMPLES - 5), "the scripted engine has one request under way at a time"
    assert all(each.older_adapter_sha256 == (old.sha256 if each.num_older_tokens else "") for each in samples)
    assert {(each.adapter_version, each.adapter_sha256) for each in samples} == {(newer.version, newer.sha256)}
    assert made.num_older_tokens == sum(older)
    figures = read_json(StepFolder.of(prompts).path / "measures/roll_out.json")
    assert figures[MIXED] == 0
    assert figures["num_new_output_tokens"] == made.num_output_tokens
    comes(0)
    assert rolled_out(prompts, old, BY_TIME)[0] == made, "it is found"


def test_a_rollout_that_ends_before_the_next_adapter_comes_is_what_it_is_without_in_flight_updates(
    prompts: PromptBatch, adapters: tuple[AdapterVersion, AdapterVersion], comes: Callable[[int | None], list[int]]
) -> None:
    comes(None)
    made, _ = rolled_out(prompts, adapters[0], BY_TIME)
    comes(0)
    assert rolled_out(prompts, adapters[0], BY_TIME)[0] == made, "the adapter came when it was complete"
    assert rolled_out(prompts, adapters[0], None)[0] == made


@pytest.mark.parametrize("count", range(1, 2 * NUM_SAMPLES))
def test_with_a_deterministic_engine_a_rollout_killed_anywhere_ends_with_equal_bytes(
    count: int,
    prompts: PromptBatch,
    adapters: tuple[AdapterVersion, AdapterVersion],
    comes: Callable[[int | None], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comes(0)
    undisturbed, samples = rolled_out(prompts, adapters[0], BY_TOKEN)
    assert {each.num_older_tokens for each in samples} == {PAUSE_AT}
    for file in (StepFolder.of(prompts).samples_inputs, StepFolder.of(prompts).samples):
        file.unlink()
    versions, take = comes(NUM_SAMPLES), RolloutCollector.take

    def killing(rollout: RolloutCollector, sample: Sample) -> bool:
        is_more_needed = take(rollout, sample)
        if len(versions) == count:
            raise Killed
        return is_more_needed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RolloutCollector, "take", killing)
        rolled_out(prompts, adapters[0], BY_TOKEN)
    assert unused.of_run("r").num_waiting == (count - NUM_SAMPLES if count > NUM_SAMPLES else 0), "prefixes are no samples"
    made, _ = rolled_out(prompts, adapters[0], BY_TOKEN)
    assert made == undisturbed
    assert len(versions) == 2 * NUM_SAMPLES, "what the journal has is not made again"


def test_a_rollout_that_waits_for_an_adapter_ends_when_nothing_waits_for_it_and_goes_on_from_there(
    prompts: PromptBatch, adapters: tuple[AdapterVersion, AdapterVersion], comes: Callable[[int | None], list[int]]
) -> None:
    def sample(**how: Any) -> list[Sample]:
        inputs = in_flight.with_switch(made_from_drawn(ENGINE, SAMPLING, prompts, adapters[0]), BY_TOKEN)
        return sample_what_is_missing(ENGINE, SAMPLING, prompts, adapters[0], inputs, BY_TOKEN, **how)

    comes(None)
    with pytest.raises(NotWanted, match="step 0"):
        sample(is_wanted=lambda: False)
    versions = comes(0)
    assert len(sample()) == NUM_SAMPLES
    assert versions == [1] * NUM_SAMPLES
