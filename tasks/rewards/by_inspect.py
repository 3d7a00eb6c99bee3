"""Answers and scores of an evaluation set that is a task of inspect-ai."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from infra.concurrency.event_loop import completed
from infra.config import EngineConfig, EvalConfig, EvalSamplingConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.sampling import NOT_DECIDING, VERSIONS
from infra.environments.inspect_tasks import asking, running
from infra.environments.inspect_tasks.asking import InspectRequest
from infra.failures import RewardFailed, WrongAnswer
from infra.gateway.session.records import TurnJournal
from infra.records import AdapterVersion
from infra.store import code_digest
from infra.store.files import fresh_folder, write_json_lines
from infra.store.layout import EvaluationFolder
from infra.store.samples import write_samples
from infra.telemetry import program_versions
from tasks.support.episode_rollout import woken


class Asked(NamedTuple):
    """What was asked."""

    num_prompts: int
    num_overlapping: int
    """Questions that are trained on too; 0 for a task of inspect-ai, where that is not known."""
    fingerprint: str
    """SHA-256 of the questions' data set."""
    task_metrics: dict[str, float]
    """inspect-ai's own figures of the first way of asking."""


def ask(
    engine: EngineConfig, eval_config: EvalConfig, adapter: AdapterVersion, wanted: Mapping[Path, EvalSamplingConfig]
) -> Asked:
    """Write the questions and the answers with their scores.

    wanted: How answers are sampled, by their file.

    Raises:
        RewardFailed: if no answer could be scored; names the first error.
    """
    metrics: list[dict[str, float]] = []
    for path, sampling in wanted.items():
        folder = EvaluationFolder(path.parent)
        place = fresh_folder(folder.inspect / path.stem)
        variables = eval_config.reward.environment
        timeout_s, num = eval_config.inspect_timeout_s, eval_config.data.num_prompts
        request = InspectRequest(eval_config.inspect, num, sampling, engine, adapter, place, timeout_s, variables)
        found = _answered(request, path.with_suffix(".turns.journal"))
        if found.errors and all(sample.reward is None for sample in found.samples):
            raise RewardFailed(
                f"inspect task {eval_config.inspect!r}: all {len(found.samples)} samples failed, first: {found.errors[0]:.300}"
            )
        write_json_lines(folder.questions, (question._asdict() for question in found.questions))
        write_samples(path, found.samples)
        metrics.append(found.metrics)
        questions: list[Prompt] = found.questions
        fingerprint = found.fingerprint
    return Asked(len(questions), 0, fingerprint, metrics[0])


def _answered(request: InspectRequest, path: Path) -> asking.Answered:
    engine = open_engine(request.engine, request.adapter)
    fence = fence_of(request)
    with TurnJournal(path, fence) as journal:
        woken(engine, request.adapter, fence)
        try:
            return completed(asking.ask(engine, request, journal))
        except WrongAnswer:
            journal.quarantine("the engine answered wrongly")
            raise


def fence_of(request: InspectRequest) -> dict[str, str]:
    """What decides the turns of a task: answers of another adapter, engine or task are never given back."""
    return {
        "adapter": request.adapter.sha256,
        "adapter_version": str(request.adapter.version),
        "base": request.adapter.base.sha256,
        "task": f"{request.task} {running.source_of(request.task)}",
        "sampling": request.sampling.model_dump_json(),
        "engine": request.engine.model_dump_json(exclude=NOT_DECIDING),
        VERSIONS: program_versions.key_of(program_versions.of_engine(request.engine.kind)),
        "code": code_digest.digest("infra.environments") + code_digest.digest("infra.engines"),
    }
