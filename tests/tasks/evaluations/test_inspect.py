"""Evaluation sets that are tasks of inspect-ai: the real inspect-ai in its environment, the real gateway, a scripted engine."""

import json
import os
import signal
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from turns import engine_dies_at

from infra.config import EngineConfig, EvaluationConfig, RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.environments.inspect_tasks import running
from infra.eval_records import Evaluation
from infra.failures import EngineUnavailable, EvaluationLost, RewardFailed, classify
from infra.processes import children
from infra.records import File
from infra.runs import evaluations
from infra.runs.lineage import adapter_at
from infra.settings import CHECKOUT, settings
from infra.store.layout import EvaluationFolder
from infra.store.samples import Sample, read_samples
from tasks.evaluations.compare_adapters import difference
from tasks.evaluations.evaluate_adapter import evaluate_adapter
from tasks.rewards.by_inspect import fence_of
from tasks.support.preflight import check_evaluation

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (CHECKOUT / ".venv-inspect/bin/python").exists(),
        reason="no inspect-ai: `python3 infra/setup/bootstrap.py --inspect` makes it",
    ),
]

TASKS = """
import os
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, includes, match, mean, scorer, stderr
from inspect_ai.solver import chain, generate, solver, user_message

HERE = os.path.dirname(os.path.abspath(__file__))

def asked(number):
    said = number if number % 3 else number + 1  # every third answer is wrong
    return Sample(id=f"n{number}", input=f"What is {number} + 0? <say>#### {said}</say>", target=str(number))

@task
def sums():
    return Task(dataset=[asked(number) for number in range(1, 9)], solver=generate(), scorer=[match(), length()])

@scorer(metrics=[mean(), stderr()])
def length():
    async def score(state, target):
        return Score(value=len(state.output.completion))
    return score

@solver
def fails_sometimes():
    async def solve(state, generate):
        if state.sample_id in ("n2", "n3"):
            raise RuntimeError("no such tool")
        return await generate(state)
    return solve

@task
def failing():
    return Task(dataset=[asked(number) for number in range(1, 9)], solver=fails_sometimes(), scorer=match())

@task
def twice():
    solvers = chain(generate(), user_message("Again. <say>#### 5</say>"), generate())
    return Task(dataset=[asked(number) for number in range(1, 4)], solver=solvers, scorer=match())

@task
def hot():
    return Task(dataset=[asked(1)], solver=generate(temperature=0.7), scorer=match())

@solver
def waits():
    async def solve(state, generate):
        import asyncio
        state = await generate(state)
        while os.path.exists(HERE + "/wait"):
            await asyncio.sleep(0.05)
        return state
    return solve

@task
def waiting():
    return Task(dataset=[asked(number) for number in range(1, 9)], solver=waits(), scorer=match())

@task
def broken():
    raise KeyError("no data here")

@task
def vague():
    return Task(dataset=[asked(number) for number in range(1, 5)], solver=generate(), scorer=words())

@scorer(metrics=[mean()])
def words():
    async def score(state, target):
        return Score(value="good" if "1" in target.text else 1.0)
    return score
"""


@pytest.fixture
def config(workspace: Path, random_tiny: Path) -> Iterator[RunConfig]:
    (workspace / "tasks.py").write_text(TASKS)
    yield RunConfig(name="mine", model=str(random_tiny), engine=EngineConfig(kind="scripted"))
    ScriptedEngine.stop_in(workspace)


def asking(config: RunConfig, workspace: Path, task: str, **fields: object) -> RunConfig:
    asked = {"name": task, "inspect": f"{workspace / 'tasks.py'}@{task}"} | fields
    return config.but(evaluation=EvaluationConfig(sets=[asked]))  # type: ignore[arg-type]  # as it comes from JSON


def evaluated(config: RunConfig) -> tuple[Evaluation, list[Sample]]:
    adapter = adapter_at(config, 0)
    made = evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter)
    folder = evaluations.folder_of(adapter, config.eval_config)
    assert not list(folder.glob("*.journal"))
    return made, read_samples(folder / "greedy.parquet")


def test_the_figures_are_inspect_s_own(config: RunConfig, workspace: Path) -> None:
    config = asking(config, workspace, "sums")
    made, samples = evaluated(config)
    assert made.num_prompts == 8 and made.pass_at_1 == made.mean_reward == made.task_metrics["match/accuracy"] == 6 / 8
    assert made.reward_interval
    assert made.task_metrics["match/stderr"] == pytest.approx(made.reward_interval.standard_error)
    assert made.metrics["eval/sums/inspect/length/mean"] == made.part_means["length"] == len("#### 1")
    assert [sample.reward for sample in samples] == [1, 1, 0, 1, 1, 0, 1, 1]
    assert {(sample.adapter_version, sample.adapter_sha256) for sample in samples} == {(0, adapter_at(config, 0).sha256)}
    assert all(len(sample.output_tokens) == len(sample.output_logprobs) > 0 < len(sample.prompt_tokens) for sample in samples)
    assert evaluations.of_run("mine", config.eval_config) == [made]
    (log,) = EvaluationFolder(evaluations.folder_of(adapter_at(config, 0), config.eval_config)).inspect.glob("greedy/*.eval")
    with zipfile.ZipFile(log) as kept:
        assert "header.json" in kept.namelist()
    same = difference(config.eval_config, made, made)
    assert same.reward and (same.reward.mean, same.reward.num_questions) == (0.0, 8)


def test_the_first_questions_and_several_answers_to_each(config: RunConfig, workspace: Path) -> None:
    config = asking(config, workspace, "sums", num_prompts=3, greedy=False, num_samples=4, temperature=0.8)
    made = evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter_at(config, 0))
    sampled = read_samples(evaluations.folder_of(adapter_at(config, 0), config.eval_config) / "sampled.parquet")
    assert [sample.episode for sample in sampled] == [(number, index) for number in range(3) for index in range(4)]
    assert made.pass_at_k == {"1": pytest.approx(2 / 3), "4": pytest.approx(2 / 3)}
    assert made.task_metrics["match/accuracy"] == pytest.approx(2 / 3)


def test_a_sample_that_fails_is_unjudged_and_never_0(config: RunConfig, workspace: Path) -> None:
    made, samples = evaluated(asking(config, workspace, "failing"))
    assert [sample.reward for sample in samples] == [1, None, None, 1, 1, 0, 1, 1]
    assert [sample.unjudged for sample in samples[1:3]] == ["exception", "exception"]
    assert (made.num_unjudged, made.num_unjudged_questions, made.is_eligible) == (2, 2, False)
    assert made.mean_reward == made.task_metrics["match/accuracy"] == 5 / 6


def test_a_score_that_is_no_number_is_unjudged(config: RunConfig, workspace: Path) -> None:
    made, samples = evaluated(asking(config, workspace, "vague"))
    assert [(sample.reward, sample.unjudged) for sample in samples] == [(None, "no number"), *[(1.0, "")] * 3]
    assert made.mean_reward == 1.0, "inspect-ai's own mean takes such a word for 0"


def test_the_answer_that_was_scored_is_kept_with_all_that_stands_before_it(config: RunConfig, workspace: Path) -> None:
    _, samples = evaluated(asking(config, workspace, "twice"))
    assert [sample.text for sample in samples] == ["#### 5"] * 3
    _, first = evaluated(asking(config, workspace, "sums", num_prompts=3))
    for sample, before in zip(samples, first, strict=True):
        known = [*before.prompt_tokens, *before.output_tokens]
        assert list(sample.prompt_tokens[: len(known)]) == known < list(sample.prompt_tokens)


def test_what_the_gateway_refuses_is_named(config: RunConfig, workspace: Path) -> None:
    with pytest.raises(RewardFailed, match=r"hot': all 1 samples failed, first: .*temperature is 0.7, this rollout samples at 0"):
        evaluated(asking(config, workspace, "hot"))


def test_an_engine_that_dies_is_asked_only_for_what_is_missing(
    config: RunConfig, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asking(config, workspace, "sums")
    with monkeypatch.context() as patch:
        engine_dies_at(5, patch)
        with pytest.raises(EngineUnavailable):
            evaluated(config)
    folder = evaluations.folder_of(adapter_at(config, 0), config.eval_config)
    assert not (folder / "evaluation.json").exists() and (folder / "greedy.turns.journal").exists()
    with monkeypatch.context() as patch:
        asked = engine_dies_at(99, patch)
        made, samples = evaluated(config)
    assert len(asked) == 8 - 5
    undisturbed, others = evaluated(config.but(name="other"))
    assert samples == others and made.figures == undisturbed.figures


def test_a_program_that_is_killed_is_lost_and_its_answers_are_kept(
    config: RunConfig, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asking(config, workspace, "waiting")
    (workspace / "wait").touch()
    journal = evaluations.folder_of(adapter_at(config, 0), config.eval_config) / "greedy.turns.journal"

    def strike() -> None:
        while not (journal.exists() and len(journal.read_bytes().splitlines()) == 1 + 8):
            time.sleep(0.05)
        for process in psutil.Process().children(recursive=True):
            if running.program.__file__ in process.cmdline() and str(children.WITH_OWNER) not in process.cmdline():
                os.kill(process.pid, signal.SIGKILL)

    threading.Thread(target=strike).start()
    with pytest.raises(EvaluationLost, match="ended with") as lost:
        evaluated(config)
    assert classify(lost.value).name == "evaluation lost"
    (workspace / "wait").unlink()
    with monkeypatch.context() as patch:
        asked = engine_dies_at(99, patch)
        made, _ = evaluated(config)
    assert asked == [] and made.pass_at_1 == 6 / 8


def test_a_task_that_hangs_is_ended_at_its_deadline(config: RunConfig, workspace: Path) -> None:
    (workspace / "wait").touch()
    config = asking(config, workspace, "waiting")
    config = config.but(evaluation=config.evaluation.but(inspect_timeout_s=8.0))
    with pytest.raises(EvaluationLost, match=r"not done after evaluation.inspect_timeout_s 8"):
        evaluated(config)
    assert not [each for each in psutil.Process().children(recursive=True) if running.program.__file__ in each.cmdline()]


def test_answers_of_another_adapter_or_task_are_not_given_back(config: RunConfig, workspace: Path) -> None:
    from infra.environments.inspect_tasks.asking import InspectRequest

    config = asking(config, workspace, "sums")
    sampling, adapter, task = config.eval_config.greedy, adapter_at(config, 0), config.eval_config.inspect
    assert sampling
    request = InspectRequest(task, 8, sampling, config.engine, adapter, workspace, 60.0, ())
    other = adapter.model_copy(update={"weights": File(path="a", sha256="f" * 64, num_bytes=1)})
    fences = [fence_of(request), fence_of(request._replace(adapter=other))]
    (workspace / "tasks.py").write_text(TASKS + "MORE = 1\n")
    fences.append(fence_of(request))
    assert len({json.dumps(each) for each in fences}) == 3


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("tasks.py@broken", r"evaluation set 'it': inspect task '.*broken': KeyError: 'no data here'"),
        ("tasks.py", r"name one task of the file, /.*tasks.py@TASK"),
        ("tasks.py@none", "Task named 'none' not found"),
        ("nothere.py@a", r"there is no file .*/nothere.py"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_refused_before_a_run(config: RunConfig, workspace: Path, task: str, said: str) -> None:
    config = config.but(evaluation={"sets": [{"name": "it", "inspect": str(workspace / task)}]})
    with pytest.raises(ValueError, match=said):
        check_evaluation(config)


def test_without_inspect_the_command_that_makes_it_is_named(
    config: RunConfig, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_INSPECT_PYTHON", str(workspace / "python"))
    settings.cache_clear()
    with pytest.raises(ValueError, match=r"bootstrap.py --inspect` makes its environment"):
        check_evaluation(asking(config, workspace, "sums"))


def test_a_set_of_inspect_has_no_data_or_reward_of_its_own_and_holds_nothing_out(config: RunConfig, workspace: Path) -> None:
    for field, value in {"data": {"source": "a.jsonl"}, "reward": "gsm8k_numeric", "environment": "a.py:A"}.items():
        with pytest.raises(ValueError, match=rf"'sums' {field} with inspect '.*': the task has its own, leave it out"):
            asking(config, workspace, "sums", **{field: value})
    with pytest.raises(ValueError, match=r"top_p 0.9 with inspect"):
        asking(config, workspace, "sums", top_p=0.9)
    found = asking(config, workspace, "sums")
    assert (found.training.num_held_out, found.training.evaluated) == (0, ())
    digests = [evaluations.eval_digest(each.eval_config) for each in (found, asking(config, workspace, "sums", num_prompts=5))]
    trained = found.but(data=found.data.but(max_prompt_tokens=64))
    assert evaluations.eval_digest(trained.eval_config) == digests[0] != digests[1]
