"""How good is an adapter on questions that it was not trained on?

prefect deployment run evaluate/local                       the latest adapter of the run `arithmetic`
prefect deployment run evaluate/local -p adapter=0          its base model
prefect deployment run evaluate/local -p name=mine          the latest adapter of the run `mine`
prefect deployment run evaluate/local -p adapter='"/models/mine"'   a PEFT folder, or a whole Hugging Face model
prefect deployment run evaluate/local -p against=0     and what it differs by from the base model, with intervals
ratchet evaluate RUN                                        in this terminal
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from prefect import flow
from pydantic import WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from flows.parameters import CHANGES, NAME, PRESET, RunChanges, resolved
from infra.colocation.plans import resolve_colocation
from infra.config import RunConfig
from infra.eval_records import Evaluation, EvaluationReport
from infra.mirror.under_way import copied_under_way
from infra.processes.gpu_lock import gpu_lock
from infra.records import AdapterVersion
from infra.reporting.names import evaluation_name
from infra.runs.lineage import next_step
from infra.runs.opening import training_data
from tasks.evaluations.compare_adapters import compare_adapters
from tasks.evaluations.evaluate_adapter import evaluate_adapter
from tasks.evaluations.find_adapter import check_adapter, find_adapter, is_folder
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


OtherAdapter = Annotated[
    int | str | None,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null", "title": "none"},
                {"type": "integer", "minimum": 0, "title": "version"},
                {"type": "string", "title": "path"},
            ]
        }
    ),
]


@flow(name="evaluate", result_serializer="json")
def evaluate(
    config: RunChanges = CHANGES,
    adapter: AdapterChoice = None,
    against: OtherAdapter = None,
    sets: SkipJsonSchema[Sequence[str] | None] = None,  # no field of the form
    preset: str = PRESET,
    name: str = NAME,
) -> EvaluationReport:
    """Put the questions of a run's evaluation sets to an adapter.

    Args:
        config: Fields that differ from the preset, by section (`evaluation` sets the questions); or a whole configuration.
        adapter: best, latest or a version of the run (0 is the base model), the path of a PEFT folder or of a whole Hugging Face model, or
            RUN:VERSION for another run's; left out, the run's latest version.
        against: Another adapter, named in the same way, that answers the same questions; what the two differ by is shown with intervals.
        sets: Names of the sets to ask; left out, all.
        preset: Configuration to start from. auto: that of the run `name`, if there is one, else arithmetic.
        name: Name of the run whose adapters are taken. Empty: the preset's.
    """
    config = resolved(config, preset, name)
    chosen = chosen_sets(config, sets)
    note_flow_run(evaluation_name(config.name, next_step(config.name) if adapter is None else adapter), config)
    with (
        gpu_lock(f"evaluation of {config.name}", preflight=partial(check, config, adapter, against)),
        progress_artifacts(),
        copied_under_way(config.name),
    ):
        made = _evaluated(config, find_adapter(config, adapter), chosen)
        if against is None:
            return EvaluationReport(evaluations=tuple(made))
        others = _evaluated(config, find_adapter(config, against), chosen)
        found = compare_adapters([config.eval_configs[name] for name in chosen], others, made)
        return EvaluationReport(evaluations=tuple(made), against=tuple(others), differences=tuple(found))


def check(config: RunConfig, adapter: int | str | None, against: int | str | None) -> None:
    """Raises ValueError for what cannot be evaluated, before an engine is started."""
    for chosen in (adapter, against):  # a version that is not there need not wait for a model that is being made
        if not is_folder(chosen):
            check_adapter(config, chosen)
    check_with_evaluation(config)
    for chosen in (adapter, against):
        if is_folder(chosen):
            check_adapter(config, chosen)


def _evaluated(config: RunConfig, adapter: AdapterVersion, sets: Sequence[str]) -> list[Evaluation]:
    """Each set is a task of its own: one that is done is not done again when a later one fails."""
    engine, found = resolve_colocation(config).engine, []
    for name in sets:
        made = evaluate_adapter(engine, config.eval_configs[name], training_data(config), adapter)
        record_evaluation(made)
        found.append(made)
    return found


def chosen_sets(config: RunConfig, sets: Sequence[str] | None) -> list[str]:
    """Raises ValueError for a set that the configuration does not have; names those that it has."""
    known = list(config.eval_configs)
    if unknown := [name for name in sets or () if name not in known]:
        raise ValueError(f"evaluation.sets has no {unknown[0]!r}; it has {', '.join(filter(None, known)) or 'no named set'}")
    return [name for name in known if sets is None or name in sets]
