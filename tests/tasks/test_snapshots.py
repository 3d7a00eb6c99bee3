"""Environments that save their state: after a kill an episode goes on from there, and none of its steps is made again."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shared import untrained_adapter
from turns import engine_dies_at

from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.environments import episodes
from infra.failures import EngineUnavailable, RewardFailed, WrongAnswer
from infra.gateway.session.records import TurnJournal
from infra.gateway.session.snapshots import SnapshotRecord
from infra.records import PromptBatch
from infra.rewards import client
from infra.store.files import path_of, read_json, record_of, write_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import Sample, read_samples, trajectory_of
from tasks.roll_out import roll_out

GAME = """
import os, signal
from infra.environments.tools import tool
HERE = os.path.dirname(os.path.abspath(__file__))

def count(name):
    open(HERE + "/" + name, "a").write("x")

@tool
def note(text: str) -> str:
    count("notes")
    return text

class Game:
    restore = "snapshot"
    def reset(self, task):
        count("resets")
        self.task, self.said = task, []
        return "Say it: <say>first " + task["answer"] + "</say>"

    def step(self, action):
        count("steps")
        self.said.append(action)
        note(text="turn")
        {body}
        return "Again: <say>turn %d of %s</say>" % (len(self.said), self.task["answer"]), float(action == self.said[0]), len(self.said) == 3

    def snapshot(self):
        return {saved}

    def resume(self, state):
        self.task, self.said = {state}
"""
JSON = ("[self.task, self.said]", "state")
BYTES = ("__import__('pickle').dumps((self.task, self.said))", "__import__('pickle').loads(state)")
DIES_IN_TURN_2 = "len(self.said) == 2 and not os.path.exists(HERE + '/died') and (open(HERE + '/died', 'w'), os.kill(os.getpid(), signal.SIGKILL))"
Play = Callable[..., list[Sample]]


@pytest.fixture
def play(tmp_path: Path, workspace: Path, random_tiny: Path) -> Iterator[Play]:
    """Roll out two episodes of three turns, one after the other."""
    adapter = untrained_adapter(random_tiny)
    rows = [Prompt(n, n, "2 + 2?", str(n), [4, 5, 6 + n], 70 + n)._asdict() for n in range(2)]
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", rows)
    prompts = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=2, dataset_fingerprint="f", first_row=0)

    def made(body: str = "pass", saving: tuple[str, str] = JSON) -> list[Sample]:
        (tmp_path / "game.py").write_text(GAME.format(body=body, saved=saving[0], state=saving[1]))
        config = PlayedEnvironment(name=f"{tmp_path / 'game.py'}:Game", workers=1, max_failed_frac=0.0)
        sampling = SamplingConfig(group_size=1, max_output_tokens=24)
        record = roll_out.fn(EngineConfig(kind="scripted"), sampling, prompts, adapter, None, config)
        return read_samples(path_of(record.file))

    yield made
    ScriptedEngine.stop_in(workspace)
    client.close_all()


def counts(folder: Path) -> tuple[int, ...]:
    """Resets, steps and notes that were made; from now on they are counted anew."""
    paths = [folder / name for name in ("resets", "steps", "notes")]
    found = tuple(len(path.read_text()) if path.exists() else 0 for path in paths)
    for path in paths:
        path.unlink(missing_ok=True)
    return found


@pytest.fixture
def folder(workspace: Path) -> StepFolder:
    return StepFolder(workspace / "runs/r/steps/000000")


def undisturbed(play: Play, folder: StepFolder, here: Path, saving: tuple[str, str]) -> list[Sample]:
    samples = play(saving=saving)
    folder.samples_inputs.unlink()
    assert counts(here) == (2, 6, 6)
    return samples


@pytest.mark.parametrize("saving", [JSON, BYTES], ids=["json", "bytes"])
def test_after_a_kill_an_episode_goes_on_from_its_snapshot_and_makes_no_step_again(
    saving: tuple[str, str], play: Play, folder: StepFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed(play, folder, tmp_path, saving)
    with monkeypatch.context() as patch:
        engine_dies_at(5, patch)  # in the third turn of the second episode
        with pytest.raises(EngineUnavailable):
            play(saving=saving)
    assert counts(tmp_path) == (2, 5, 5)
    with monkeypatch.context() as patch:
        asked = engine_dies_at(99, patch)
        samples = play(saving=saving)
    assert counts(tmp_path) == (0, 1, 1) and len(asked) == 1
    assert [trajectory_of(each).sha256 for each in samples] == [trajectory_of(each).sha256 for each in expected]
    assert samples == expected and [each.unjudged for each in samples] == ["", ""]
    measures = read_json(folder.path / "measures/roll_out.json")
    assert (measures["num_kept"], measures["num_kept_turns"], measures["num_lost_turns"], measures["resumed"]) == (1, 2, 0, 1)


def test_where_a_worker_is_killed_another_one_goes_on_from_the_snapshot(play: Play, folder: StepFolder, tmp_path: Path) -> None:
    samples = play(DIES_IN_TURN_2)
    assert counts(tmp_path) == (2, 7, 6)  # the step that was struck was begun twice, its tool was called once
    folder.samples_inputs.unlink()
    assert samples == play(DIES_IN_TURN_2)


def test_a_snapshot_of_turns_that_are_not_on_record_is_not_used(
    play: Play, folder: StepFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        engine_dies_at(5, patch)
        with pytest.raises(EngineUnavailable):
            play()
    lines = folder.turns_journal.read_bytes().splitlines(keepends=True)
    lost = [n for n, line in enumerate(lines) if b'"output_tokens"' in line and b'"episode":"1/0"' in line][-1]
    folder.turns_journal.write_bytes(b"".join(line for n, line in enumerate(lines) if n != lost))
    counts(tmp_path)
    assert [each.num_turns for each in play()] == [3, 3]
    assert counts(tmp_path)[:2] == (1, 3)


def test_wrong_turns_take_their_snapshots_with_them(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        engine_dies_at(5, patch, WrongAnswer("a wrong answer"))
        with pytest.raises(WrongAnswer):
            play()
    assert counts(tmp_path) == (2, 5, 5)
    assert [each.num_turns for each in play()] == [3, 3]
    assert counts(tmp_path)[:2] == (2, 6)


@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        ("'x' * 2**20", r"snapshot\(\) returned 1048578 bytes, 1048576 are allowed"),
        ("bytes(2**20 + 1)", r"snapshot\(\) returned 1048577 bytes, 1048576 are allowed"),
        ("{1, 2}", r"snapshot\(\) must return bytes or JSON: Object of type set"),
        ("float('nan')", r"snapshot\(\) must return bytes or JSON: Out of range"),
    ],
)
def test_a_state_that_cannot_be_kept_fails_the_episode_in_one_line(saved: str, problem: str, play: Play) -> None:
    with pytest.raises(RewardFailed, match=problem) as caught:
        play(saving=(saved, "state"))
    assert "\n" not in str(caught.value)


def test_an_environment_with_snapshots_needs_both_methods(tmp_path: Path, workspace: Path) -> None:
    (tmp_path / "bad.py").write_text("class Game:\n    restore = 'snapshot'\n    reset = step = snapshot = lambda *a: 1\n")
    with pytest.raises(ValueError, match=r"has restore 'snapshot', which needs methods snapshot\(\) and resume\(state\)"):
        episodes.check(PlayedEnvironment(name=f"{tmp_path}/bad.py:Game", max_failed_frac=0.0), "digest")
    client.close_all()


def test_of_several_snapshots_the_journal_keeps_the_latest(tmp_path: Path) -> None:
    with TurnJournal(tmp_path / "turns.journal", {"a": "b"}) as journal:
        for number in range(3):
            journal.add_snapshot(SnapshotRecord("0/0", number, {"n": number}, []))
    with TurnJournal(tmp_path / "turns.journal", {"a": "b"}) as journal:
        assert journal.snapshots["0/0"].num_turns == 2
    assert (tmp_path / "turns.journal").read_bytes().count(b"num_turns") == 1
