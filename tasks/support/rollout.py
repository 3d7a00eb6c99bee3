"""The rollout of a step: its samples and journal in the step's folder, recovered by the inputs that decide them."""

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra.concurrency.background import in_background
from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import RolloutMeasures, RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.sampling import VERSIONS, begun_by, inputs_key, partial_of, sample_all
from infra.records import AdapterSwitch, AdapterVersion, CarriedOver, EngineRan, File, PromptBatch
from infra.runs.accounting.unused import note_lost, note_replaced
from infra.runs.bad_answers import save_bad_answer
from infra.store.files import read_json_lines, read_note, read_record, record_of, verified, write_json
from infra.store.layout import StepFolder
from infra.store.samples import Sample, episodes_of, num_retracted, read_samples, write_samples
from infra.telemetry import memory_usage
from infra.telemetry.timings import measured, verb_of
from tasks.support.rollouts import in_flight

log = logging.getLogger(__name__)

ENGINE = "engine"


def made_from_drawn(
    engine: EngineConfig, sampling: SamplingConfig, prompts: PromptBatch, adapter: AdapterVersion
) -> dict[str, str]:
    return inputs_key(engine, sampling, prompts.file, adapter, prompts.num_oversampled_prompts, begun_by(engine, prompts))


def finished(folder: Path, inputs: dict[str, str]) -> list[Sample] | None:
    """Return the samples of a finished rollout, if it had exactly these inputs."""
    found = read_note(StepFolder(folder).samples_inputs, dict[str, Any])
    if found is None or found.get("inputs") != inputs:
        return None
    if left := left_over(folder):
        verified(left.samples)
    return read_samples(verified(File.model_validate(found["file"])))


def finished_with_switch(folder: Path, inputs: dict[str, str], switch: AdapterSwitch | None) -> list[Sample] | None:
    """Return the samples of a finished rollout: of these inputs alone or, where there is a switch, continued by the newer adapter."""
    samples = finished(folder, inputs)
    newer = in_flight.newer_adapter(switch) if samples is None and switch is not None else None
    return samples if newer is None else finished(folder, in_flight.switched(inputs, newer))


def engine_ran(folder: Path) -> EngineRan:
    """Return the engine that made the samples of a finished rollout, as recorded when they were made. Raises ValueError for a damaged record."""
    path = StepFolder(folder).samples_inputs
    cure = "drop the step with `ratchet drop`, and it is sampled again"
    try:
        return EngineRan.model_validate(read_record(path, dict[str, Any], cure=cure)[ENGINE])
    except (KeyError, ValidationError) as error:
        raise ValueError(f"{path} does not say which engine sampled; {cure}") from error


def counts_of(samples: Sequence[Sample], *, of_episodes: bool) -> dict[str, int]:
    """Return what a record of a rollout counts in its samples."""
    episodes = episodes_of(samples)
    given = sum(len(sample.output_tokens) - sample.num_sampled_tokens for sample in samples)
    return {
        "num_samples": len(episodes),
        "num_output_tokens": sum(sample.num_sampled_tokens for sample in samples),
        "num_truncated": sum(any(each.is_truncated for each in episode) for episode in episodes),
        "num_older_tokens": sum(sample.num_older_tokens for sample in samples),
        "num_turns": sum(sample.num_turns for sample in samples) if of_episodes else 0,
        "num_retracted": num_retracted(samples),
        "num_given_tokens": given + sum(len(each.prompt_tokens) for episode in episodes for each in episode[1:]),
    }


def left_over(folder: Path) -> CarriedOver | None:
    """Return the groups that a finished rollout carries over."""
    found = (read_note(StepFolder(folder).samples_inputs, dict[str, Any]) or {}).get("left_over")
    return CarriedOver.model_validate(found) if found else None


def sample_what_is_missing(
    engine_config: EngineConfig,
    sampling: SamplingConfig,
    prompts: PromptBatch,
    adapter: AdapterVersion,
    inputs: dict[str, str],
    switch: AdapterSwitch | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[Sample]:
    """Return all samples of the step. Samples that earlier attempts left in the journal are not generated again.

    switch: When a newer adapter continues the rollout. None: never.

    Raises:
        in_flight.NotWanted: if the rollout waits for that adapter, and is_wanted says that it need not.
    """
    folder, place = StepFolder.of(prompts), (prompts.run, prompts.step, "roll_out")
    timed = (prompts.run, prompts.step, verb_of("roll_out", prompts.draw))
    asked = [Prompt(**row) for row in read_json_lines(verified(prompts.file))]
    begun = begun_by(engine_config, prompts)
    if prompts.begun and not begun:
        log.warning("what step %d has begun was sampled by other versions of the engine: it begins again", prompts.step - 1)
    partial = partial_of(prompts, begun, asked, sampling, adapter)
    to_carry_over = partial if switch is None else None
    engine = open_engine(engine_config, adapter)

    def write(samples: list[Sample]) -> None:
        note_replaced(folder.path)
        folder.samples_inputs.unlink(missing_ok=True)
        with in_background(memory_usage.note, prompts.run, prompts.step, "inference"):
            write_samples(folder.samples, samples)
            if to_carry_over is not None:
                write_samples(folder.left_over, [sample for _, sample in sorted(to_carry_over.left.items())])
        figures["memory_gib"] = engine.memory_in_use_gib()

    note_lost(folder.path)
    with measured(*timed) as figures, save_bad_answer(*place):
        first = RolloutMeasures()
        if switch is not None:
            opened = functools.partial(open_engine, engine_config)
            continued = in_flight.begin(opened, asked, sampling, adapter, inputs, folder, switch, is_wanted)
            adapter, inputs, partial, first = continued.adapter, continued.inputs, continued.partial, continued.how
            engine = open_engine(engine_config, adapter)
        request = RolloutRequest(asked, sampling, adapter, prompts.num_oversampled_prompts)
        with Journal(folder.journal, inputs) as journal:
            samples, how, ran = sample_all(engine, request, SampleSink(journal, partial, on_complete=write))
        figures |= in_flight.figures_of(first, how, samples) if switch is not None else how.model_dump()
    log.info(
        "%d samples, %d of them kept from earlier attempts; %d new output tokens in %.1f s",
        len(samples), how.num_kept, how.num_new_output_tokens, figures["seconds"],
    )  # fmt: skip
    provenance: dict[str, object] = {"inputs": inputs, "file": record_of(folder.samples).model_dump(), ENGINE: ran.model_dump()}
    if to_carry_over is not None:
        provenance["left_over"] = _carried_over(prompts, asked, samples, inputs).model_dump()
    write_json(folder.samples_inputs, provenance)
    journal.remove()
    return samples


def _carried_over(prompts: PromptBatch, asked: list[Prompt], samples: list[Sample], inputs: dict[str, str]) -> CarriedOver:
    """The prompts without a group in the step, and the file of what they have begun."""
    taken = {sample.prompt_id for sample in samples}
    others = tuple(prompt.prompt_id for prompt in asked if prompt.prompt_id not in taken)
    begun = record_of(StepFolder.of(prompts).left_over)
    return CarriedOver(prompts=prompts.file, prompt_ids=others, samples=begun, engine_versions=inputs[VERSIONS])
