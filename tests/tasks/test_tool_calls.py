"""Calls of tools in episodes: in the journal before they are made, and after a crash not made twice."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shared import untrained_adapter
from turns import engine_dies_at

from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.failures import EngineUnavailable, WrongAnswer
from infra.gateway.session.calls import CallRecord, Calls
from infra.gateway.session.records import TurnJournal
from infra.records import PromptBatch
from infra.rewards import client
from infra.store.files import path_of, read_json, record_of, write_json, write_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import Sample, read_samples
from tasks.roll_out import roll_out

SHOP = """
import os, signal, time
from infra.environments.tools import tool
HERE = os.path.dirname(os.path.abspath(__file__))

@tool(idempotent={idempotent})
def book(seat: int) -> str:
    open(HERE + "/booked", "a").write("x")
    {body}
    return "booked %d" % seat

class Shop:
    restore = "{restore}"
    def reset(self, task):
        self.turn = 0
        return "<say>seat</say>"

    def step(self, action):
        self.turn += 1
        result = book(seat=self.turn)
        {after}
        return "<say>" + result + "</say>", float(action != "seat"), self.turn == 3
"""

Play = Callable[..., list[Sample]]


@pytest.fixture
def play(tmp_path: Path, workspace: Path, random_tiny: Path) -> Iterator[Play]:
    """Roll out two episodes of a shop; body is a line of its tool, after one of its step when the tool has been called."""
    adapter = untrained_adapter(random_tiny)
    rows = [Prompt(n, n, "2 + 2?", str(n), [4, 5, 6 + n], 70 + n)._asdict() for n in range(2)]
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", rows)
    prompts = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=2, dataset_fingerprint="f", first_row=0)

    def made(body: str = "pass", restore: str = "replay", *, idempotent: bool = False, after: str = "pass") -> list[Sample]:
        (tmp_path / "shop.py").write_text(SHOP.format(body=body, restore=restore, idempotent=idempotent, after=after))
        config = PlayedEnvironment(name=f"{tmp_path / 'shop.py'}:Shop", workers=1, max_failed_frac=0.5)
        record = roll_out.fn(
            EngineConfig(kind="scripted"), SamplingConfig(group_size=1, max_output_tokens=24), prompts, adapter, None, config
        )
        return read_samples(path_of(record.file))

    yield made
    ScriptedEngine.stop_in(workspace)
    client.close_all()


def killed_at(turn: int, monkeypatch: pytest.MonkeyPatch, again: Callable[[], object]) -> None:
    with monkeypatch.context() as patch:
        engine_dies_at(turn, patch)
        with pytest.raises(EngineUnavailable):
            again()


def num_booked(folder: Path) -> int:
    return len((folder / "booked").read_text())


def test_a_call_whose_result_is_on_record_is_not_made_again(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at(2, monkeypatch, play)  # two turns of the first episode with their calls
    assert num_booked(tmp_path) == 2
    samples = play()
    assert num_booked(tmp_path) == 6
    assert [(s.num_turns, s.reward) for s in samples] == [(3, 2.0)] * 2
    assert "booked 1" in samples[0].text and "booked 2" in samples[0].text


DIES_IN_ITS_SECOND_CALL = "len(open(HERE + '/booked').read()) == 2 and os.kill(os.getpid(), signal.SIGKILL)"


def test_a_call_without_a_result_is_not_made_again_and_its_episode_ends_as_outcome_unknown(play: Play, tmp_path: Path) -> None:
    samples = play(DIES_IN_ITS_SECOND_CALL)  # another worker begins the episode again
    assert {(s.prompt_id, s.reward, s.unjudged) for s in samples} == {(0, None, "outcome unknown"), (1, 2.0, "")}
    assert num_booked(tmp_path) == 2 + 3


@pytest.mark.parametrize(("idempotent", "num_calls", "unjudged"), [(False, 1 + 3, "outcome unknown"), (True, 1 + 6, "")])
def test_an_episode_that_restarts_after_its_worker_is_killed_makes_no_effect_twice(
    idempotent: bool, num_calls: int, unjudged: str, play: Play, tmp_path: Path
) -> None:
    dies_once = "len(open(HERE + '/booked').read()) == 1 and os.kill(os.getpid(), signal.SIGKILL)"
    samples = play(restore="restart", idempotent=idempotent, after=dies_once)
    assert [sample.unjudged for sample in samples] == [unjudged, ""]
    assert num_booked(tmp_path) == num_calls


def test_a_call_outlives_the_turns_of_an_engine_that_answered_wrongly(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        engine_dies_at(2, patch, WrongAnswer("a wrong answer"))
        with pytest.raises(WrongAnswer):
            play()
    assert num_booked(tmp_path) == 2
    assert [(s.num_turns, s.reward) for s in play()] == [(3, 2.0)] * 2
    assert num_booked(tmp_path) == 6


def test_a_call_has_the_same_key_when_its_episode_is_repeated_and_another_one_in_another_run(
    play: Play, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that takes it as idempotency key would give a run the results of another one's calls."""
    keys: list[str] = []
    add_call = TurnJournal.add_call

    def noted(journal: TurnJournal, call: CallRecord) -> None:
        keys.append(call.key)
        add_call(journal, call)

    monkeypatch.setattr(TurnJournal, "add_call", noted)
    of_runs = []
    for run in ("one", "two"):
        write_json(workspace / "runs/r/id.json", run)
        killed_at(2, monkeypatch, lambda: play())
        before = {*keys}
        play()
        assert before < {*keys} and len({*keys}) == 6
        of_runs.append({*keys})
        keys.clear()
        StepFolder(workspace / "runs/r/steps/000000").samples_inputs.unlink()
    assert of_runs[0].isdisjoint(of_runs[1])


def test_an_effect_that_is_not_of_the_episode_leaves_its_outcome_unknown() -> None:
    booked = CallRecord("0/0", "k", "book", {"seat": 1}, is_idempotent=False, is_done=True)
    read = CallRecord("0/0", "l", "read", {}, is_idempotent=True, is_done=True)
    assert Calls("0/0", recorded=[booked]).is_outcome_unknown
    assert not Calls("0/0", recorded=[read]).is_outcome_unknown


def in_the_journal_before(step: StepFolder, episode: str, monkeypatch: pytest.MonkeyPatch, play: Callable[[], object]) -> None:
    """Leave a journal as a flow that is killed in the middle of a call leaves it."""
    killed_at(2, monkeypatch, play)
    lines = step.turns_journal.read_bytes().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if b'"is_idempotent"' in line and b'"is_done":true' in line)
    assert f'"episode":"{episode}"'.encode() in lines[last]
    step.turns_journal.write_bytes(b"".join(lines[:last]))


@pytest.mark.parametrize(("idempotent", "num_calls", "unjudged"), [(False, 2 + 3, "outcome unknown"), (True, 2 + 5, "")])
def test_after_a_kill_in_the_middle_of_a_call_only_an_idempotent_one_is_made_again(
    idempotent: bool,
    num_calls: int,
    unjudged: str,
    play: Play,
    tmp_path: Path,
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = StepFolder(workspace / "runs/r/steps/000000")
    in_the_journal_before(folder, "0/0", monkeypatch, lambda: play(idempotent=idempotent))
    samples = play(idempotent=idempotent)
    assert [sample.unjudged for sample in samples] == [unjudged, ""]
    assert num_booked(tmp_path) == num_calls


@pytest.mark.parametrize(("idempotent", "num_calls", "unjudged"), [(False, 2 + 3, "outcome unknown"), (True, 2 + 6, "")])
def test_an_episode_that_begins_again_makes_no_effect_twice(
    idempotent: bool, num_calls: int, unjudged: str, play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(2, monkeypatch, lambda: play(restore="restart", idempotent=idempotent))
    samples = play(restore="restart", idempotent=idempotent)
    assert [sample.unjudged for sample in samples] == [unjudged, ""]
    assert num_booked(tmp_path) == num_calls


def test_a_tool_that_fails_gives_its_error_as_a_result_and_is_counted(play: Play, workspace: Path) -> None:
    samples = play("time.sleep(0.1); assert seat != 2, 'sold out'")
    assert [sample.reward for sample in samples] == [2.0] * 2
    assert "error: AssertionError: sold out" in samples[0].text
    measures = read_json(workspace / "runs/r/steps/000000/measures/roll_out.json")
    assert (measures["tool_calls"], measures["tool_errors"], measures["branches"], measures["prefix_mismatches"]) == (6, 2, 0, 0)
    assert measures["tool_errors/book"] == 2
    assert measures["environment_s"] > 0.6 and measures["model_s"] > 0


def test_a_call_is_on_the_disk_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with TurnJournal(tmp_path / "turns.journal", {"a": "b"}) as journal:
        call = CallRecord("0/0", "k", "book", {"seat": 1}, is_idempotent=False)
        journal.add_call(call)
        monkeypatch.setattr("os.fsync", synced.append)
        journal.add_call(CallRecord("0/0", "l", "read", {}, is_idempotent=True))
        assert not synced
        journal.add_call(CallRecord("0/0", "m", "book", {"seat": 2}, is_idempotent=False))
        assert len(synced) == 1
    with TurnJournal(tmp_path / "turns.journal", {"a": "b"}) as journal:
        assert [each.key for each in journal.calls["0/0"]] == ["k", "l", "m"] and journal.calls["0/0"][0] == call


def test_calls_that_begin_again_with_a_rollout_of_other_inputs_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TurnJournal(tmp_path / "turns.journal", {"a": "b"}) as journal:
        for key, name in (("k", "book"), ("l", "read"), ("m", "pay")):
            journal.add_call(CallRecord("0/0", key, name, {}, is_idempotent=name == "read"))
            journal.add_call(CallRecord("0/0", key, name, {}, is_idempotent=name == "read", is_done=True))
    with TurnJournal(tmp_path / "turns.journal", {"a": "c"}) as journal:
        assert journal.calls == {}
    assert "2 calls of tools that are not idempotent (book, pay) were made by these episodes, which begin again" in caplog.text
