"""Cells of runs of episodes that lie between two steps: carried over from one to the next, or played ahead of their step.

    carried            two steps; each plays five groups, needs four and carries one over
    episodes ahead     three steps, the episodes of two of them are played ahead

Which episodes are carried over is decided by the game, not by time: those of a step's first new prompt wait in their second turn until its rollout
is over, and those of the others wait until these do. An episode has three turns, each calls a tool that may be called once.
"""

import collections
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cell import Running

    from infra.config import RunConfig

STOPPING, MARKING, GOING_ON = "carried.stopping", "carried.marking", "carried.going_on"
"""Episodes are stopped: before the file of them is written; between that file and the mark that makes the rollout valid; in the next step, where
an episode has two turns of the step before and one of its own."""
PLAYING_AHEAD = "queue.playing"
"""In the middle of the third rollout, while step 0 trains."""
POINTS = (STOPPING, MARKING, GOING_ON, PLAYING_AHEAD)
SIGNALS = ("SIGKILL", "SIGTERM", "hang")
CARRIED: dict[tuple[str, str], tuple[str, ...]] = {
    ("flow", "SIGKILL"): POINTS[:3],
    **{("flow", fault): (GOING_ON,) for fault in SIGNALS[1:]},
    ("flow", "exit 1"): (MARKING,),
    ("engine", "SIGKILL"): (STOPPING, GOING_ON),
    **{("engine", fault): (GOING_ON,) for fault in (*SIGNALS[1:], "garbage", "reset")},
    **{("reward worker", fault): (GOING_ON,) for fault in SIGNALS[:2]},
    **{("worker", fault): (GOING_ON,) for fault in SIGNALS[:2]},
}
AHEAD: dict[tuple[str, str], tuple[str, ...]] = {
    **{("flow", fault): (PLAYING_AHEAD,) for fault in (*SIGNALS, "exit 1")},
    **{("engine", fault): (PLAYING_AHEAD,) for fault in (*SIGNALS, "exit 1", "garbage", "HTTP 500", "reset")},
    **{("reward worker", fault): (PLAYING_AHEAD,) for fault in SIGNALS},
    **{("worker", fault): (PLAYING_AHEAD,) for fault in SIGNALS[:2]},
}
NUM_STEPS = {"carried": 2, "episodes ahead": 3}
NUM_TURNS, NUM_TURNS_STOPPED, GROUP_SIZE = 3, 2, 4
NUM_WORKERS = GROUP_SIZE + 1
"""Those that wait, and one that plays all others."""
GAME = """import json, os, time
import points
from infra.environments.tools import call_key, tool

FOLDER = os.environ["DRILL_FOLDER"]
PROMPTS = json.load(open(FOLDER + "/prompts.json"))

def lines(name):
    return open(FOLDER + "/" + name).readlines() if os.path.exists(FOLDER + "/" + name) else []

def is_over(step):
    return os.path.exists(FOLDER + "/workspace/runs/r/steps/%06d/samples.inputs_key.json" % step)

def wait(condition):
    while not condition():
        time.sleep(0.02)

@tool
def note(turn: int, said: str, mark: str) -> str:
    "An effect that may be made once."
    for name in ("noted", mark):
        with open(FOLDER + "/" + name + ".txt", "a") as stream:
            stream.write(call_key() + "\\n")
    return "%d letters" % len(said)

class Game:
    def reset(self, task):
        self.turn, (self.step_of, self.is_slow) = 0, PROMPTS[task["question"]]
        return task["question"]

    def step(self, action):
        self.turn += 1
        was_over, mark = is_over(self.step_of), "slow-%d-%d" % (self.step_of, self.turn)
        said = note(turn=self.turn, said=action, mark=mark if self.is_slow else "others")
        if self.is_slow and was_over and self.turn == 3:
            points.reach("carried.going_on")
        if self.is_slow and self.turn == 2:
            wait(lambda: is_over(self.step_of))
        if not self.is_slow:
            wait(lambda: len(lines("slow-%d-2.txt" % self.step_of)) == 4)
        return said, len(action) % 7 / 7, self.turn == 3
"""


def of_run(variant: str) -> dict[str, dict[str, Any]]:
    """Fields by section that such a run needs besides."""
    correction = {"mode": "decoupled", "kind": "tis"}
    if variant == "carried":
        return {
            "data": {"num_oversampled_prompts": 1, "partial_rollouts": True},
            "engine": {"deterministic": False},
            "trainer": {"loss": {"correction": correction}},
        }
    ahead = correction | {"max_staleness": NUM_STEPS["episodes ahead"] - 1}
    return {"trainer": {"loss": {"correction": ahead}, "timeout_s": 60}} if variant == "episodes ahead" else {}


def with_waiting_episodes(config: "RunConfig", folder: Path, model: Path) -> "RunConfig":
    """Episodes of which those of some prompts wait. Writes which these are."""
    from infra.config import EnvironmentConfig
    from infra.data import prompts

    drawn = [prompts.draw(config.training, model, step=step, seed=config.seed, goes_on=step > 0) for step in range(2)]
    of_question = {each.question: (step, each is of_step[0]) for step, of_step in enumerate(drawn) for each in of_step}
    assert len(of_question) == sum(map(len, drawn)), "a question is asked twice"
    (folder / "prompts.json").write_text(json.dumps(of_question))
    path = folder / "game.py"
    path.write_text(GAME)
    limits = {"turn_timeout_s": 100.0, "episode_timeout_s": 120.0}
    own = {"name": f"{path}:Game", "workers": NUM_WORKERS, "environment": ["DRILL_FOLDER"], **limits}
    return config.but(environment=EnvironmentConfig.model_validate(own))


def num_taken_in(run: Path, config: "RunConfig") -> int:
    """Return how many turns of the run's carried-over episodes are on its disk: in journals, and in step 0's rollout if that is whole."""
    journals = [path.read_text().splitlines() for path in run.glob("steps/*/turns.journal")]
    num_in_journals = sum('"output_tokens"' in line for lines in journals for line in lines)
    num_played = config.data.num_prompts * GROUP_SIZE * NUM_TURNS + GROUP_SIZE * NUM_TURNS_STOPPED
    return num_in_journals + num_played * (run / "steps/000000/samples.inputs_key.json").exists()


def after(running: "Running", problems: list[str]) -> None:
    """The samples of all steps are those of an undisturbed run; of what was carried over each turn was sampled once and has its adapter, and
    each effect was made once."""
    if running.cell.variant not in NUM_STEPS:
        return
    _samples_as_undisturbed(running, problems)
    if running.cell.variant == "carried":
        _went_on(running, problems)


def _samples_as_undisturbed(running: "Running", problems: list[str]) -> None:
    from infra.store.digests import sha256_of

    for step in range(running.num_steps):
        path = running.workspace / "runs" / running.run / f"steps/{step:06d}/samples.parquet"
        kept = running.session.folder / f"{running.cell.variant.replace(' ', '-')}-{step}.parquet"
        if running.cell.point == "undisturbed":
            shutil.copy(path, kept)
        if sha256_of(path) != sha256_of(kept):
            problems.append(f"the samples of step {step} are not those of an undisturbed run")


def _went_on(running: "Running", problems: list[str]) -> None:
    from infra.store.samples import read_samples, trajectory_of

    folders = [running.workspace / "runs" / running.run / f"steps/{step:06d}" for step in range(2)]
    on_record = [json.loads(line) for line in (folders[0] / "left_over.jsonl").read_text().splitlines()]
    turns = [line for line in on_record if "output_tokens" in line]
    if len(turns) != GROUP_SIZE * NUM_TURNS_STOPPED:
        problems.append(f"{len(turns)} turns were carried over, not {GROUP_SIZE * NUM_TURNS_STOPPED}")
    answers = [json.loads(line)["seed"] for line in (running.folder / "answers.jsonl").read_text().splitlines()]
    counts = collections.Counter(answers)
    if again := [turn["seed"] for turn in turns if counts[turn["seed"]] != 1]:
        problems.append(f"{len(again)} turns that were carried over were not sampled once")
    samples = [sample for sample in read_samples(folders[1] / "samples.parquet") if sample.num_older_tokens]
    adapters = [[s.adapter_version for s in trajectory_of(sample).segments if s.is_sampled] for sample in samples]
    if adapters != [[0, 0, 1]] * GROUP_SIZE:
        problems.append(f"turns of the episodes that went on have adapters {adapters}, not [0, 0, 1] each")
    num_episodes = running.config.data.num_prompts * GROUP_SIZE * running.num_steps
    keys = (running.folder / "noted.txt").read_text().splitlines()
    expected = num_episodes * NUM_TURNS + GROUP_SIZE * NUM_TURNS_STOPPED
    if (len(keys), len(set(keys))) != (expected, expected):
        problems.append(f"{len(keys)} effects were made, {len(set(keys))} of them different, not {expected}")
