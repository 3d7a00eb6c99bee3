"""Compare the results of a replay with those of the old step: equal inputs must give equal bytes."""

import logging

from prefect import task
from prefect.artifacts import create_markdown_artifact

from infra.config import RunConfig
from infra.machine import devices
from infra.progress.brief import brief
from infra.records import AdapterVersion, PromptBatch, Record, Rollouts, ScoredRollouts, TrainBatch
from infra.runs.manifest import digests_of
from infra.runs.replay import Origin, origin_of
from infra.store.files import write_json
from infra.store.layout import StepFolder
from tasks.support.caching import NO_CACHE
from tasks.support.progress_artifacts import key_of

log = logging.getLogger(__name__)


class ReplayDiffers(RuntimeError):
    """A replay without changes gave other results than before."""


class Compared(Record):
    """One output of the step."""

    product: str
    before: str | None
    """SHA-256; None: it did not exist."""
    after: str | None
    equal: bool


def compared(before: dict[str, str], after: dict[str, str]) -> list[Compared]:
    """Return the rows, in the order of the step."""
    return [
        Compared(product=name, before=before.get(name), after=after.get(name), equal=before.get(name) == after.get(name))
        for name in {**after, **before}
    ]


def table_of(rows: list[Compared]) -> str:
    """Format the rows as a Markdown table."""
    lines = [f"| {row.product} | `{row.before}` | `{row.after}` | {'yes' if row.equal else '**no**'} |" for row in rows]
    return "\n".join(["| product | digest before | digest after | equal |", "|---|---|---|---|", *lines])


def in_words(rows: list[Compared]) -> str:
    """As `9 of 10 digests are equal; not equal: canary`."""
    others = [row.product for row in rows if not row.equal]
    named = f"; not equal: {', '.join(others)}" if others else ""
    return f"{len(rows) - len(others)} of {len(rows)} digests are equal{named}"


def not_as_before(rows: list[Compared], *, model_moved: bool = False) -> list[str]:
    """Return the outputs that differ but should not. On a GPU, attention's backward pass adds in no fixed order. So the trainer's outputs differ
    in their last bits each time; they are shown, not judged.

    model_moved: The base model has another name than before, which is stored in the new adapter's configuration.
    """
    judged = [row for row in rows if devices.device() == "cpu" or not (row.product == "canary" or row.product.endswith(" out"))]
    judged = [row for row in judged if not (model_moved and row.product == "adapter config out")]
    return [row.product for row in judged if not row.equal]


def must_be_equal(origin: Origin, config: RunConfig) -> bool:
    """Whether nothing was changed that could affect a digest. On a GPU, repeated samples may differ in their last bits, and occasionally in a
    token, even with engine.deterministic: docs/results/deterministic.md."""
    samples_are_fixed = origin.engine is not None or (config.engine.deterministic and devices.device() == "cpu")
    return samples_are_fixed and not origin.changed and not origin.replayed_from.differences


@task(cache_policy=NO_CACHE)
def compare_digests(
    config: RunConfig,
    start: AdapterVersion,
    prompts: PromptBatch,
    rollouts: Rollouts,
    scored: ScoredRollouts,
    batch: TrainBatch,
    trained: AdapterVersion,
    allow_difference: bool,
) -> list[Compared]:
    """All records of a replayed step -> a row for each output, also written to replay.json and the flow run's page.

    Raises:
        ReplayDiffers: if nothing was changed but a digest differs. The step is not committed then.
    """
    origin = origin_of(batch.run)
    assert origin, f"run {batch.run!r} was not begun by a replay"
    rows = compared(origin.digests, digests_of(start, prompts, rollouts, scored, batch, trained))
    source, table = origin.replayed_from, table_of(rows)
    title = f"replay of step {source.step} of run {source.run} from {source.from_task}"
    write_json(StepFolder.of(batch).replay, source.model_dump() | {"digests": [row.model_dump() for row in rows]})
    brief.info("%s: %s", title, in_words(rows))
    log.info("digests, before and after:\n%s", table)
    create_markdown_artifact(_page(title, origin, table), key=key_of(batch.run, "replay"), description=title)
    different = not_as_before(rows, model_moved=origin.model_moved)
    if different and must_be_equal(origin, config) and not allow_difference:
        raise ReplayDiffers(
            f"{title}: nothing was changed, but these are not what they were: {', '.join(different)}; see "
            f"{StepFolder.of(batch).replay}. To keep the step all the same, run the replay again with allow_difference"
        )
    return rows


def _page(title: str, origin: Origin, table: str) -> str:
    source = origin.replayed_from
    notes = [f"* changed: `{field}`" for field in origin.changed]
    notes += [f"* not as it was: {difference}" for difference in source.differences]
    return f"# {title}\n\n" + "\n".join(notes or ["Nothing was changed."]) + f"\n\n{table}\n"
