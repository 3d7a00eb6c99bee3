"""Begin a sweep, and each variant of it: what a variant can take over from one that was made before it."""

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
    """How a variant gets its step 0 without sampling."""

    donor: str
    """The run whose prompts and rollouts it takes over."""
    from_task: TaskName
    """The first task that differs."""
    overrides: tuple[str, ...]


def check_sweep(config: RunConfig, over: Sequence[str]) -> list[RunConfig]:
    """The variants, each of them checked as a run of its own is; nothing was started or written.

    Raises:
        ValueError: for the first thing that cannot work; names the variant where it is one's.
    """
    open_workspace()  # what is wrong with the machine is no variant's fault
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
    """Whether a variant that took its step 0 over has none: rl_run would begin behind it."""
    if not evaluations.is_due(variant.evaluation, 0, variant.num_steps):
        return False
    took_over = next_step(variant.name) > 0 and origin_of(variant.name) is not None
    return took_over and all(made.step > 0 for made in evaluations.of_run(variant.name, variant.eval_config))


def shared_step(variant: RunConfig, others: Sequence[RunConfig]) -> Sharing | None:
    """What a variant takes over; None where it samples its own step 0, or has it already.

    others: variants that may have made theirs.
    """
    is_new = not run_folder(variant.name).exists()
    if next_step(variant.name) > 0 or not (is_new or origin_of(variant.name)):
        return None
    if begun := origin_of(variant.name):  # it resumes from the run that it took its step from
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
