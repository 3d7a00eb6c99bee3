"""Where the evaluations of a run lie, and what they say together.

runs/<run>/evaluations/000005-<adapter>-<exam>/{evaluation.json, prompts.jsonl, greedy.parquet, sampled.parquet}
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from infra.config import EvaluationConfig, Exam
from infra.files import read_json, run_folder
from infra.records import AdapterVersion, Evaluation

FILE = "evaluation.json"


def exam_digest(exam: Exam) -> str:
    """Digest an exam without what is no part of it, so that an older one keeps its digest."""
    excluded = {"partial_rollouts", "allow_repeats"}
    if exam.data.part == "all":
        excluded |= {"part", "num_held_out", "held_out_seed"}
    asked = exam.model_dump_json(exclude={"data": excluded})
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def folder_of(adapter: AdapterVersion, exam: Exam) -> Path:
    """One folder for one adapter and one exam, for ever."""
    name = f"{adapter.version:06d}-{adapter.sha256[:12]}-{exam_digest(exam)[:8]}"
    return run_folder(adapter.run) / "evaluations" / name


def of_run(run: str, exam: Exam | None = None) -> list[Evaluation]:
    """By version; of one exam, or of all."""
    folders = sorted((run_folder(run) / "evaluations").glob(f"*/{FILE}"))
    found = [Evaluation.model_validate(read_json(path)["record"]) for path in folders]
    return [each for each in found if exam is None or each.exam == exam_digest(exam)]


def best_of(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The highest pass@1; of equals the earliest."""
    return max(evaluations, key=lambda each: each.pass_at_1, default=None)


def is_due(config: EvaluationConfig, version: int, num_steps: int) -> bool:
    """Before training, every n steps, and at the end."""
    return config.every > 0 and (version % config.every == 0 or version == num_steps)


def has_stalled(config: EvaluationConfig, evaluations: Sequence[Evaluation]) -> bool:
    """Whether the latest `patience` evaluations were none of them better than the best before them."""
    if config.patience is None or len(evaluations) <= config.patience:
        return False
    scores = [each.pass_at_1 for each in evaluations]
    return max(scores[-config.patience :]) <= max(scores[: -config.patience]) + config.min_delta
