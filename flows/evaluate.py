"""How good is an adapter on questions that it was not trained on?

prefect deployment run evaluate/local                       the latest adapter of the run `arithmetic`
prefect deployment run evaluate/local -p adapter=0          its base model
prefect deployment run evaluate/local -p adapter='"/models/mine"'   a PEFT folder, or a whole Hugging Face model
ratchet evaluate RUN                                        in this terminal
"""

from functools import partial

from prefect import flow

from flows.presets import arithmetic
from infra.colocation.plans import resolve_colocation
from infra.config import RunConfig
from infra.processes.gpu_lock import gpu_lock
from infra.records import Evaluation
from infra.reporting.names import evaluation_name
from infra.runs.lineage import next_step
from tasks.evaluations.evaluate_adapter import evaluate_adapter
from tasks.evaluations.find_adapter import find_adapter
from tasks.evaluations.record_evaluation import record_evaluation
from tasks.support.flow_runs import note_flow_run
from tasks.support.preflight import check_with_evaluation
from tasks.support.progress_artifacts import progress_artifacts


@flow(name="evaluate", result_serializer="json")
def evaluate(config: RunConfig = arithmetic(), adapter: int | str | None = None) -> Evaluation:  # noqa: B008  # frozen
    """Put a run's held-out questions to an adapter.

    Args:
        config: The experiment; its section `evaluation` sets the questions.
        adapter: A version of the run (0 is the base model), or the path of a PEFT folder or of a whole Hugging Face model;
            left out, the run's latest version.
    """
    note_flow_run(evaluation_name(config.name, next_step(config.name) if adapter is None else adapter), config)
    with gpu_lock(f"evaluation of {config.name}", preflight=partial(check_with_evaluation, config)), progress_artifacts():
        found = find_adapter(config, adapter)
        made = evaluate_adapter(resolve_colocation(config).engine, config.eval_config, config.training, found)
        record_evaluation(made)
        return made
