"""Partial rollouts with an environment: what a step stops, the next one goes on with, and each turn keeps the adapter that sampled it."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from shared import untrained_adapter
from turns import engine_dies_at

from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.environments.carried import CarriedEpisodes, check_adapters
from infra.environments.groups import WholeGroups
from infra.environments.journal import FinishedEpisode
from infra.failures import EngineUnavailable, WrongAnswer
from infra.records import AdapterVersion, CarriedOver, File, PromptBatch, Rollouts
from infra.rewards import client
from infra.rewards.outcome import Outcome
from infra.runs.accounting import unused
from infra.store.digests import sha256_of
from infra.store.files import path_of, read_json, read_json_lines, record_of, write_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import Sample, read_samples, trajectory_of
from infra.trajectories.segments import Segment, Trajectory
from tasks.roll_out import roll_out
from tasks.support.rollout import left_over

GAME = """
import os, time
from infra.environments.tools import tool
HERE = os.path.dirname(os.path.abspath(__file__))

@tool(idempotent={idempotent})
def note(text: str) -> str:
    open(HERE + "/notes", "a").write("x")
    return text

class Game:
    restore = "{restore}"

    def reset(self, task):
        open(HERE + "/resets", "a").write(task["answer"])
        self.task, self.turn = task, 0
        return "<say>" + task["answer"] + "</say>"

    def step(self, action):
        self.turn += 1
        open(HERE + "/steps", "a").write(self.task["answer"])
        if {calls}:
            note(text="%d" % self.turn)
        time.sleep(50 * (self.task["answer"] == "0" and self.turn == 2 and os.path.exists(HERE + "/slow")))
        return "<say>again %d</say>" % self.turn, 1.0, self.turn == 3

    def snapshot(self):
        return [self.task, self.turn]

    def resume(self, state):
        self.task, self.turn = state
"""
ENGINE, SAMPLING = EngineConfig(kind="scripted"), SamplingConfig(group_size=2, max_output_tokens=24)
TURNS = 3


class Steps(NamedTuple):
    """Two steps of a run: the first stops the episodes of prompt 0, the second goes on with them."""

    here: Path
    workspace: Path
    adapters: tuple[AdapterVersion, AdapterVersion]
    keep_reasoning: bool = True

    def write(self, restore: str = "replay", *, calls: bool = False, idempotent: bool = True) -> None:
        (self.here / "game.py").write_text(GAME.format(restore=restore, calls=calls, idempotent=idempotent))

    def rolled_out(
        self, step: int, ids: tuple[int, ...], left: CarriedOver | None = None, max_turns: int = 4, **fields: object
    ) -> Rollouts:
        rows = [Prompt(n, n, "2 + 2?", str(n), [4, 5, 6 + n], 70 + n)._asdict() for n in ids]
        path = write_json_lines(self.workspace / f"runs/r/steps/{step:06d}/prompts.jsonl", rows)
        about: dict[str, object] = {"num_oversampled_prompts": 1, "partial_rollouts": True}
        if left:
            about |= {
                "begun": left.samples,
                "num_begun_prompts": len(left.prompt_ids),
                "begun_engine_versions": left.engine_versions,
            }
        source: dict[str, object] = {"num_prompts": len(ids), "dataset_fingerprint": "f", "first_row": 0}
        prompts = PromptBatch.model_validate({"run": "r", "step": step, "file": record_of(path), **source, **about, **fields})
        name = f"{self.here / 'game.py'}:Game"
        environment = PlayedEnvironment(
            name=name,
            workers=3,
            turn_timeout_s=60,
            max_failed_frac=0.5,
            max_turns=max_turns,
            keep_reasoning=self.keep_reasoning,
        )
        return roll_out.fn(ENGINE, SAMPLING, prompts, self.adapters[step], None, environment)

    def first(self) -> CarriedOver:
        (self.here / "slow").touch()
        record = self.rolled_out(0, (0, 1, 2))
        (self.here / "slow").unlink()
        assert {sample.prompt_id for sample in samples_of(record)} == {1, 2}
        for name in ("steps", "resets"):
            (self.here / name).unlink()
        assert record.left_over is not None and record.left_over.prompt_ids == (0,)
        return record.left_over

    def second(self, left: CarriedOver, max_turns: int = 4) -> Rollouts:
        return self.rolled_out(1, (0, 3, 4), left, max_turns)

    def measures(self, step: int) -> dict[str, float]:
        found: dict[str, float] = read_json(self.workspace / f"runs/r/steps/{step:06d}/measures/roll_out.json")
        return found

    def count(self, name: str, prompt: int = 0) -> int:
        path = self.here / name
        return path.read_text().count(str(prompt)) if path.exists() else 0


def samples_of(record: Rollouts) -> list[Sample]:
    return read_samples(path_of(record.file))


@pytest.fixture
def steps(random_tiny: Path, workspace: Path, tmp_path: Path) -> Iterator[Steps]:
    first = untrained_adapter(random_tiny)
    weights = File(path="runs/r/adapters/000001/adapter_model.safetensors", sha256="1" * 64, num_bytes=1)
    found = Steps(tmp_path, workspace, (first, first.model_copy(update={"version": 1, "weights": weights})))
    found.write()
    yield found
    ScriptedEngine.stop_in(workspace)
    client.close_all()


def turns_left(left: CarriedOver) -> dict[str, list[dict[str, object]]]:
    lines = [line for line in read_json_lines(path_of(left.samples)) if "output_tokens" in line]
    return {name: [line for line in lines if line["episode"] == name] for name in ("0/0", "0/1")}


@pytest.mark.parametrize("restore", ["replay", "snapshot"])
def test_an_episode_goes_on_in_the_next_step_and_each_turn_keeps_its_adapter(
    restore: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.write(restore)
    left = steps.first()
    on_record = turns_left(left)
    num_older = sum(map(len, on_record.values()))
    assert 2 <= num_older <= 4, "two turns of each episode that had begun"
    with monkeypatch.context() as patch:
        asked = engine_dies_at(99, patch)
        record = steps.second(left)
    samples = [sample for sample in samples_of(record) if sample.prompt_id == 0]
    assert [(s.sample_index, s.reward, s.num_turns, s.unjudged) for s in samples] == [(0, 3.0, 3, ""), (1, 3.0, 3, "")]
    assert len(asked) >= 2 * TURNS - num_older + 2 * TURNS, "no turn on record was sampled again"
    for sample in samples:
        older = on_record[f"0/{sample.sample_index}"]
        turns = [segment for segment in trajectory_of(sample).segments if segment.is_sampled]
        assert [t.adapter_version for t in turns] == [0] * len(older) + [1] * (TURNS - len(older))
        assert {t.adapter_sha256 for t in turns[: len(older)]} == {"base"} and turns[-1].adapter_sha256 == "1" * 64
        for turn, line in zip(turns, older, strict=False):
            assert list(turn.tokens) == line["output_tokens"]
            assert list(turn.logprobs) == pytest.approx(line["output_logprobs"])
        assert (sample.adapter_version, sample.adapter_sha256) == (1, "1" * 64)
        assert sample.num_older_tokens == sum(len(turn.tokens) for turn in turns[: len(older)])
        assert sample.older_adapter_sha256 == ("base" if older else "")
    assert record.num_older_tokens == sum(sample.num_older_tokens for sample in samples) > 0
    measures = steps.measures(1)
    assert (measures["carried_turns"], measures["num_kept_turns"], measures["num_lost_turns"]) == (num_older, 0, 0)
    assert measures["num_unused"] == 0, "what is stopped is carried over"
    expected_steps = 2 * TURNS - (num_older // 2 if restore == "snapshot" else 0)
    assert steps.count("steps") == expected_steps, "with a snapshot no step that is behind it is made again"


def test_turns_that_are_trajectories_are_carried_over_each_with_its_adapter(steps: Steps) -> None:
    apart = steps._replace(keep_reasoning=False)
    left = apart.first()
    on_record = turns_left(left)
    record = apart.second(left)
    for index in range(2):
        samples = [sample for sample in samples_of(record) if sample.episode == (0, index)]
        num_older = len(on_record[f"0/{index}"])
        assert [(s.first_turn, s.num_turns, s.reward) for s in samples] == [(turn, 1, 3.0) for turn in range(TURNS)]
        assert [s.segments[-1].adapter_version for s in samples] == [0] * num_older + [1] * (TURNS - num_older)
        older = [s.num_sampled_tokens for s in samples[:num_older]]
        assert [s.num_older_tokens for s in samples] == older + [0] * (TURNS - num_older)
        assert {(s.adapter_version, s.adapter_sha256) for s in samples} == {(1, "1" * 64)}
    assert record.num_older_tokens > 0 and apart.measures(1)["carried_turns"] == sum(map(len, on_record.values()))


def test_a_step_that_is_killed_goes_on_with_the_episodes_that_were_carried_into_it(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = steps.first()
    undisturbed = steps.rolled_out(1, (0, 3), left, num_oversampled_prompts=0)
    for name in ("samples.parquet", "samples.inputs_key.json"):
        (steps.workspace / "runs/r/steps/000001" / name).unlink()
    with monkeypatch.context() as patch:
        engine_dies_at(3, patch)
        with pytest.raises(EngineUnavailable):
            steps.rolled_out(1, (0, 3), left, num_oversampled_prompts=0)
    with monkeypatch.context() as patch:
        asked = engine_dies_at(99, patch)
        again = steps.rolled_out(1, (0, 3), left, num_oversampled_prompts=0)
    assert again.file.sha256 == undisturbed.file.sha256
    num_older = sum(map(len, turns_left(left).values()))
    assert len(asked) == 4 * TURNS - num_older - 3, "neither the turns of the step before nor those before the kill"
    assert steps.measures(1)["num_kept_turns"] <= 3


def test_what_is_left_over_has_the_same_digest_after_a_kill(steps: Steps) -> None:
    left = steps.first()
    assert left_over(steps.workspace / "runs/r/steps/000000") == left
    assert sha256_of(path_of(left.samples)) == left.samples.sha256
    (steps.here / "slow").touch()
    assert steps.rolled_out(0, (0, 1, 2)).left_over == left, "a finished rollout is found again with what it left"


def test_an_environment_that_restarts_begins_again_and_its_turns_are_counted_as_lost(steps: Steps) -> None:
    steps.write("restart")
    left = steps.first()
    num_older = sum(map(len, turns_left(left).values()))
    record = steps.second(left)
    samples = [sample for sample in samples_of(record) if sample.prompt_id == 0]
    assert [(s.reward, s.num_older_tokens, s.num_turns) for s in samples] == [(3.0, 0, 3)] * 2
    assert all(s.adapter_version == 1 for sample in samples for s in sample.segments if s.is_sampled)
    assert steps.count("resets") == 2
    measures = steps.measures(1)
    assert (measures["num_lost_turns"], measures.get("carried_turns", 0)) == (num_older, 0)


@pytest.mark.parametrize("restore", ["replay", "snapshot"])
def test_a_tool_is_not_called_again_in_the_next_step(restore: str, steps: Steps) -> None:
    steps.write(restore, calls=True, idempotent=False)
    left = steps.first()
    record = steps.second(left)
    assert all(not sample.unjudged for sample in samples_of(record))
    played = {(s.prompt_id, s.sample_index) for s in samples_of(record)}
    assert (0, 0) in played and (0, 1) in played
    of_both_steps = len((steps.here / "notes").read_text())
    lines = read_json_lines(StepFolder(steps.workspace / "runs/r/steps/000001").left_over_episodes)
    stopped = sum("is_idempotent" in line for line in lines)
    assert of_both_steps == TURNS * (4 + len(played)) + stopped, "each call of each episode was made once"


def test_an_environment_that_restarts_makes_no_effect_twice_in_the_next_step(steps: Steps) -> None:
    steps.write("restart", calls=True, idempotent=False)
    left = steps.first()
    num_begun = len([turns for turns in turns_left(left).values() if turns])
    samples = [sample for sample in samples_of(steps.second(left)) if sample.prompt_id == 0]
    assert [s.unjudged for s in samples].count("outcome unknown") == num_begun >= 1


def test_groups_that_were_carried_over_are_waited_for_and_others_fill_the_rest() -> None:
    groups = WholeGroups(range(4), 1, 2, [(3, 0), (2, 0)], must_be_whole={0})
    assert groups.prompt_ids == [3] and not groups.are_enough
    groups.add((0, 0))
    assert groups.prompt_ids == [3, 0] and groups.are_enough


def test_without_carrying_over_each_begun_episode_counts_as_unused(steps: Steps) -> None:
    (steps.here / "slow").touch()
    record = steps.rolled_out(0, (0, 1, 2), partial_rollouts=False)
    assert record.left_over is None and steps.measures(0)["num_unused"] == steps.measures(0)["stopped"] >= 1


def test_episodes_of_the_last_step_are_counted(steps: Steps) -> None:
    left = steps.first()
    begun = {line["episode"] for line in read_json_lines(path_of(left.samples)) if "episode" in line}
    assert len(unused._keys_carried(path_of(left.samples))) == len(begun) >= 1


def test_with_another_configuration_of_the_environment_what_was_carried_over_begins_again_and_is_counted(steps: Steps) -> None:
    left = steps.first()
    num_begun = len([turns for turns in turns_left(left).values() if turns])
    record = steps.second(left, max_turns=5)
    assert record.num_older_tokens == 0 and record.num_prompts == 2
    assert steps.measures(1)["num_unused"] == num_begun


@pytest.mark.parametrize(
    "changed",
    [{"logprobs": (-0.25,)}, {"tokens": (8,)}, {"adapter_sha256": "c" * 64}, {"adapter_version": 2}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_turn_of_an_older_adapter_that_is_on_no_record_is_refused(changed: dict[str, object], steps: Steps) -> None:
    def episode(**fields: object) -> dict[tuple[int, int], FinishedEpisode]:
        sampled = {"tokens": (7,), "logprobs": (-0.5,), "adapter_version": 0, "adapter_sha256": "base", "finish_reason": "stop"}
        segment = Segment("sampled", **(sampled | fields))  # type: ignore[arg-type]  # fields of a segment
        trajectory = Trajectory("0/0", (Segment("given", (1,)), segment), 0, "done")
        return {(0, 0): FinishedEpisode([trajectory], Outcome(1.0))}

    carried = CarriedEpisodes(finished=episode())
    check_adapters(episode(), steps.adapters[1], carried)
    check_adapters(episode(adapter_version=1, adapter_sha256="1" * 64), steps.adapters[1], carried)
    with pytest.raises(WrongAnswer, match=r"turn 0 of episode 0 of prompt 0 was sampled by adapter .* no such turn on record"):
        check_adapters(episode(**changed), steps.adapters[1], carried)
