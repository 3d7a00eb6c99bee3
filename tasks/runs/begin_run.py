"""Open a run, after everything that can be found wrong beforehand was looked for."""

import logging

from prefect import task

from infra.config import RunConfig
from infra.data import dataset, prompts
from infra.models import base_model
from infra.runs import evaluations, lineage
from infra.runs.lineage import next_step
from infra.tracking import mlflow_address, mlflow_store
from tasks.evaluations.evaluate_adapter import num_overlapping
from tasks.open_step import check, open_run
from tasks.rewards.own_answers import check_own_answers
from tasks.support import step_page
from tasks.support.caching import NO_CACHE

log = logging.getLogger(__name__)


def check_run(config: RunConfig) -> None:
    """Raises ValueError with one clear line for the first thing that cannot work; warns of held-out questions that are trained on."""
    if config.evaluation.every:
        check_with_evaluation(config)
    else:
        check(config)


def check_with_evaluation(config: RunConfig) -> None:
    """The same, with an evaluation in any case."""
    check(config)
    check_evaluation(config)


def check_evaluation(config: RunConfig) -> None:
    """Look at the held-out questions: show how many are held out of a single file, and warn of those that are trained on.

    Raises:
        ValueError: for questions that cannot be asked.
    """
    try:
        asked = prompts.held_out(config.exam.data, base_model.locate(config.model))
        rows = [(prompt.row, dataset.Row(prompt.question, prompt.answer)) for prompt in asked]
        check_own_answers(config.exam.reward.name, config.exam.data.source, rows)
    except ValueError as error:
        raise ValueError(f"evaluation: {error} (evaluation.every 0 is no evaluation)") from error
    if config.training.num_held_out:
        num_rows, num_trained = len(dataset.rows(config.training)), len(dataset.part_rows(config.training))
        log.info(
            "%d of the %d rows of %s are held out for evaluations and never trained on (evaluation.num_prompts %d, a quarter at most)",
            *(num_rows - num_trained, num_rows, config.data.source, config.evaluation.num_prompts),
        )
    if overlapping := num_overlapping(asked, config.training):
        log.warning(
            "%d of the %d held-out questions are in the training set too: pass@1 will say too much (evaluation.split %r, data.split %r)",
            overlapping,
            len(asked),
            config.exam.data.split,
            config.data.split,
        )


@task(cache_policy=NO_CACHE)
def begin_run(config: RunConfig) -> int:
    """RunConfig, checked -> the number of steps that are committed: the run goes on from there.

    Raises:
        ValueError: for a configuration that is not the one that the run was begun with.
    """
    open_run(config, nothing_committed="begin again")
    mlflow_address.warn_at_start(config.name)
    step_page.note_run_page(config.name)
    step_page.link_to_mlflow(config.name, mlflow_store.known_run(config.name))
    lineage.check(config.name)
    committed = next_step(config.name)
    if committed >= config.num_steps:
        log.info("run %s has %d steps, asked for are %d: no step to make", config.name, committed, config.num_steps)
    else:
        log.info("run %s: steps %d to %d", config.name, committed, config.num_steps - 1)
    return committed


def is_over(config: RunConfig, version: int) -> bool:
    """All steps are made, or the evaluations so far show no progress."""
    return version >= config.num_steps or stalled(config, version)


def stalled(config: RunConfig, version: int) -> bool:
    found = [each for each in evaluations.of_run(config.name, config.exam) if each.step <= version]
    return evaluations.has_stalled(config.evaluation, found)
