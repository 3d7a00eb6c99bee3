"""Sample completions with an engine and name all inputs that decide the samples."""

import hashlib
from collections.abc import Callable, Sequence

from infra.concurrency.gc_freeze import pass_over_what_is_here
from infra.config import EngineConfig, SamplingConfig, Section
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.detokenizer import Finishing
from infra.engines.interface import RolloutMeasures
from infra.engines.journal import Journal
from infra.engines.partial import Partial, by_key
from infra.models import base_model
from infra.records import AdapterVersion, File, PromptBatch
from infra.store import code_digest
from infra.store.files import verified
from infra.store.samples import Sample, read_samples

NOT_DECIDING = {
    "allow_unequal_memory",
    "hand_over",
    "kv_cache_tokens",
    "max_running_requests",
    "memory_fraction",
    "request_timeout_s",
    "start_timeout_s",
}
"""Fields of EngineConfig that no sample depends on: changing one after a failure keeps the samples."""


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


def _digest(section: Section, left_out: set[str]) -> str:
    return hashlib.sha256(section.model_dump_json(exclude=left_out).encode()).hexdigest()


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


def sample_all(
    engine_config: EngineConfig,
    sampling: SamplingConfig,
    prompts: list[Prompt],
    adapter: AdapterVersion,
    journal: Journal | None = None,
    num_spare: int = 0,
    write: Callable[[list[Sample]], object] = lambda samples: None,
    partial: Partial | None = None,
) -> tuple[list[Sample], RolloutMeasures]:
    """Samples as they are to be written. Sees to its own needs: a retry of this task alone finds engine and adapter again.

    write: Gets them while the engine is asked once more: they count if this returns.
    """
    pass_over_what_is_here()
    engine = open_engine(engine_config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    kept: list[Sample] = []
    with Finishing(base_model.locate(adapter.base.id)) as finishing:

        def keep(samples: list[Sample]) -> None:
            kept.extend(finishing.finished(samples))
            write(kept)

        _, how = engine.generate(prompts, sampling, adapter, journal, num_spare, finishing.add, keep, partial)
    return kept, how
