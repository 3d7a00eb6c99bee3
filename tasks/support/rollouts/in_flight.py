"""In-flight updates: a rollout that is under way goes on with the next adapter as soon as that is committed.

adapter k samples --step k is committed--> abort --> prefixes into the journal --> load adapter k+1 --> it continues the prefixes

An engine fixes the adapter of a request when the request begins, and the KV cache of adapter k is not that of adapter k+1. So a pause of the
server moves nothing to the new adapter. A request is aborted and sent again with its tokens so far, as in infra/engines/partial.py.
AReaL, arXiv 2505.24298, section 4.1, does the same ("interruptible rollout workers").

The journal is replaced as a whole at the switch, under another inputs key: finished samples, and prefixes with finish_reason `abort`. A rollout
that is killed before starts again with adapter k, one that is killed after goes on with adapter k+1 from the same prefixes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from infra.concurrency.deadline import NO_DEADLINE, Until
from infra.config import SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.interface import Engine, RolloutMeasures, RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.partial import Partial, of_rollout
from infra.engines.sampling import begin_all
from infra.models import base_model
from infra.records import AdapterSwitch, AdapterVersion
from infra.runs import lineage
from infra.store.files import read_json
from infra.store.journal import fence_of
from infra.store.layout import StepFolder
from infra.store.samples import Sample

log = logging.getLogger(__name__)

SWITCHED = "switched_to"
"""Key, among a rollout's inputs, of the adapter that continues it."""
PAUSES = "pauses_at"
"""Key of switch.pause_at among the inputs."""
MIXED, SWITCH_S, RECOMPUTED = "two_adapters_frac", "switch_s", "recomputed_tokens"
"""Figures of a rollout: share of its samples that two adapters have sampled; seconds from the last token of the first to the first of the second;
and tokens of the first that the second has computed again, to continue them."""
SWITCHED_AT = "switched_at"
"""Time of the first token of the second adapter, in seconds since the epoch."""
LOOK_S = 0.05
"""Seconds between two looks for the next adapter."""


class NotWanted(Exception):
    """A rollout waits for an adapter, and nothing waits for the rollout any more. Its samples are in the journal."""


class Continued(NamedTuple):
    """What is left of a rollout after its first part."""

    adapter: AdapterVersion
    inputs: dict[str, str]
    partial: Partial | None
    """Prefixes to continue. None: the first adapter has sampled all."""
    how: RolloutMeasures
    """Figures of the first part."""


def newer_adapter(switch: AdapterSwitch) -> AdapterVersion | None:
    """Return the adapter that the rollout switches to, once the step that made it is committed."""
    is_committed = StepFolder.at(switch.run, switch.made_by_step).manifest.exists()
    return lineage.adapter_after(switch.run, switch.made_by_step) if is_committed else None


def with_switch(inputs: dict[str, str], switch: AdapterSwitch | None) -> dict[str, str]:
    """Return the inputs key of the part that the first adapter samples, and of a rollout that it samples alone."""
    return inputs | {PAUSES: str(switch.pause_at)} if switch is not None else inputs


def switched(inputs: dict[str, str], newer: AdapterVersion) -> dict[str, str]:
    """Return the inputs key of the part that the newer adapter samples, and of the whole rollout."""
    return inputs | {SWITCHED: f"{newer.version} {newer.sha256}"}


def adapter_of(folder: StepFolder, inputs: dict[str, str], adapter: AdapterVersion, switch: AdapterSwitch) -> AdapterVersion:
    """Return the adapter of a finished rollout: the one that sampled the last tokens of it."""
    if read_json(folder.samples_inputs)["inputs"] == inputs:
        return adapter
    return lineage.adapter_after(switch.run, switch.made_by_step)


def begin(
    engine: Callable[[AdapterVersion], Engine],
    asked: Sequence[Prompt],
    sampling: SamplingConfig,
    adapter: AdapterVersion,
    inputs: dict[str, str],
    folder: StepFolder,
    switch: AdapterSwitch,
    is_wanted: Callable[[], bool],
) -> Continued:
    """Sample until the newer adapter is committed, or all is sampled. With switch.pause_at, sample the first tokens of each answer, and wait for
    the adapter if some answer has more.

    Raises:
        NotWanted: if it waits, and is_wanted says that it need not.
    """
    newer, how = newer_adapter(switch), RolloutMeasures()
    if newer is None or fence_of(folder.journal) != switched(inputs, newer):
        left, how = _first_part(engine(adapter), asked, sampling, adapter, inputs, folder, switch)
        if not any(sample.finish_reason == "abort" for sample in left) and len(left) == len(asked) * sampling.group_size:
            return Continued(adapter, inputs, None, how)
        newer = _awaited(switch, is_wanted)
        log.info("the rollout goes on with adapter %d", newer.version)
        finished = [of_rollout(each, newer) for each in left if each.finish_reason != "abort"]
        begun = [each for each in left if each.finish_reason == "abort"]
        Journal(folder.journal, inputs).replace_all(switched(inputs, newer), [*finished, *begun])
    inputs = switched(inputs, newer)
    with Journal(folder.journal, inputs) as journal:
        prefixes = journal.prefixes
    return Continued(newer, inputs, _room(adapter, sampling, prefixes, asked), how)


def _first_part(
    engine: Engine,
    asked: Sequence[Prompt],
    sampling: SamplingConfig,
    adapter: AdapterVersion,
    inputs: dict[str, str],
    folder: StepFolder,
    switch: AdapterSwitch,
) -> tuple[list[Sample], RolloutMeasures]:
    """Return the samples of the first adapter, finished ones and prefixes."""
    partial = None if switch.pause_at else _room(adapter, sampling)
    request = RolloutRequest(
        asked,
        sampling.but(max_output_tokens=switch.pause_at) if switch.pause_at else sampling,
        adapter,
        deadline=NO_DEADLINE if switch.pause_at else Until(lambda: newer_adapter(switch) is not None),
    )
    with Journal(folder.journal, inputs, switch.pause_at) as journal:
        how = begin_all(engine, request, SampleSink(journal, partial))
    if partial is not None:
        return [sample for _, sample in sorted(partial.left.items())], how
    with Journal(folder.journal, inputs) as journal:
        return [sample for _, sample in sorted((journal.samples | journal.prefixes).items())], how


def _awaited(switch: AdapterSwitch, is_wanted: Callable[[], bool]) -> AdapterVersion:
    while (newer := newer_adapter(switch)) is None:
        if not is_wanted():
            raise NotWanted(f"the rollout waits for the adapter of step {switch.made_by_step}")
        time.sleep(LOOK_S)
    return newer


def _room(
    adapter: AdapterVersion,
    sampling: SamplingConfig,
    prefixes: "dict[tuple[int, int], Sample] | None" = None,
    asked: Sequence[Prompt] = (),
) -> Partial:
    """Return the prefixes to continue, and room for those that are aborted. All groups of `asked` have to become complete."""
    ends = [] if sampling.ignore_eos else base_model.stop_token_ids(base_model.locate(adapter.base.id))
    return Partial(
        stop_token_ids=frozenset(ends),
        max_output_tokens=sampling.max_output_tokens,
        begun=prefixes or {},
        prompt_ids=frozenset(prompt.prompt_id for prompt in asked),
    )


def figures_of(first: RolloutMeasures, second: RolloutMeasures, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the figures of a rollout from those of its two parts, with the share of samples of two adapters and the seconds without a token."""
    counts = ("num_new_output_tokens", "num_lost_replicas", "num_moved_samples", "num_reissued_samples")
    sums = {name: getattr(first, name) + getattr(second, name) for name in counts}
    mixed = [each.num_older_tokens for each in samples if 0 < each.num_older_tokens < len(each.output_tokens)]
    found = second.model_dump() | sums | {MIXED: len(mixed) / len(samples), RECOMPUTED: sum(mixed)}
    if first.last_token_at:  # this attempt has made the first part
        found |= {"first_token_at": first.first_token_at, "num_kept": first.num_kept}
        if second.last_token_at:
            found |= {SWITCH_S: second.first_token_at - first.last_token_at, SWITCHED_AT: second.first_token_at}
        else:
            found["last_token_at"] = first.last_token_at
    return found
