"""Sample completions from the adapter, and keep them with their log-probabilities.

samples.journal (finished samples, while the rollout is under way) --> samples.parquet, then samples.made_from.json, then the journal
goes. Whatever is killed at whatever moment, what was sampled is found again by what decides it, and only the rest is generated.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import task

from infra.concurrency import prefetch
from infra.concurrency.background import beside
from infra.concurrency.gc_freeze import pass_over_what_is_here
from infra.config import EngineConfig, SamplingConfig, Section
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.detokenizer import Finishing
from infra.engines.interface import NO_SINK, Engine, RolloutMeasures, RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.partial import Partial, by_key
from infra.models import base_model
from infra.records import AdapterVersion, File, LeftOver, PromptBatch, Rollouts
from infra.runs.bad_answers import evidence_kept
from infra.store import code_digest
from infra.store.files import read_json_lines, read_note, record_of, step_folder, verified, write_json
from infra.store.samples import Sample, groups_of, read_samples, write_samples
from infra.telemetry import memory_usage
from infra.telemetry.timings import measured
from tasks.support.caching import CACHED
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try

log = logging.getLogger(__name__)

FILE, JOURNAL, MADE_FROM = "samples.parquet", "samples.journal", "samples.made_from.json"
LEFT_OVER = "left_over.parquet"
NOT_DECIDING = {
    "allow_unequal_memory",
    "hand_over",
    "kv_cache_tokens",
    "max_running_requests",
    "memory_fraction",
    "request_timeout_s",
    "start_timeout_s",
}
"""Fields of EngineConfig that no sample depends on: whoever mends one after a failure keeps what was sampled."""


def made_from(
    engine: EngineConfig,
    sampling: SamplingConfig,
    prompts: File,
    adapter: AdapterVersion,
    num_spare: int = 0,
    begun: File | None = None,
) -> dict[str, str]:
    """What decides the samples."""
    return {
        "adapter": adapter.sha256,
        "adapter_version": str(adapter.version),
        "base": adapter.base.sha256,
        "prompts": prompts.sha256,
        "num_spare_prompts": str(num_spare),
        "begun": begun.sha256 if begun else "",
        "sampling": _digest(sampling, set()),
        "engine": _digest(engine, NOT_DECIDING),
        "code": code_digest.digest(__name__),
    }


def made_from_drawn(
    engine: EngineConfig, sampling: SamplingConfig, prompts: PromptBatch, adapter: AdapterVersion
) -> dict[str, str]:
    return made_from(engine, sampling, prompts.file, adapter, prompts.num_spare_prompts, prompts.begun)


def _digest(section: Section, left_out: set[str]) -> str:
    return hashlib.sha256(section.model_dump_json(exclude=left_out).encode()).hexdigest()


def finished(folder: Path, inputs: dict[str, str]) -> list[Sample] | None:
    """The samples of a rollout that was finished, if exactly these inputs made it."""
    found = read_note(folder / MADE_FROM, dict[str, Any])
    if found is None or found.get("inputs") != inputs:
        return None
    if left := left_over(folder):
        verified(left.samples)
    return read_samples(verified(File.model_validate(found["file"])))


def left_over(folder: Path) -> LeftOver | None:
    """Of a rollout that was finished."""
    found = (read_note(folder / MADE_FROM, dict[str, Any]) or {}).get("left_over")
    return LeftOver.model_validate(found) if found else None


def partial_of(
    prompts: PromptBatch, asked: Sequence[Prompt], sampling: SamplingConfig, adapter: AdapterVersion
) -> Partial | None:
    """What goes on, and room for what is broken off."""
    if not prompts.partial_rollouts:
        return None
    return Partial(
        stop_token_ids=frozenset([] if sampling.ignore_eos else base_model.stop_token_ids(base_model.locate(adapter.base.id))),
        max_output_tokens=sampling.max_output_tokens,
        begun=by_key(read_samples(verified(prompts.begun))) if prompts.begun else {},
        prompt_ids=frozenset(prompt.prompt_id for prompt in asked[: prompts.num_begun_prompts]),
    )


def sample_all(engine: Engine, request: RolloutRequest, sink: SampleSink = NO_SINK) -> tuple[list[Sample], RolloutMeasures]:
    """Return samples as they are to be written. Wakes the engine and loads the adapter itself, so that a retry of this task alone finds both.

    sink: Its on_complete gets these samples; its on_sample is not called.
    """
    pass_over_what_is_here()
    engine.wake()
    engine.load_adapter(request.adapter)
    complete: list[Sample] = []
    with Finishing(base_model.locate(request.adapter.base.id)) as finishing:

        def on_complete(samples: list[Sample]) -> None:
            complete.extend(finishing.finished(samples))
            sink.on_complete(complete)

        _, how = engine.generate(request, replace(sink, on_sample=finishing.add, on_complete=on_complete))
    return complete, how


def sample_what_is_missing(
    engine_config: EngineConfig, sampling: SamplingConfig, prompts: PromptBatch, adapter: AdapterVersion, inputs: dict[str, str]
) -> list[Sample]:
    """All samples of the step; those that earlier attempts left in the journal are not generated again."""
    folder, place = step_folder(prompts), (prompts.run, prompts.step, "roll_out")
    asked = [Prompt(**row) for row in read_json_lines(verified(prompts.file))]
    partial = partial_of(prompts, asked, sampling, adapter)
    engine = open_engine(engine_config, adapter)
    request = RolloutRequest(asked, sampling, adapter, prompts.num_spare_prompts)

    def write(samples: list[Sample]) -> None:
        (folder / MADE_FROM).unlink(missing_ok=True)
        with beside(memory_usage.note, prompts.run, prompts.step, "inference"):
            write_samples(folder / FILE, samples)
            if partial is not None:
                write_samples(folder / LEFT_OVER, [sample for _, sample in sorted(partial.left.items())])
        figures["memory_gib"] = engine.memory_in_use_gib()

    with measured(*place) as figures, evidence_kept(*place), Journal(folder / JOURNAL, inputs) as journal:
        samples, how = sample_all(engine, request, SampleSink(journal, partial, on_complete=write))
        figures |= how.model_dump()
    log.info(
        "%d samples, %d of them kept from earlier attempts; %d new output tokens in %.1f s",
        len(samples), how.num_kept, how.num_new_output_tokens, figures["seconds"],
    )  # fmt: skip
    made: dict[str, object] = {"inputs": inputs, "file": record_of(folder / FILE).model_dump()}
    if partial is not None:
        taken = {sample.prompt_id for sample in samples}
        others = tuple(prompt.prompt_id for prompt in asked if prompt.prompt_id not in taken)
        left = LeftOver(prompts=prompts.file, prompt_ids=others, samples=record_of(folder / LEFT_OVER))
        made |= {"left_over": left.model_dump()}
    write_json(folder / MADE_FROM, made)
    journal.remove()
    return samples


@task(cache_policy=CACHED, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def roll_out(engine: EngineConfig, sampling: SamplingConfig, prompts: PromptBatch, adapter: AdapterVersion) -> Rollouts:
    """PromptBatch -> Rollouts. Where the rollout has begun early, it is waited for; what it lacks is sampled here."""
    prefetch.join(step_folder(prompts))
    inputs = made_from_drawn(engine, sampling, prompts, adapter)
    samples = finished(step_folder(prompts), inputs)
    if samples is None:
        samples = sample_what_is_missing(engine, sampling, prompts, adapter, inputs)
    return Rollouts(
        run=prompts.run,
        step=prompts.step,
        adapter_version=adapter.version,
        adapter_sha256=adapter.sha256,
        file=record_of(step_folder(prompts) / FILE),
        num_prompts=len(groups_of(samples)),
        group_size=sampling.group_size,
        temperature=sampling.temperature,
        num_samples=len(samples),
        num_output_tokens=sum(len(sample.output_tokens) for sample in samples),
        num_truncated=sum(sample.finish_reason == "length" for sample in samples),
        num_older_tokens=sum(sample.num_older_tokens for sample in samples),
        left_over=left_over(step_folder(prompts)),
    )
