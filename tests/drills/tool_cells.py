"""Cells that strike calls of tools: which, with what environment, and what must be true afterwards.

An episode has three turns. In each it calls `note`, which may not be called twice, and then `look`, which may. What it shows the model
depends on the answers alone, so that a tool's error changes no token. Each line of a file in the cell's folder is one time that it was done.
"""

import collections
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cell import Running
    from matrix import Cell

CALLING, NOTING, LOOKING = "roll_out.calling", "roll_out.noting", "roll_out.looking"
"""In the second turn of the first episode: before `note` is called; after its effect, before its result is on record; the same for `look`."""
PLAYING = "roll_out.playing"
SIGNALS = ("SIGKILL", "SIGTERM", "hang")
TOOLS: dict[tuple[str, str], tuple[str, ...]] = {
    **{("tool", fault): (NOTING, LOOKING) for fault in ("SIGKILL", "hang", "raise", "garbage")},
    ("tool", "exit 1"): (NOTING,),
    **{("reward worker", fault): (CALLING, NOTING, LOOKING) for fault in SIGNALS},
    **{("flow", fault): (CALLING, NOTING, LOOKING) for fault in ("SIGKILL", "hang")},
}
"""No SIGTERM of the flow: while it ends, its gateway may or may not take the result of the call, and either is right."""
SNAPSHOTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("engine", "SIGKILL"): (PLAYING,),
    ("flow", "SIGKILL"): (CALLING, PLAYING),
    ("reward worker", "SIGKILL"): (CALLING, PLAYING),
}
GIVES_ERROR = ("hang", "raise", "garbage")
"""Faults of a tool that are its result."""
NUM_TURNS = 3
VARIANTS = ("tools", "snapshots")
MADE = {"note": "noted", "look": "looked"}
"""Tool -> the file with the key of each call that was made."""
GAME = """import os, time
import points
from infra.environments.tools import call_key, tool

def count(name, word="x"):
    with open(os.environ["DRILL_FOLDER"] + f"/{{name}}.txt", "a") as stream:
        stream.write(word + "\\n")

def reach(point, turn):
    if turn == 2:
        points.reach(point)
    fault = points.ordered("tool")
    if fault == "SIGKILL":
        os.kill(os.getpid(), 9)
    if fault == "exit 1":
        os._exit(1)
    if fault:
        os.unlink(os.environ["DRILL_FOLDER"] + "/order.json")
    if fault == "hang":
        time.sleep(60)
    assert fault != "raise", "no seat"
    return {{1, 2}} if fault == "garbage" else "done"

@tool
def note(turn: int, said: str) -> str:
    "An effect that may be made once."
    count("noted", call_key())
    return reach("roll_out.noting", turn)

@tool(idempotent=True)
def look(turn: int, said: str) -> str:
    "Changes nothing."
    count("looked", call_key())
    return reach("roll_out.looking", turn)

class Game:
    restore = "{restore}"

    def reset(self, task):
        count("reset")
        self.turn = 0
        return task["question"]

    def step(self, action):
        count("stepped")
        self.turn += 1
        if self.turn == 2:
            points.reach("roll_out.calling")
        for call in (note, look):
            count("asked", call.name)
            call(turn=self.turn, said=action)
            count("served", call.name)
        return "%d letters" % len(action), len(action) % 7 / 7, self.turn == 3

    def snapshot(self):
        return {{"turn": self.turn}}

    def resume(self, state):
        self.turn = state["turn"]
"""


def environment_of(folder: Path, variant: str) -> dict[str, object]:
    """Write the game. Returns the section `environment`."""
    path = folder / "game.py"
    path.write_text(GAME.format(restore="snapshot" if variant == "snapshots" else "replay"))
    limits = {"tool_timeout_s": 2.0, "episode_timeout_s": 8.0}
    return {"name": f"{path}:Game", "workers": 1, "environment": ["DRILL_FOLDER"], **limits}


def ends_unknown(cell: "Cell") -> bool:
    """Whether the struck episode has made an effect of which no result is on record."""
    is_ended = cell.target != "tool" or cell.fault not in GIVES_ERROR
    return cell.point == NOTING and is_ended


class Calls(NamedTuple):
    """Calls of one tool in a cell, all attempts together."""

    asked: int
    """By episodes. One that is played again asks for its recorded calls again."""
    made: int
    """Times that the tool ran."""
    repeated: int
    """Of these, with a key that had been made before."""
    served: int
    """Results that episodes got: of the tool, or from the record."""


def calls_of(folder: Path) -> dict[str, Calls]:
    """By tool, from the files that the game writes into the cell's folder."""
    asked, served = (collections.Counter(_lines(folder / f"{name}.txt")) for name in ("asked", "served"))
    made = {name: _lines(folder / f"{path}.txt") for name, path in MADE.items()}
    return {name: Calls(asked[name], len(keys), len(keys) - len(set(keys)), served[name]) for name, keys in made.items()}


def after(running: "Running", problems: list[str]) -> None:
    """Each effect was made once, or its episode ended as `outcome unknown`; what changes nothing was repeated where it had no result."""
    cell = running.cell
    if cell.variant not in VARIANTS:
        return
    num_episodes = running.config.data.num_prompts * running.config.sampling.group_size
    all_turns = num_episodes * NUM_TURNS
    is_unknown, is_replaced = ends_unknown(cell), cell.point == LOOKING and cell.fault not in ("raise", "garbage")
    is_replaced &= cell.target != "tool" or cell.fault != "hang"
    expected = {"noted": all_turns - 1, "looked": all_turns - 2} if is_unknown else {"noted": all_turns, "looked": all_turns}
    expected["looked"] += is_replaced
    if cell.variant == "snapshots":
        expected |= {"reset": num_episodes, "stepped": all_turns + (cell.point == CALLING)}
    for name, number in expected.items():
        if (found := len(_lines(running.folder / f"{name}.txt"))) != number:
            problems.append(f"{name} {found} times, not {number}")
    problems += repetitions(calls_of(running.folder), num_looks=int(is_replaced))
    _samples(running, is_unknown, problems)
    if cell.target == "tool" and cell.fault in GIVES_ERROR:
        measures = json.loads((running.manifest.parent / "measures/roll_out.json").read_bytes())
        if measures["tool_errors"] != 1:
            problems.append(f"{measures['tool_errors']} errors of tools were counted, not 1")


def repetitions(calls: dict[str, Calls], num_looks: int) -> list[str]:
    """What is wrong where a call was made twice that may not be; num_looks: calls of `look` that had to be repeated."""
    expected = {"note": 0, "look": num_looks}
    return [
        f"{calls[name].repeated} calls of {name} were made twice, not {number}"
        for name, number in expected.items()
        if calls[name].repeated != number
    ]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _samples(running: "Running", is_unknown: bool, problems: list[str]) -> None:
    """All samples but that of an unknown outcome are those of the undisturbed step, with snapshots and without."""
    import shutil

    path, kept = running.manifest.parent / "samples.parquet", running.session.folder / "tools.parquet"
    if running.cell.point == "undisturbed":
        shutil.copy(path, kept)
    found, expected = _rows(path), _rows(kept)
    unjudged = [row[0] for row in found.values() if row[0]]
    if unjudged != ["outcome unknown"] * is_unknown:
        problems.append(f"unjudged episodes are {unjudged}, expected was {'one of unknown outcome' if is_unknown else 'none'}")
    if differing := [key for key, row in found.items() if not row[0] and row != expected.get(key)]:
        problems.append(f"samples {differing} are not those of the undisturbed step")


def _rows(path: Path) -> dict[tuple[int, int], tuple[object, ...]]:
    from infra.store.samples import read_samples

    return {
        (each.prompt_id, each.sample_index): (each.unjudged, each.reward, list(each.output_tokens), list(each.output_logprobs))
        for each in read_samples(path)
    }
