"""A judge at an endpoint is asked while the rollout runs: the scoring finds its answers, and pays for none of them again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judge_server import JudgeServer, Reply, judge_server
from shared import becomes, sample, untrained_adapter

from infra.concurrency.deadline import Deadline
from infra.config import EvaluationConfig, RewardConfig, RunConfig
from infra.data.prompts import Prompt
from infra.engines.journal import Journal
from infra.failures import RewardFailed
from infra.models import base_model
from infra.records import AdapterVersion, PromptBatch
from infra.rewards.judges.ledger import Ledger
from infra.rewards.outcome import JUDGE_UNREADABLE, TIME_OUT
from infra.settings import CHECKOUT
from infra.store.files import record_of, write_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import Sample, write_samples
from tasks.rewards.ahead import scored_ahead
from tasks.rewards.apply import inputs_of, judged
from tasks.rewards.by_model import JudgedWork

PROMPTS = [Prompt(n, n, f"{n}?", "#### 4", [1], 0) for n in range(4)]
SIZE = 2


def samples_of() -> list[Sample]:
    return [
        replace(sample(p), sample_index=i, output_tokens=[8 + 2 * p + i], adapter_sha256="a")
        for p in range(4)
        for i in range(SIZE)
    ]


def place(body: dict[str, Any]) -> str:
    """Prompt and token of the sample that a request asks of."""
    return str(body["messages"][-1]["content"]).partition("<")[2].partition(">")[0]


def score(body: dict[str, Any], number: int) -> Reply:
    return Reply(text=json.dumps({"reasoning": "because", "score": len(place(body)) / 64 + int(place(body)[0]) / 10}))


def config_of(url: str, **fields: object) -> RunConfig:
    judge = {"base_url": url, "model": "judge-1", "rubric": "<{question}{completion}>", "retry_delay_s": 0.01, "concurrency": 4}
    own = {name: fields.pop(name) for name in ("name", "task_timeout_s") if name in fields}
    reward = RewardConfig.model_validate({"name": "rubric", "max_unjudged_frac": 1.0, "judge": judge | fields, **own})
    return RunConfig(name="r", reward=reward, evaluation=EvaluationConfig(every=0)).but(sampling={"group_size": SIZE})


def batch_in(workspace: Path, **fields: bool | int) -> PromptBatch:
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", [each._asdict() for each in PROMPTS])
    return PromptBatch.model_validate(
        {"run": "r", "step": 0, "file": record_of(path), "num_prompts": 4, "dataset_fingerprint": "f", "first_row": 0, **fields}
    )


def adapter_of(model_folder: Path) -> AdapterVersion:
    return untrained_adapter(model_folder)


@contextmanager
def rollout(config: RunConfig, batch: PromptBatch, model_folder: Path, deadline: Deadline) -> Iterator[Journal]:
    with scored_ahead(config, batch, adapter_of(model_folder), deadline) as end:
        with Journal(StepFolder.of(batch).journal, {}) as journal:
            yield journal
        deadline.begin()
        end()


def scored(config: RunConfig, batch: PromptBatch, model_folder: Path, deadline: Deadline | None = None) -> list[Sample]:
    """As the task `score` does it, with the texts that the rollout gives."""
    texts = base_model.texts_of(model_folder, [each.output_tokens for each in samples_of()])
    samples = [replace(each, text=text) for each, text in zip(samples_of(), texts, strict=True)]
    folder = StepFolder.of(batch)
    work = JudgedWork("r", "step 0", folder.judgements)
    return judged(config.reward, samples, PROMPTS, folder.scores_journal, inputs_of(batch), work=work, deadline=deadline)


def sampled(
    config: RunConfig,
    batch: PromptBatch,
    model_folder: Path,
    server: JudgeServer,
    num_asked: int = 8,
    deadline: Deadline | None = None,
) -> None:
    """A rollout that gives all samples and ends when so many requests have come."""
    with rollout(config, batch, model_folder, deadline or Deadline()) as journal:
        for each in samples_of():
            journal.add(each)
        assert becomes(lambda: len(server.bodies) >= num_asked, 60)


def test_complete_groups_are_asked_of_in_the_rollout_and_the_result_is_that_of_scoring_afterwards(
    workspace: Path, tmp_path: Path, model_folder: Path
) -> None:
    with judge_server(score) as server:
        config, batch = config_of(server.url), batch_in(workspace)
        with rollout(config, batch, model_folder, Deadline()) as journal:
            for each in samples_of()[:-1]:
                journal.add(each)
            assert becomes(lambda: len(server.bodies) == 6, 60), "all but the group that lacks a sample"
            time.sleep(0.3)
            assert "3" not in {place(body)[0] for body in server.bodies}
            journal.add(samples_of()[-1])
        assert len(server.bodies) == 8, "what was complete when the rollout ended is asked of before the scoring begins"
        ahead = scored(config, batch, model_folder)
        assert len(server.bodies) == 8 and len({place(body) for body in server.bodies}) == 8, "no sample is asked of twice"
    with Ledger() as ledger:
        assert ledger.spent("r", "step 0").requests == 8
    shown = StepFolder.of(batch).judgements.read_bytes()
    (workspace / "judgements.sqlite").unlink()
    with judge_server(score) as server:
        alone = scored(config_of(server.url), batch, model_folder)
    assert write_samples(tmp_path / "a", ahead).read_bytes() == write_samples(tmp_path / "b", alone).read_bytes()
    assert StepFolder.of(batch).judgements.read_bytes() == shown and len({each.reward for each in alone}) >= 4


def test_an_answer_that_cannot_be_read_is_paid_once_in_a_step_and_asked_for_again_by_the_next_attempt(
    workspace: Path, model_folder: Path
) -> None:
    def half(body: dict[str, Any], number: int) -> Reply:
        return Reply(text="I like it.") if place(body)[0] == "2" and number <= 8 else score(body, number)

    with judge_server(half) as server:
        config, batch = config_of(server.url), batch_in(workspace)
        sampled(config, batch, model_folder, server)
        found = scored(config, batch, model_folder)
        assert len(server.bodies) == 8 and [each.unjudged for each in found if each.prompt_id == 2] == [JUDGE_UNREADABLE] * 2
        again = scored(config, batch, model_folder)
        assert len(server.bodies) == 10 and all(each.reward is not None for each in again)


def test_a_judge_that_is_away_is_not_asked_beside_the_rollout_for_long_and_the_scoring_asks_again(
    workspace: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def away_at_first(body: dict[str, Any], number: int) -> Reply:
        return Reply(404, "no such model") if is_away else score(body, number)

    is_away = True
    with judge_server(away_at_first) as server:
        config, batch = config_of(server.url, concurrency=1), batch_in(workspace)
        sampled(config, batch, model_folder, server, 3)
        assert len(server.bodies) == 3 and "3 requests to the judge had no answer: " in caplog.text
        is_away = False
        assert all(each.reward is not None for each in scored(config, batch, model_folder))
        assert len(server.bodies) == 11


def test_the_budget_holds_beside_the_rollout_too(workspace: Path, model_folder: Path) -> None:
    with judge_server(score) as server:
        config, batch = config_of(server.url, concurrency=1, max_run_tokens=300), batch_in(workspace)  # three answers of 110
        sampled(config, batch, model_folder, server, 3)
        with pytest.raises(RewardFailed, match=r"reward.judge.max_run_tokens is 300: raise it"):
            scored(config, batch, model_folder)
        assert len(server.bodies) == 3


def test_the_deadline_ends_what_is_asked_beside_the_rollout_and_keeps_what_is_under_way(
    workspace: Path, model_folder: Path
) -> None:
    def slow(body: dict[str, Any], number: int) -> Reply:
        return score(body, number)._replace(delay_s=1.0)

    with judge_server(slow) as server:
        config, batch, deadline = config_of(server.url, concurrency=2), batch_in(workspace), Deadline(0.3)
        sampled(config, batch, model_folder, server, 2, deadline)
        found = scored(config, batch, model_folder, deadline)
        late = [each for each in found if each.reward is None]
        assert {each.unjudged for each in late} == {TIME_OUT} and 2 <= len(server.bodies) == 8 - len(late) <= 4
        assert all(each.reward is not None for each in scored(config, batch, model_folder)) and len(server.bodies) == 8


def test_ruler_is_asked_of_a_group_when_it_is_complete(workspace: Path, model_folder: Path) -> None:
    def ruler(body: dict[str, Any], number: int) -> Reply:
        scores = [{"trajectory_id": str(n), "explanation": "", "score": n / 4} for n in (1, 2)]
        return Reply(text=json.dumps({"scores": scores}))

    with judge_server(ruler) as server:
        config, batch = config_of(server.url, name="ruler", rubric=""), batch_in(workspace)
        sampled(config, batch, model_folder, server, 4)
        assert [each.reward for each in scored(config, batch, model_folder)] == [0.25, 0.5] * 4 and len(server.bodies) == 4


@pytest.mark.parametrize("fields", [{"num_oversampled_prompts": 1}, {"partial_rollouts": True}])
def test_a_judge_is_not_asked_beside_a_rollout_that_leaves_groups_out(
    workspace: Path, model_folder: Path, fields: dict[str, bool | int]
) -> None:
    with judge_server(score) as server:
        config, batch = config_of(server.url), batch_in(workspace, **fields)
        with rollout(config, batch, model_folder, Deadline()) as journal:
            for each in samples_of():
                journal.add(each)
            time.sleep(0.5)
        assert not server.bodies


PROGRAM = """
import sys
sys.path[:0] = sys.argv[3:]
from test_judge_ahead import *
config, batch, model = config_of(sys.argv[1], concurrency=1), batch_in(Path(os.environ["RATCHET_WORKSPACE"])), Path(sys.argv[2])
with rollout(config, batch, model, Deadline()) as journal:
    for each in samples_of():
        journal.add(each)
    time.sleep(600)
"""


def test_a_flow_that_is_killed_in_the_rollout_pays_nothing_again(workspace: Path, model_folder: Path) -> None:
    def slow(body: dict[str, Any], number: int) -> Reply:
        return score(body, number)._replace(delay_s=0.2)

    paths = [str(CHECKOUT / "tests/tasks"), str(CHECKOUT / "tests"), str(CHECKOUT)]
    with judge_server(slow) as server:
        arguments = [sys.executable, "-c", PROGRAM, server.url, str(model_folder), *paths]
        flow = subprocess.Popen(arguments, env=os.environ | {"RATCHET_WORKSPACE": str(workspace)}, start_new_session=True)
        assert becomes(lambda: len(server.bodies) >= 4, 120) and flow.poll() is None
        os.kill(flow.pid, signal.SIGKILL)
        flow.wait()
        found = scored(config_of(server.url, concurrency=1), batch_in(workspace), model_folder)
        assert all(each.reward is not None for each in found)
        twice = [name for name, count in Counter(map(place, server.bodies)).items() if count > 1]
        assert len({*map(place, server.bodies)}) == 8 and len(twice) <= 1, "but for the request that was under way"
