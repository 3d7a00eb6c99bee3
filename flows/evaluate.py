"""How good is an adapter on questions that it was not trained on?

prefect deployment run evaluate/local                       the latest adapter of the run `arithmetic`
prefect deployment run evaluate/local -p adapter=0          its base model
prefect deployment run evaluate/local -p name=mine          the latest adapter of the run `mine`
prefect deployment run evaluate/local -p adapter='"/models/mine"'   a PEFT folder, or a whole Hugging Face model
ratchet evaluate RUN                                        in this terminal
"""

from functools import partial
from typing import Annotated

from prefect import flow
from pydantic import WithJsonSchema

from flows.parameters import CHANGES, NAME, PRESET, RunChanges, resolved
from infra.colocation.plans import resolve_colocation
from infra.processes.gpu_lock import gpu_lock
from infra.records import Evaluation
from infra.reporting.names import evaluation_name
from infra.runs.lineage import next_step
from infra.runs.opening import training_data
from tasks.evaluations.evaluate_adapter import evaluate_adapter
from tasks.evaluations.find_adapter import find_adapter
from tasks.evaluations.record_evaluation import record_evaluation
from tasks.support.flow_runs import note_flow_run
from tasks.support.preflight import check_with_evaluation
from tasks.support.progress_artifacts import progress_artifacts

AdapterChoice = Annotated[
    int | str | None,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null", "title": "latest"},
                {"type": "integer", "minimum": 0, "title": "version"},
                {"type": "string", "title": "path"},
            ]
        }
    ),
]


@flow(name="evaluate", result_serializer="json")
def evaluate(config: RunChanges = CHANGES, adapter: AdapterChoice = None, preset: str = PRESET, name: str = NAME) -> Evaluation:
    """Put a run's held-out questions to an adapter.

    Args:
        config: Fields that differ from the preset, by section (`evaluation` sets the questions); or a whole configuration.
        adapter: A version of the run (0 is the base model), or the path of a PEFT folder or of a whole Hugging Face model;
            left out, the run's latest version.
        preset: Configuration to start from. auto: that of the run `name`, if there is one, else arithmetic.
        name: Name of the run whose adapters are taken. Empty: the preset's.
    """
    config = resolved(config, preset, name)
    note_flow_run(evaluation_name(config.name, next_step(config.name) if adapter is None else adapter), config)
    with gpu_lock(f"evaluation of {config.name}", preflight=partial(check_with_evaluation, config)), progress_artifacts():
        found = find_adapter(config, adapter)
        made = evaluate_adapter(resolve_colocation(config).engine, config.eval_config, training_data(config), found)
        record_evaluation(made)
        return made
