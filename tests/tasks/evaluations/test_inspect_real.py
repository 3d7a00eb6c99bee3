"""The same questions put to the real SGLang by inspect-ai and by our own evaluation: greedy answers are equal, token for token."""

import json
import shutil
from pathlib import Path

import pytest

from flows.presets import smoke
from infra.config import EvaluationConfig, RunConfig
from infra.data import prompts
from infra.engines.server import server_process
from infra.eval_records import Evaluation
from infra.models import base_model
from infra.runs import evaluations
from infra.runs.lineage import adapter_at
from infra.settings import CHECKOUT, settings
from infra.store.samples import Sample, read_samples
from tasks.evaluations.evaluate_adapter import evaluate_adapter

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (CHECKOUT / ".venv-inspect/bin/python").exists(),
        reason="no inspect-ai: `python3 infra/setup/bootstrap.py --inspect` makes it",
    ),
]
NUM = 48
TASK = """
import json, pathlib
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate

@task
def sums():
    rows = json.loads(pathlib.Path(__file__).with_name("rows.json").read_text())
    return Task(dataset=[Sample(input=question, target=answer) for question, answer in rows], solver=generate(), scorer=match(numeric=True))
"""


def evaluated(config: RunConfig, name: str) -> tuple[Evaluation, list[Sample]]:
    adapter, asked = adapter_at(config, 0), config.eval_configs[name]
    made = evaluate_adapter.fn(config.engine, asked, config.training, adapter)
    return made, read_samples(evaluations.folder_of(adapter, asked) / "greedy.parquet")


def test_inspect_and_our_own_evaluation_of_the_same_questions_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = base_model.locate("tiny")
    monkeypatch.setenv("RATCHET_WORKSPACE", str(tmp_path))
    settings.cache_clear()
    shutil.copytree(tiny, tmp_path / "models/tiny")
    sets = [{"name": "own"}, {"name": "inspect", "inspect": f"{tmp_path / 'task.py'}@sums"}]
    config = smoke().but(evaluation=EvaluationConfig(num_prompts=NUM, sets=sets))  # type: ignore[arg-type]  # as from JSON
    own = config.eval_configs["own"]
    questions = prompts.held_out(own.data, tiny)
    rows = [(f"{each.question} {own.data.instruction}".strip(), each.answer.rpartition("#### ")[2]) for each in questions]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "task.py").write_text(TASK)
    try:
        (first, mine), (second, theirs) = evaluated(config, "own"), evaluated(config, "inspect")
    finally:
        server_process.stop_recorded()
        settings.cache_clear()
    assert len(mine) == len(theirs) == NUM
    for one, other in zip(mine, theirs, strict=True):
        assert list(one.prompt_tokens) == list(other.prompt_tokens)
        assert list(one.output_tokens) == list(other.output_tokens)
    print(f"accuracy {first.pass_at_1} and {second.task_metrics}")
    assert first.pass_at_1 == second.pass_at_1 == second.task_metrics["match/accuracy"]
    assert first.mean_output_tokens == second.mean_output_tokens
    assert 0.1 < first.pass_at_1 < 0.9
