"""Sample completions from the adapter, and keep them with their log-probabilities."""

import logging
from dataclasses import replace

from prefect import task

from infra import base_model
from infra.config import EngineConfig, SamplingConfig
from infra.engines import open_engine, server
from infra.engines.base import EngineUnavailable, RolloutMeasures
from infra.files import read_json_lines, record_of, step_folder, verified
from infra.measures import measured
from infra.prompts import Prompt
from infra.records import AdapterVersion, PromptBatch, Rollouts
from infra.samples import Sample, write_samples
from tasks.caching import CACHED, only

log = logging.getLogger(__name__)

FILE = "samples.parquet"


def sample_all(
    engine_config: EngineConfig, sampling: SamplingConfig, prompts: list[Prompt], adapter: AdapterVersion
) -> tuple[list[Sample], RolloutMeasures]:
    """Samples with their text. Sees to its own needs: a retry of this task alone finds engine and adapter again."""
    engine = open_engine(engine_config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    samples, how = engine.generate(prompts, sampling, adapter)
    tokenizer = base_model.tokenizer(base_model.locate(adapter.base.id))
    texts = tokenizer.batch_decode([sample.output_tokens for sample in samples], skip_special_tokens=True)
    return [replace(sample, text=text) for sample, text in zip(samples, texts, strict=True)], how


@task(cache_policy=CACHED, retries=2, retry_delay_seconds=[2, 10], retry_condition_fn=only(EngineUnavailable))
def roll_out(engine: EngineConfig, sampling: SamplingConfig, prompts: PromptBatch, adapter: AdapterVersion) -> Rollouts:
    """PromptBatch -> Rollouts."""
    asked = [Prompt(**row) for row in read_json_lines(verified(prompts.file))]
    with measured(prompts.run, prompts.step, "roll_out") as figures:
        samples, how = sample_all(engine, sampling, asked, adapter)
        figures |= how.model_dump() | {"memory_gib": server.memory_in_use_gib()}
    path = write_samples(step_folder(prompts) / FILE, samples)
    made = Rollouts(
        run=prompts.run,
        step=prompts.step,
        adapter_version=adapter.version,
        adapter_sha256=adapter.sha256,
        file=record_of(path),
        num_prompts=prompts.num_prompts,
        group_size=sampling.group_size,
        temperature=sampling.temperature,
        num_samples=len(samples),
        num_output_tokens=sum(len(sample.output_tokens) for sample in samples),
        num_truncated=sum(sample.finish_reason == "length" for sample in samples),
    )
    log.info("%d samples, %d output tokens, %.1f s", made.num_samples, made.num_output_tokens, figures["seconds"])
    return made
