"""Episodes that one step stops and the next goes on with, by the real SGLang and the real trainer: each turn is sampled once and keeps its adapter.

Which episodes are stopped, and in which turn, is a matter of the game and not of time: the episodes of two prompts wait for the end of the rollout,
and those of the others wait until these do. One more group is stopped wherever it is, as all groups but it are complete first."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from count_turns import counts_of

from flows.presets import calculator
from flows.run import rl_run
from infra.config import CorrectionConfig, EnvironmentConfig, EvaluationConfig, RunConfig
from infra.data import prompts
from infra.runs.manifest import Manifest, read_manifest
from infra.settings import settings
from infra.store.files import path_of, read_json, read_json_lines
from infra.store.layout import StepFolder, run_folder
from infra.store.samples import Sample, read_samples, trajectory_of
from infra.trajectories.segments import Segment

NUM_PROMPTS, NUM_SPARE, GROUP_SIZE, TURNS = 4, 3, 3, 3
NUM_SLOW = 2
"""Prompts whose episodes wait."""
GAME = """
import os, time
HERE = os.path.dirname(os.path.abspath(__file__))
ROLLED_OUT = "{rolled_out}"

def noted(name):
    with open(HERE + "/" + name, "a") as stream:
        stream.write("x")
        return stream.tell()

def wait(is_over):
    while not is_over():
        time.sleep(0.02)

class Game:
    restore = "replay"

    def reset(self, task):
        self.question, self.turn, self.stop_after = task["question"], 0, 0
        self.is_slow = self.question in {slow}
        if self.is_slow and not os.path.exists(ROLLED_OUT):
            self.stop_after = noted("begun-%d" % {slow}.index(self.question)) % {group_size}  # 0: it is not stopped
        return self.question

    def step(self, action):
        self.turn += 1
        if self.stop_after == self.turn:
            noted("waiting")
            wait(lambda: os.path.exists(ROLLED_OUT))
        if not self.is_slow and not os.path.exists(ROLLED_OUT):
            wait(lambda: os.path.exists(HERE + "/waiting") and os.path.getsize(HERE + "/waiting") == {num_waiting})
        return "%d letters, again" % len(action), len(action) % 7 / 7, self.turn == {turns}
"""
"""Of the three episodes of a slow prompt one is not stopped, one is after its first turn and one after its second."""

# Its sample, with a scripted engine, is tests/tasks/test_carried_episodes.py.
pytestmark = [pytest.mark.end_to_end, pytest.mark.full, pytest.mark.timeout(1800)]


def config_of(tiny: Path, folder: Path) -> RunConfig:
    """Two steps, whose adapters differ by far more than an engine's rounding."""
    base = calculator()
    loss = base.trainer.loss.but(correction=CorrectionConfig(mode="decoupled", kind="tis"))
    config = base.but(
        name="r",
        model=str(tiny),
        num_steps=2,
        data=base.data.but(num_prompts=NUM_PROMPTS, num_oversampled_prompts=NUM_SPARE, partial_rollouts=True),
        sampling=base.sampling.but(group_size=GROUP_SIZE),
        engine=base.engine.but(deterministic=False),
        trainer=base.trainer.but(loss=loss),
        evaluation=EvaluationConfig(every=0),
    )
    questions = [prompt.question for prompt in prompts.draw(config.training, tiny, step=0, seed=config.seed)]
    about = {
        "rolled_out": StepFolder.at("r", 0).samples_inputs,
        "slow": questions[:NUM_SLOW],
        "group_size": GROUP_SIZE,
        "num_waiting": NUM_SLOW * (GROUP_SIZE - 1),
        "turns": TURNS,
    }
    (folder / "game.py").write_text(GAME.format(**about))
    limits = {"turn_timeout_s": 300, "episode_timeout_s": 600}
    environment = {"name": f"{folder / 'game.py'}:Game", "workers": NUM_SLOW * GROUP_SIZE + 2, **limits}
    return config.but(environment=EnvironmentConfig.model_validate(environment))


def made(step: int) -> Manifest:
    return read_manifest(run_folder("r") / f"steps/{step:06d}")


def sampled(sample: Sample) -> list[Segment]:
    return [segment for segment in trajectory_of(sample).segments if segment.is_sampled]


def on_record(step: int) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[dict[str, Any]]]]:
    """Of the episodes that a step has stopped, by name: turns of those under way, sampled segments of finished ones."""
    left = made(step).rollouts.left_over
    assert left is not None
    lines = read_json_lines(path_of(left.samples))
    under_way: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "output_tokens" in line:
            under_way.setdefault(line["episode"], []).append(line)
    finished = {
        f"{line['prompt_id']}/{line['sample_index']}": [
            {"output_tokens": span["tokens"], "output_logprobs": span["logprobs"], "adapter_sha256": span["adapter_sha256"]}
            for trajectory in line["trajectories"]
            for span in trajectory["segments"]
            if span["kind"] == "sampled"
        ]
        for line in lines
        if "trajectories" in line
    }
    return under_way, finished


@pytest.mark.usefixtures("prefect_server", "ends_real_programs")
def test_stopped_episodes_are_finished_in_the_next_step_and_each_turn_keeps_the_adapter_that_sampled_it(
    tiny: Path, workspace: Path
) -> None:
    rl_run.with_options(result_storage=settings().results)(config_of(tiny, workspace))
    first, second = made(0), made(1)
    old, new = first.adapter_in.sha256, second.adapter_in.sha256
    left = first.rollouts.left_over
    assert left is not None and set(range(NUM_SLOW)) <= set(left.prompt_ids) and len(left.prompt_ids) == NUM_SPARE
    under_way, finished = on_record(0)
    of_slow = [sorted(len(under_way.get(f"{prompt}/{index}", [])) for index in range(GROUP_SIZE)) for prompt in range(NUM_SLOW)]
    assert of_slow == [[0, 1, 2]] * NUM_SLOW, "one is finished, the others are stopped in their first and second turn"
    # Step 1 finishes them, with the turns on record as they are there and later ones by its own adapter.
    went_on = {f"{s.prompt_id}/{s.sample_index}": s for s in read_samples(path_of(second.rollouts.file))}
    older = {f"{prompt}/{index}" for prompt in left.prompt_ids for index in range(GROUP_SIZE)}
    assert older <= went_on.keys(), "each group that was begun is trained on"
    for name in older:
        turns, recorded = sampled(went_on[name]), under_way.get(name, []) + finished.get(name, [])
        assert [turn.adapter_sha256 for turn in turns] == [old] * len(recorded) + [new] * (TURNS - len(recorded))
        for turn, line in zip(turns, recorded, strict=False):
            assert list(turn.tokens) == line["output_tokens"] and list(turn.logprobs) == pytest.approx(line["output_logprobs"])
        assert went_on[name].reward is not None
    # No turn on record was sampled again: what the engine gave in step 1 is what lies in turns of its adapter.
    measures = read_json(run_folder("r") / "steps/000001/measures/roll_out.json")
    left_after, finished_after = on_record(1)
    of_samples = [len(turn.tokens) for sample in went_on.values() for turn in sampled(sample) if turn.adapter_sha256 == new]
    of_left = [len(line["output_tokens"]) for line in chain(*left_after.values(), *finished_after.values())]
    assert measures["num_new_output_tokens"] == sum(of_samples) + sum(of_left)
    assert measures["carried_turns"] == sum(map(len, under_way.values()))
    assert second.rollouts.num_older_tokens == sum(
        len(line["output_tokens"]) for line in chain(*under_way.values(), *finished.values())
    )
    # The batch has these log-probabilities, counted without our code.
    counts = [counts_of(run_folder("r") / f"steps/{step:06d}") for step in range(2)]
    assert [(c["unsampled_trained_tokens"], c["of_another_adapter"]) for c in counts] == [(0, 0)] * 2
    assert [c["carried_turns"] for c in counts] == [0, sum(map(len, chain(under_way.values(), finished.values())))]
    # And transformers with PEFT gives each turn the log-probability that it has by the adapter which its segment names.
    import oracle  # imports torch

    figures = list(oracle.steps(run_folder("r"), tiny, 2))
    print(json.dumps(figures))
    assert [each["num_older"] for each in figures] == [0, second.rollouts.num_older_tokens]
    assert all(each["max_logprob_diff"] < 1e-3 and each["update_error_of_others"] < 1e-4 for each in figures)
    assert figures[1]["older_by_own_diff"] > 0.01, "with the adapter of their step the older turns would be elsewhere"
