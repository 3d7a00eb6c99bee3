"""Over-sampling with an environment: a rollout ends when enough groups are complete, and the slowest episodes are thrown away."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared import untrained_adapter
from turns import engine_dies_at

from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.environments.groups import WholeGroups
from infra.failures import EngineUnavailable
from infra.records import AdapterVersion, PromptBatch, Rollouts
from infra.rewards import client
from infra.store.files import path_of, read_json, record_of, write_json_lines
from infra.store.samples import read_samples
from tasks.roll_out import roll_out

GAME = """
import os, time
HERE = os.path.dirname(os.path.abspath(__file__))

class Game:
    def reset(self, task):
        self.task, self.turn = task, 0
        return "<say>" + task["answer"] + "</say>"

    def step(self, action):
        self.turn += 1
        open(HERE + "/steps", "a").write(self.task["answer"])
        time.sleep(50 * (self.task["answer"] == "0" and self.turn == 2 and os.path.exists(HERE + "/slow")))
        return "<say>again</say>", 1.0, self.turn == 2
"""
ENGINE, SAMPLING = EngineConfig(kind="scripted"), SamplingConfig(group_size=2, max_output_tokens=24)


@pytest.fixture
def adapter(random_tiny: Path, workspace: Path) -> Iterator[AdapterVersion]:
    yield untrained_adapter(random_tiny)
    ScriptedEngine.stop_in(workspace)
    client.close_all()


def rolled_out(adapter: AdapterVersion, workspace: Path, here: Path, workers: int) -> Rollouts:
    """Three groups, of which two are needed; where it is slow, the episodes of the first do not end in time."""
    (here / "game.py").write_text(GAME)
    rows = [Prompt(n, n, "2 + 2?", str(n), [4, 5, 6 + n], 70 + n)._asdict() for n in range(3)]
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", rows)
    prompts = PromptBatch(
        run="r", step=0, file=record_of(path), num_prompts=3, num_oversampled_prompts=1, dataset_fingerprint="f", first_row=0
    )
    environment = PlayedEnvironment(name=f"{here / 'game.py'}:Game", workers=workers, turn_timeout_s=60, max_failed_frac=0.0)
    return roll_out.fn(ENGINE, SAMPLING, prompts, adapter, None, environment)


def test_a_rollout_ends_when_enough_groups_are_complete(adapter: AdapterVersion, workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    begin = time.monotonic()
    record = rolled_out(adapter, workspace, tmp_path, workers=3)
    assert time.monotonic() - begin < 45
    samples = read_samples(path_of(record.file))
    assert [(s.prompt_id, s.sample_index, s.reward) for s in samples] == [(n, i, 2.0) for n in (1, 2) for i in (0, 1)]
    assert (record.num_prompts, record.num_samples, record.num_turns) == (2, 4, 8)
    assert read_json(workspace / "runs/r/steps/000000/measures/roll_out.json")["stopped"] in (1, 2), "those that had begun"


def test_after_a_kill_only_what_is_needed_is_played(
    adapter: AdapterVersion, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        engine_dies_at(7, patch)  # in the second turn of the second group's second episode
        with pytest.raises(EngineUnavailable):
            rolled_out(adapter, workspace, tmp_path, workers=1)
    (tmp_path / "steps").unlink()
    record = rolled_out(adapter, workspace, tmp_path, workers=1)
    assert {s.prompt_id for s in read_samples(path_of(record.file))} == {0, 1}
    steps = (tmp_path / "steps").read_text()
    assert steps.replace("2", "") == "11", "one episode is played again; others may have begun on a busy machine"


def test_the_first_complete_groups_are_taken_in_the_order_in_which_they_were_complete() -> None:
    groups = WholeGroups(range(4), 2, 2, [(3, 0), (0, 1), (3, 1), (1, 0)])
    assert groups.prompt_ids == [3] and not groups.are_enough
    for key in ((2, 0), (1, 1), (0, 0), (2, 1)):
        groups.add(key)
    assert groups.prompt_ids == [3, 1] and groups.are_enough
