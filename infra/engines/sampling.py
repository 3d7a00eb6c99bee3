"""Sample completions with an engine, and name all inputs that decide the samples."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from infra.concurrency.gc_freeze import pass_over_what_is_here
from infra.config import ConfigBase, EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.detokenizer import Detokenizer
from infra.engines.interface import NO_SINK, Engine, RolloutMeasures, RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.partial import Partial, by_key
from infra.failures import EngineUnavailable
from infra.models import base_model
from infra.records import AdapterVersion, EngineRan, File, PromptBatch
from infra.store import code_digest
from infra.store.files import verified
from infra.store.samples import Sample, read_samples
from infra.telemetry import program_versions

VERSIONS = "engine_versions"
"""Key of the engine's versions among the inputs: one step never mixes samples of two versions."""
NOT_DECIDING = {
    "allow_unequal_memory",
    "colocation",
    "kv_cache_tokens",
    "max_running_requests",
    "memory_fraction",
    "replicas",
    "request_timeout_s",
    "start_timeout_s",
}
"""Fields of EngineConfig that do not affect samples: changing one after a failure keeps the samples."""


def inputs_key(
    engine: EngineConfig,
    sampling: SamplingConfig,
    prompts: File,
    adapter: AdapterVersion,
    num_oversampled: int = 0,
    begun: File | None = None,
) -> dict[str, str]:
    """Return the inputs that decide the samples."""
    return {
        "adapter": adapter.sha256,
        "adapter_version": str(adapter.version),
        "base": adapter.base.sha256,
        "prompts": prompts.sha256,
        "num_oversampled_prompts": str(num_oversampled),
        "begun": begun.sha256 if begun else "",
        "sampling": _digest(sampling, set()),
        "engine": _digest(engine, NOT_DECIDING),
        VERSIONS: program_versions.key_of(program_versions.of_engine(engine.kind)),
        "code": code_digest.digest("infra.engines"),
    }


def begun_by(engine: EngineConfig, prompts: PromptBatch) -> File | None:
    """Return the samples that the previous step carried over. None if there are none, or an engine of other versions made them."""
    versions = program_versions.key_of(program_versions.of_engine(engine.kind))
    return prompts.begun if prompts.begun_engine_versions == versions else None


def _digest(section: ConfigBase, left_out: set[str]) -> str:
    return hashlib.sha256(section.model_dump_json(exclude=left_out).encode()).hexdigest()


def partial_of(
    prompts: PromptBatch, begun: File | None, asked: Sequence[Prompt], sampling: SamplingConfig, adapter: AdapterVersion
) -> Partial | None:
    """Return the carried-over groups, and room for aborted ones.

    begun: Samples of these groups from the previous step. None: nothing that can be used.
    """
    if not prompts.partial_rollouts:
        return None
    return Partial(
        stop_token_ids=frozenset([] if sampling.ignore_eos else base_model.stop_token_ids(base_model.locate(adapter.base.id))),
        max_output_tokens=sampling.max_output_tokens,
        begun=by_key(read_samples(verified(begun))) if begun else {},
        prompt_ids=frozenset(prompt.prompt_id for prompt in asked[: prompts.num_begun_prompts]),
    )


def sample_all(
    engine: Engine, request: RolloutRequest, sink: SampleSink = NO_SINK
) -> tuple[list[Sample], RolloutMeasures, EngineRan]:
    """Return the samples, ready to be written, and what produced them. Wakes the engine and loads the adapter itself, so that a retry of
    this task alone finds both.

    sink: Its journal was opened for the versions of the engine's interpreter. Its on_complete gets these samples. Its on_sample is not
    called.

    Raises:
        EngineUnavailable: if the launched or adopted engine has other versions; the next attempt starts with those.
    """
    pass_over_what_is_here()
    ran = _made_ready(engine, request.adapter, sink.journal)
    complete: list[Sample] = []
    with Detokenizer(base_model.locate(request.adapter.base.id)) as finishing:

        def on_complete(samples: list[Sample]) -> None:
            complete.extend(finishing.finished(samples))
            sink.on_complete(complete)

        _, how = engine.generate(request, replace(sink, on_sample=finishing.add, on_complete=on_complete))
    return complete, how, ran


def begin_all(engine: Engine, request: RolloutRequest, sink: SampleSink) -> RolloutMeasures:
    """Sample the part of a rollout that comes before another adapter. Finished samples are in the sink's journal, those that the request's
    deadline has ended in its partial. Raises as sample_all does."""
    _made_ready(engine, request.adapter, sink.journal)
    samples, how = engine.generate(request, sink)
    if sink.partial is not None:
        sink.partial.left |= by_key(samples)
    return how


def _made_ready(engine: Engine, adapter: AdapterVersion, journal: Journal | None) -> EngineRan:
    engine.wake()
    engine.load_adapter(adapter)
    ran = engine.ran()
    if journal is not None and (found := program_versions.key_of(ran.versions)) != journal.fence[VERSIONS]:
        raise EngineUnavailable(
            f"the engine's environment has changed since this rollout began: {journal.fence[VERSIONS]} -> {found}"
        )
    return ran
