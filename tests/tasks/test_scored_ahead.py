"""Groups are scored while the rollout runs: what was judged is found by the scoring, which gives what it would have given alone."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shared import becomes, sample, untrained_adapter

from infra.concurrency.deadline import Deadline
from infra.config import RewardConfig, RunConfig
from infra.data.prompts import Prompt
from infra.engines.journal import Journal
from infra.models import base_model
from infra.records import AdapterVersion, PromptBatch
from infra.rewards import client, scores
from infra.settings import CHECKOUT
from infra.store.files import record_of, write_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import Sample, write_samples
from tasks.rewards.ahead import scored_ahead
from tasks.rewards.apply import inputs_of, judged

PROMPTS = [Prompt(n, n, f"{n}?", "#### 4", [1], 0) for n in range(4)]
SIZE = 2
REWARD = """import os, time
HERE = os.path.dirname(os.path.abspath(__file__))
def score(*, question, sample_index, output_tokens, group):
    with open(HERE + "/calls", "a") as file: file.write(f"{question[0]}-{sample_index}\\n")
    {body}
    return float(sample_index + len(group) + output_tokens[0] / 64)
"""


@pytest.fixture(autouse=True)
def _ends_pools(workspace: Path) -> Iterator[None]:
    yield
    client.close_all()


def samples_of() -> list[Sample]:
    made = [
        replace(sample(p), sample_index=i, output_tokens=[8 + 2 * p + i], adapter_sha256="a")
        for p in range(4)
        for i in range(SIZE)
    ]
    return made


def batch_in(workspace: Path, **fields: bool | int) -> PromptBatch:
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", [each._asdict() for each in PROMPTS])
    return PromptBatch.model_validate(
        {"run": "r", "step": 0, "file": record_of(path), "num_prompts": 4, "dataset_fingerprint": "f", "first_row": 0, **fields}
    )


def config_in(folder: Path, body: str = "pass", **fields: float) -> RunConfig:
    (folder / "mine.py").write_text(REWARD.replace("{body}", body))
    (folder / "calls").touch()
    reward = RewardConfig.model_validate({"name": f"{folder}/mine.py:score", "workers": 1, **fields})
    return RunConfig(name="r", reward=reward).but(sampling={"group_size": SIZE})


def adapter_of(model_folder: Path) -> AdapterVersion:
    return untrained_adapter(model_folder)


def calls_in(folder: Path) -> Counter[str]:
    return Counter((folder / "calls").read_text().split())


def scored(
    config: RunConfig, batch: PromptBatch, model_folder: Path, journal: Path | None = None, deadline: Deadline | None = None
) -> list[Sample]:
    """As the task `score` does it, with the texts that the rollout gives."""
    texts = base_model.texts_of(model_folder, [each.output_tokens for each in samples_of()])
    samples = [replace(each, text=text) for each, text in zip(samples_of(), texts, strict=True)]
    journal = journal or StepFolder.of(batch).scores_journal
    return judged(config.reward, samples, PROMPTS, journal, inputs_of(batch), deadline=deadline)


def test_complete_groups_are_scored_in_the_rollout_and_the_result_is_that_of_scoring_afterwards(
    workspace: Path, tmp_path: Path, model_folder: Path
) -> None:
    config, batch = config_in(tmp_path), batch_in(workspace)
    with scored_ahead(config, batch, adapter_of(model_folder)) as end, Journal(StepFolder.of(batch).journal, {}) as journal:
        for each in samples_of()[:-1]:
            journal.add(each)
        assert becomes(lambda: len(calls_in(tmp_path)) == 6, 60), "all but the group that lacks a sample"
        time.sleep(0.3)
        assert "3-0" not in calls_in(tmp_path)
        journal.add(samples_of()[-1])
        end()
    ahead = scored(config, batch, model_folder)
    assert set(calls_in(tmp_path).values()) == {1}, "no sample is judged twice"
    alone = scored(config, batch, model_folder, tmp_path / "other.journal")
    assert write_samples(tmp_path / "a", ahead).read_bytes() == write_samples(tmp_path / "b", alone).read_bytes()
    assert len({each.reward for each in alone}) == 8


def test_what_was_tried_in_the_rollout_is_unjudged_without_another_try_but_in_a_later_attempt(
    workspace: Path, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path, "assert question[0] != '2' or os.path.exists(HERE + '/fixed')", max_unjudged_frac=0.5)
    batch = batch_in(workspace)

    def ahead() -> None:
        with scored_ahead(config, batch, adapter_of(model_folder)), Journal(StepFolder.of(batch).journal, {}) as journal:
            for each in samples_of():
                journal.add(each)
            assert becomes(lambda: len(calls_in(tmp_path)) == 8, 60)

    ahead()
    found = scored(config, batch, model_folder)
    assert [each.prompt_id for each in found if each.reward is None] == [2, 2] and set(calls_in(tmp_path).values()) == {1}
    (tmp_path / "fixed").touch()
    assert all(each.reward is not None for each in scored(config, batch, model_folder)), "an unjudged outcome is used once"
    StepFolder.of(batch).scores_journal.unlink()
    (tmp_path / "fixed").unlink()
    (tmp_path / "calls").write_text("")
    ahead()
    monkeypatch.setattr(scores, "PROCESS", "another process")
    (tmp_path / "fixed").touch()
    assert all(each.reward is not None for each in scored(config, batch, model_folder))
    assert calls_in(tmp_path)["2-0"] == 2 and calls_in(tmp_path)["1-0"] == 1


def test_other_samples_than_those_that_were_judged_get_no_score_of_theirs(
    workspace: Path, tmp_path: Path, model_folder: Path
) -> None:
    config, batch = config_in(tmp_path), batch_in(workspace)
    with scored_ahead(config, batch, adapter_of(model_folder)), Journal(StepFolder.of(batch).journal, {}) as journal:
        for each in samples_of():
            journal.add(replace(each, output_tokens=[40]) if each.prompt_id == 1 else each)
        assert becomes(lambda: len(calls_in(tmp_path)) == 8, 60)
    found = scored(config, batch, model_folder)
    assert [each.reward for each in found] == [each.sample_index + 2 + each.output_tokens[0] / 64 for each in found]
    assert {name for name, count in calls_in(tmp_path).items() if count == 2} == {"1-0", "1-1"}


def test_the_deadline_bounds_what_is_still_being_judged_when_the_rollout_ends(
    workspace: Path, tmp_path: Path, model_folder: Path
) -> None:
    config = config_in(tmp_path, "time.sleep(600 if question[0] == '3' else 0)", max_unjudged_frac=0.5, timeout_s=15.0)
    batch, deadline = batch_in(workspace), Deadline(1.0)
    with (
        scored_ahead(config, batch, adapter_of(model_folder), deadline) as end,
        Journal(StepFolder.of(batch).journal, {}) as journal,
    ):
        for each in samples_of():
            journal.add(each)
        assert becomes(lambda: len(calls_in(tmp_path)) == 7, 60), "all but the last, behind one that hangs"
        time.sleep(1.5)  # the rollout goes on for longer than the limit, whose clock has not begun
        began = time.monotonic()
        deadline.begin()
        end()
    found = scored(config, batch, model_folder, deadline=deadline)
    assert 1.0 <= time.monotonic() - began < 12.0
    assert [each.unjudged for each in found] == [*[""] * 6, "time-out", "time-out"]
    assert calls_in(tmp_path)["3-0"] == 1, "what was tried in the rollout is not tried again"


@pytest.mark.parametrize("fields", [{"num_oversampled_prompts": 1}, {"partial_rollouts": True}])
def test_nothing_is_scored_ahead_of_a_rollout_that_leaves_groups_out(
    workspace: Path, tmp_path: Path, model_folder: Path, fields: dict[str, bool | int]
) -> None:
    config, batch = config_in(tmp_path), batch_in(workspace, **fields)
    with scored_ahead(config, batch, adapter_of(model_folder)), Journal(StepFolder.of(batch).journal, {}) as journal:
        for each in samples_of():
            journal.add(each)
        time.sleep(0.5)
    assert not calls_in(tmp_path)


PROGRAM = """
import sys
sys.path[:0] = sys.argv[3:]
from test_scored_ahead import *
config, batch, model = config_in(Path(sys.argv[1]), "time.sleep(0.2)"), batch_in(Path(os.environ["RATCHET_WORKSPACE"])), Path(sys.argv[2])
with scored_ahead(config, batch, adapter_of(model)), Journal(StepFolder.of(batch).journal, {}) as journal:
    for each in samples_of():
        journal.add(each)
    time.sleep(600)
"""


def test_a_flow_that_is_killed_in_the_rollout_keeps_what_was_judged(workspace: Path, tmp_path: Path, model_folder: Path) -> None:
    paths = [str(CHECKOUT / "tests/tasks"), str(CHECKOUT / "tests"), str(CHECKOUT)]
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path), str(model_folder), *paths]
    flow = subprocess.Popen(arguments, env=os.environ | {"RATCHET_WORKSPACE": str(workspace)}, start_new_session=True)
    assert becomes(lambda: (tmp_path / "calls").exists() and len(calls_in(tmp_path)) >= 4, 120) and flow.poll() is None
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    config = config_in(tmp_path, "time.sleep(0.2)")
    found = scored(config, batch_in(workspace), model_folder)
    assert [each.reward for each in found] == [each.sample_index + 2 + each.output_tokens[0] / 64 for each in found]
    twice = [name for name, count in calls_in(tmp_path).items() if count > 1]
    assert len(calls_in(tmp_path)) == 8 and len(twice) <= 2, "but for the one that was under way, and one whose worker went on"
