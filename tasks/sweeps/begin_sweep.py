"""Start a sweep and each of its variants, which can reuse results of earlier variants."""

import logging
from collections.abc import Sequence

from infra.config import RunConfig
from infra.config.tools.changes import check_goes_on
from infra.config.tools.grid import overrides_between, variants
from infra.records import Record, Step
from infra.runs import evaluations
from infra.runs.lineage import next_step
from infra.runs.manifest import read_manifest
from infra.runs.replay import TASKS, TaskName, first_to_run_again, origin_of
from infra.store.files import open_workspace, read_json
from infra.store.layout import RunFolder, StepFolder, run_folder, step_folder
from tasks.support.preflight import check_run

log = logging.getLogger(__name__)


class Sharing(Record):
    """How a variant makes its step 0 without sampling."""

    donor: str
    """The run whose prompts and rollouts it reuses."""
    from_task: TaskName
    """The first task that differs."""
    overrides: tuple[str, ...]


def check_sweep(config: RunConfig, over: Sequence[str]) -> list[RunConfig]:
    """Return the variants, each checked like a run of its own. Starts and writes nothing.

    Raises:
        ValueError: for the first thing that cannot work; names the variant if the error belongs to one.
    """
    open_workspace()  # an error of the machine must not be reported as a variant's
    made = variants(config, over)
    for variant in made:
        try:
            check_run(variant)
            if (path := RunFolder.of(variant.name).config).exists():
                check_goes_on(RunConfig.model_validate(read_json(path)), variant)
        except ValueError as error:
            raise ValueError(f"variant {variant.name}: {error}") from error
    return made


def misses_first_evaluation(variant: RunConfig) -> bool:
    """Whether a variant that reused its step 0 lacks the first evaluation: rl_run would start after it."""
    if not evaluations.is_due(variant.evaluation, 0, variant.num_steps):
        return False
    took_over = next_step(variant.name) > 0 and origin_of(variant.name) is not None
    return took_over and all(made.step > 0 for made in evaluations.of_run(variant.name, variant.eval_config))


def shared_step(variant: RunConfig, others: Sequence[RunConfig]) -> Sharing | None:
    """Return what a variant reuses. None if it samples its own step 0, or has it already.

    others: Variants that may have made their step 0.
    """
    is_new = not run_folder(variant.name).exists()
    if next_step(variant.name) > 0 or not (is_new or origin_of(variant.name)):
        return None
    if begun := origin_of(variant.name):  # it resumes from the run whose step it reused
        others = [other for other in others if other.name == begun.replayed_from.run]
    for other in others:
        folder = step_folder(Step(run=other.name, index=0, seed=other.seed))
        if other.name == variant.name or not StepFolder(folder).manifest.exists():
            continue
        before = read_manifest(folder).config
        first = first_to_run_again(before, variant)
        if TASKS.index(first) > TASKS.index("roll_out"):
            log.info("variant %s takes step 0 of %s over, up to %s", variant.name, other.name, first)
            return Sharing(donor=other.name, from_task=first, overrides=tuple(overrides_between(before, variant)))
    return None
