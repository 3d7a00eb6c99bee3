"""The drill's matrix: which fault strikes whom, where, and why the rest is left out.

A cell is addressed `<point>/<target>/<fault>[/<variant>]`, such as `roll_out.middle/engine/SIGKILL`.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import carried_cells
import far_cells
import in_flight_cells
import node_cells
from tool_cells import CALLING, LOOKING, NOTING, SNAPSHOTS, TOOLS

from infra.settings import settings

TASKS = (
    "open_step",
    "draw_prompts",
    "wake_engine",
    "roll_out",
    "score",
    "assemble",
    "release_memory",
    "train",
    "reload_adapter",
    "commit_step",
)
FAULTS = (
    "SIGKILL",
    "SIGTERM",
    "hang",
    "exit 1",
    "out of memory",
    "garbage",
    "HTTP 429",
    "HTTP 500",
    "HTTP 503",
    "reset",
    "raise",
    *far_cells.FAULTS,
)
TARGETS = (
    "engine",
    "rank 0",
    "rank 1",
    "torchrun",
    "flow",
    "worker",
    "delivery",
    "reward worker",
    "reward model",
    "judge",
    "tool",
    "judge server",
    "mlflow",
    "prefect",
    *far_cells.TARGETS,
)
"""delivery: the process that brings committed steps to MLflow, outside of any step. reward worker: calls a reward of a user's own. reward
model: the program that holds it. judge: the endpoint of a model that judges; SIGKILL: it is away and refuses, hang: it is slow,
both until the attempt has ended. tool: a call of a tool, in the worker that plays an episode. judge server: that of a second model that
judges, a twin of SGLang."""
Variant = Literal[
    "twins",
    "resident",
    "episodes",
    "tasksets",
    "tools",
    "snapshots",
    "replicas",
    "episodes on replicas",
    "scored",
    "judged",
    "second judge",
    "queue",
    "in flight",
    "in flight by time",
    "store",
    "carried",
    "episodes ahead",
    "nodes",
    "engine over nodes",
    "shared experts",
    "real",
]
"""twins: of SGLang and of a torchrun for each step; resident: the trainer stays between steps; episodes: samples are episodes of an
environment; tasksets: of a taskset of verifiers; tools: the same as episodes, and calls of tools are struck; snapshots: the same, which goes on
from its saved state; replicas: two twins of SGLang share the samples; episodes on replicas: they
share the turns of episodes; scored: a real reward model, tiny, gives the rewards; judged: an adapter
in the twin of SGLang gives them; second judge: a second model gives them in a server of its own; queue, store:
see far_cells.py; in flight: see in_flight_cells.py; carried, episodes ahead: see carried_cells.py;
nodes: two nodes of a Ray cluster share samples and ranks; engine over nodes: the same, where the engine is one server with a part on each node;
shared experts: see shared_cells.py, and everything is real; real: everything is real."""
ALL_REAL: tuple[Variant, ...] = ("real", "shared experts")
SAME_DIGEST: dict[Variant, Variant] = {
    "resident": "twins",
    "replicas": "twins",
    "snapshots": "tools",
    "episodes on replicas": "episodes",
    "nodes": "twins",
    "engine over nodes": "twins",
}
"""Variants that must make the adapter of another one."""

BOUNDARIES = (*(f"{task}.begin" for task in TASKS), "step.end")
DONE = tuple(f"{task}.done" for task in TASKS)
"""A task's work is there, and its result is not recorded yet: the boundary as seen from inside."""
MIDDLES = tuple(f"{task}.middle" for task in TASKS)
BETWEEN = ("wake_engine.launch", "roll_out.publish", "train.publish", "commit_step.delivery")
DELIVERING = "commit_step.delivering"
SCORING = "roll_out.scoring"
JUDGING = "score.judging"
PAYING = "score.paying"
PLAYING = "roll_out.playing"
MODEL_SCORING = "score.scoring"
JUDGE_LOADING = "ask_engine.loading"
ENGINE_JUDGING = "ask_engine.judging"
ASLEEP, ANSWERING = "ask_judge.asleep", "ask_judge.middle"
"""More than was asked for: before the engine listens; between the files that make samples or an adapter valid; before the delivery to
MLflow and in its middle; while reward workers are at work, beside the rollout or after it; after a third answer of a model that judges; in the
second turn of an episode, after others; before the third score of a reward model; where the engine gets the adapter that judges, and
before its third answer by it; before a judge's server wakes, and in the middle of its answers."""
POINTS = (*tuple(point for task in TASKS for point in (f"{task}.begin", f"{task}.middle", f"{task}.done")), "step.end")


class Cell(NamedTuple):
    point: str
    """Or `random/<seed>`, where target and moment are drawn."""
    target: str
    fault: str
    variant: Variant = "twins"

    def __str__(self) -> str:
        return "/".join(self if self.variant != "twins" else self[:3])


def between(first: str, last: str) -> tuple[str, ...]:
    """Points in the order in which a step meets them, both ends included."""
    return POINTS[POINTS.index(first) : POINTS.index(last) + 1]


ENGINE_LIVES = ("wake_engine.launch", "roll_out.publish", *between("wake_engine.middle", "step.end"))
ENGINE_IS_ASKED = ("wake_engine.middle", "roll_out.middle", "reload_adapter.middle")
TRAINER_STAYS = ("train.middle", "train.publish", *between("train.done", "step.end"))
EVERYWHERE = (*POINTS, *BETWEEN)
WORKER_POINTS = (
    "open_step.begin",
    "roll_out.middle",
    "train.begin",
    "train.middle",
    "reload_adapter.middle",
    "commit_step.middle",
)

MEANT: dict[tuple[str, str], tuple[str, ...]] = {
    ("engine", "SIGKILL"): ENGINE_LIVES,
    ("engine", "SIGTERM"): ENGINE_LIVES,
    ("engine", "hang"): ENGINE_LIVES,
    ("engine", "exit 1"): ENGINE_IS_ASKED,
    ("engine", "out of memory"): ENGINE_IS_ASKED,
    ("engine", "garbage"): ENGINE_IS_ASKED,
    ("engine", "HTTP 500"): ENGINE_IS_ASKED,
    ("engine", "HTTP 503"): ENGINE_IS_ASKED,
    ("engine", "reset"): ENGINE_IS_ASKED,
    **{
        (rank, fault): ("train.middle",)
        for rank in ("rank 0", "rank 1")
        for fault in ("SIGKILL", "SIGTERM", "hang", "exit 1", "out of memory")
    },
    ("rank 0", "garbage"): ("train.middle",),
    **{("torchrun", fault): ("train.middle",) for fault in ("SIGKILL", "SIGTERM", "hang")},
    ("flow", "SIGKILL"): (*EVERYWHERE, SCORING, JUDGING, PAYING),
    ("flow", "SIGTERM"): EVERYWHERE,
    ("flow", "hang"): EVERYWHERE,
    ("flow", "exit 1"): tuple(point for point in EVERYWHERE if point not in ("wake_engine.launch", "step.end")),
    ("flow", "out of memory"): (*BOUNDARIES[:-1], *DONE),
    **{("worker", fault): WORKER_POINTS for fault in ("SIGKILL", "SIGTERM", "hang")},
    **{("delivery", fault): (DELIVERING,) for fault in ("SIGKILL", "SIGTERM", "hang")},
    **{("reward worker", fault): (SCORING, JUDGING) for fault in ("SIGKILL", "SIGTERM", "hang")},
    **{("judge", fault): (PAYING,) for fault in ("SIGKILL", "hang", "garbage", "HTTP 429", "HTTP 500", "HTTP 503", "reset")},
    **{
        ("mlflow", fault): ("commit_step.delivery", DELIVERING)
        for fault in ("SIGKILL", "hang", "garbage", "HTTP 500", "HTTP 503", "reset")
    },
    **{("prefect", fault): EVERYWHERE for fault in ("SIGKILL", "hang")},
    **{("prefect", fault): BOUNDARIES[:-1] for fault in ("garbage", "HTTP 500", "HTTP 503", "reset")},
}
"""Who meets which fault at which points."""

RESIDENT: dict[tuple[str, str], tuple[str, ...]] = {
    (target, fault): TRAINER_STAYS for target in ("rank 0", "rank 1", "torchrun") for fault in ("SIGKILL", "SIGTERM", "hang")
}
"""The same for a trainer that stays: it can also be struck after its work."""

EPISODES: dict[tuple[str, str], tuple[str, ...]] = {
    **{("engine", fault): (PLAYING,) for fault in FAULTS if fault != "slow"},  # alone it only takes longer
    **{("flow", fault): (PLAYING,) for fault in ("SIGKILL", "SIGTERM", "hang", "exit 1")},
    **{("reward worker", fault): (PLAYING,) for fault in ("SIGKILL", "SIGTERM", "hang")},
}
"""The same while episodes are played: environments are in reward workers, the gateway is in the flow process."""

TASKSETS: dict[tuple[str, str], tuple[str, ...]] = {
    **{("engine", fault): (PLAYING,) for fault in ("SIGKILL", "hang", "garbage", "HTTP 500", "reset")},
    **{("flow", fault): (PLAYING,) for fault in ("SIGKILL", "SIGTERM", "hang", "exit 1")},
    **{("reward worker", fault): (PLAYING,) for fault in ("SIGKILL", "SIGTERM", "hang", "exit 1", "garbage", "raise")},
}
"""The same with a taskset of verifiers, whose program is the reward worker. Needs verifiers' own environment."""

REPLICAS: dict[tuple[str, str], tuple[str, ...]] = {
    **{("engine", fault): ("wake_engine.launch", *ENGINE_IS_ASKED) for fault in ("SIGKILL", "SIGTERM", "hang")},
    **{("engine", fault): ENGINE_IS_ASKED for fault in ("exit 1", "out of memory", "garbage", "HTTP 500", "HTTP 503", "reset")},
    **{("flow", fault): ("wake_engine.launch", *ENGINE_IS_ASKED, "roll_out.publish") for fault in ("SIGKILL", "SIGTERM", "hang")},
    **far_cells.SLOW_REPLICA,
}
"""The same with two replicas: the one that comes to the point first is struck, the other one lives."""

EPISODES_ON_REPLICAS: dict[tuple[str, str], tuple[str, ...]] = {
    **{("engine", fault): (PLAYING,) for fault in ("SIGKILL", "SIGTERM", "hang", "exit 1", "garbage", "HTTP 500", "reset")},
    **{("flow", fault): (PLAYING,) for fault in ("SIGKILL", "SIGTERM", "hang")},
    ("reward worker", "SIGKILL"): (PLAYING,),
}
"""The same while episodes are played: the other replica makes the turns, and the struck one is started again."""

SCORED: dict[tuple[str, str], tuple[str, ...]] = {
    (target, fault): (MODEL_SCORING,) for target in ("flow", "reward model") for fault in ("SIGKILL", "SIGTERM", "hang")
}
"""The same while a reward model scores."""

JUDGED: dict[tuple[str, str], tuple[str, ...]] = {
    **{("engine", fault): (JUDGE_LOADING, ENGINE_JUDGING) for fault in ("SIGKILL", "SIGTERM", "hang", "garbage")},
    **{("flow", fault): (JUDGE_LOADING, ENGINE_JUDGING) for fault in ("SIGKILL", "SIGTERM", "hang")},
}
"""The same while an adapter judges. garbage where it is loaded: the engine serves another one under its name."""
JUDGED_IN_TURN: dict[tuple[str, str], tuple[str, ...]] = {
    **{(target, fault): (ASLEEP, ANSWERING) for target in ("flow", "judge server") for fault in ("SIGKILL", "SIGTERM", "hang")},
    **{("judge server", fault): (ASLEEP, ANSWERING) for fault in ("garbage", "HTTP 500")},
}
"""The same with a second model that judges. Garbage in its sleep: it wakes with other weights."""

LEFT_OUT: dict[tuple[str, str], str] = {
    **{
        (target, fault): "only in the queue of rollouts ahead, at the store, of a replica, or on a cluster: see far_cells.py"
        for target in TARGETS
        for fault in FAULTS
        if target in far_cells.TARGETS or fault in far_cells.FAULTS
    },
    **{(target, "HTTP 429"): "HTTP 429 (too many requests) comes from judges only" for target in TARGETS},
    **{(target, "raise"): "this fault is an error raised by code of a user: a tool, a taskset" for target in TARGETS},
    **{("tool", fault): "it is called while episodes are played only" for fault in FAULTS},
    **{
        ("judge", fault): "it is asked in score only; every other way to end a server leaves the same behind as SIGKILL"
        for fault in FAULTS
    },
    **{("engine", fault): "it lives from wake_engine on" for fault in ("SIGKILL", "SIGTERM", "hang")},
    **{
        ("engine", fault): "a wrong answer or an error can only be met where the engine is asked"
        for fault in ("exit 1", "out of memory", "garbage", "HTTP 500", "HTTP 503", "reset")
    },
    **{
        (rank, fault): "the trainer lives in train only; a resident one is struck after it too"
        for rank in ("rank 0", "rank 1", "torchrun")
        for fault in ("SIGKILL", "SIGTERM", "hang")
    },
    **{
        (rank, fault): "the trainer lives in train only" for rank in ("rank 0", "rank 1") for fault in ("exit 1", "out of memory")
    },
    ("rank 0", "garbage"): "the result is written in train",
    ("rank 1", "garbage"): "only rank 0 writes a result",
    ("torchrun", "exit 1"): "what torchrun does when a rank ends is struck at the ranks",
    ("torchrun", "out of memory"): "torchrun holds no data",
    ("torchrun", "garbage"): "torchrun gives no answers that could be wrong",
    **{
        (target, fault): "no HTTP server"
        for target in ("rank 0", "rank 1", "torchrun", "flow", "worker", "delivery")
        for fault in ("HTTP 500", "HTTP 503", "reset")
    },
    ("flow", "exit 1"): "at these points the flow process waits for somebody else, or has nothing left to do",
    ("flow", "out of memory"): "an allocation fails where the flow process computes: at the begin and the end of each task",
    ("flow", "garbage"): "a flow gives no answers that could be wrong",
    **{
        ("worker", fault): "a worker holds no state of a step: six points; each cell takes half a minute"
        for fault in ("SIGKILL", "SIGTERM", "hang")
    },
    **{("delivery", fault): "it lives after the step" for fault in ("SIGKILL", "SIGTERM", "hang")},
    **{("delivery", fault): "it leaves the same behind as SIGTERM" for fault in ("exit 1", "out of memory")},
    ("delivery", "garbage"): "a delivery gives no answers that could be wrong",
    **{
        (
            "reward worker",
            fault,
        ): "it works where samples are scored only; what a reward itself may do is in tests/infra/rewards/test_hostile.py"
        for fault in FAULTS
    },
    **{
        ("reward model", fault): "it works in score only; its memory and its answers are in tests/tasks/test_reward_model.py"
        for fault in FAULTS
    },
    **{("judge server", fault): "it is there in a run that such a server judges" for fault in FAULTS},
    ("worker", "exit 1"): "it leaves the same behind as SIGTERM",
    ("worker", "out of memory"): "a worker holds no data; the kernel's out-of-memory killer sends SIGKILL",
    ("worker", "garbage"): "a worker gives no answers that could be wrong",
    **{
        ("mlflow", fault): "MLflow is not asked before the delivery"
        for fault in ("SIGKILL", "hang", "garbage", "HTTP 500", "HTTP 503", "reset")
    },
    ("mlflow", "SIGTERM"): "every other way to end a server leaves the same behind as SIGKILL",
    ("mlflow", "exit 1"): "every other way to end a server leaves the same behind as SIGKILL",
    ("mlflow", "out of memory"): "every other way to end a server leaves the same behind as SIGKILL",
    ("prefect", "SIGTERM"): "every other way to end a server leaves the same behind as SIGKILL",
    ("prefect", "exit 1"): "every other way to end a server leaves the same behind as SIGKILL",
    ("prefect", "out of memory"): "every other way to end a server leaves the same behind as SIGKILL",
    **{
        ("prefect", fault): "Prefect is asked between the tasks"
        for fault in ("SIGKILL", "hang", "garbage", "HTTP 500", "HTTP 503", "reset")
    },
}
"""Why a pair meets at no more points than it does."""

REAL = (
    Cell("wake_engine.middle", "engine", "SIGKILL", "real"),
    Cell("roll_out.middle", "engine", "SIGKILL", "real"),
    Cell("roll_out.middle", "engine", "hang", "real"),
    Cell("reload_adapter.middle", "engine", "SIGTERM", "real"),
    Cell("train.middle", "rank 0", "SIGKILL", "real"),
    Cell("train.middle", "rank 1", "SIGKILL", "real"),
    Cell("train.middle", "rank 1", "hang", "real"),
    Cell("train.middle", "torchrun", "SIGKILL", "real"),
    Cell("train.middle", "torchrun", "SIGTERM", "real"),
    Cell("roll_out.middle", "flow", "SIGKILL", "real"),
    Cell("train.middle", "flow", "SIGKILL", "real"),
    Cell("train.publish", "flow", "SIGTERM", "real"),
    Cell("train.middle", "worker", "SIGKILL", "real"),
    Cell("commit_step.delivery", "mlflow", "SIGKILL", "real"),
    Cell("train.begin", "prefect", "SIGKILL", "real"),
    Cell("train.middle", "engine", "SIGKILL", "shared experts"),
    Cell("train.middle", "rank 0", "SIGKILL", "shared experts"),
    Cell("train.middle", "flow", "SIGKILL", "shared experts"),
    Cell("train.middle", "engine", "garbage", "shared experts"),
)
SAMPLE = (
    Cell("wake_engine.launch", "engine", "SIGKILL"),
    Cell("roll_out.middle", "engine", "SIGKILL"),
    Cell("roll_out.middle", "engine", "HTTP 500"),
    Cell("reload_adapter.middle", "engine", "garbage"),
    Cell("train.middle", "rank 0", "out of memory"),
    Cell("train.middle", "torchrun", "SIGKILL"),
    Cell("reload_adapter.begin", "torchrun", "SIGKILL", "resident"),
    Cell("roll_out.done", "flow", "SIGKILL"),
    Cell("train.publish", "flow", "SIGTERM"),
    Cell("commit_step.middle", "flow", "exit 1"),
    Cell("score.begin", "prefect", "SIGKILL"),
    Cell("score.paying", "flow", "SIGKILL"),
    Cell("score.paying", "judge", "SIGKILL"),
    Cell("score.judging", "reward worker", "hang"),
    Cell("roll_out.playing", "flow", "SIGKILL", "episodes"),
    Cell("roll_out.noting", "tool", "SIGKILL", "tools"),
    Cell("roll_out.looking", "flow", "SIGKILL", "tools"),
    Cell("roll_out.playing", "flow", "SIGKILL", "snapshots"),
    Cell("roll_out.middle", "engine", "SIGKILL", "replicas"),
    Cell("roll_out.playing", "engine", "SIGKILL", "episodes on replicas"),
    Cell("roll_out.middle", "engine", "slow", "replicas"),
    Cell(far_cells.WAITING, "flow", "SIGKILL", "queue"),
    Cell(in_flight_cells.AWAITING, "engine", "SIGKILL", "in flight"),
    Cell(far_cells.COPYING, "flow", "SIGKILL", "store"),
    Cell(carried_cells.GOING_ON, "flow", "SIGKILL", "carried"),
    Cell("score.scoring", "reward model", "SIGKILL", "scored"),
    Cell("ask_engine.judging", "flow", "SIGKILL", "judged"),
    Cell(ANSWERING, "judge server", "SIGKILL", "second judge"),
    Cell("commit_step.delivering", "mlflow", "SIGKILL"),
)
"""For the test command: a cell or two for each part of a step; 8 minutes on 2 cores."""
NUM_RANDOM = 100
VARIANTS: dict[Variant, dict[tuple[str, str], tuple[str, ...]]] = {
    "twins": MEANT,
    "resident": RESIDENT,
    "episodes": EPISODES,
    "tasksets": TASKSETS if settings().verifiers_python.exists() else {},
    "tools": TOOLS,
    "snapshots": SNAPSHOTS,
    "replicas": REPLICAS,
    "episodes on replicas": EPISODES_ON_REPLICAS,
    "scored": SCORED,
    "judged": JUDGED,
    "second judge": JUDGED_IN_TURN,
    "queue": far_cells.QUEUE,
    "in flight": in_flight_cells.IN_FLIGHT,
    "in flight by time": in_flight_cells.IN_FLIGHT,
    "store": far_cells.STORE,
    "carried": carried_cells.CARRIED,
    "episodes ahead": carried_cells.AHEAD,
    "nodes": node_cells.NODES,
    node_cells.SPREAD: node_cells.ENGINE_OVER_NODES,
}


def matrix() -> list[Cell]:
    """All cells that mean something, with twins, in the order of a step."""
    return sorted(
        [cell for variant, meant in VARIANTS.items() for cell in _cells(meant, variant)],
        key=lambda cell: (cell.target == "worker", *_place(cell)),
    )


def random_cells(count: int) -> list[Cell]:
    """kill -9 of a random target at a random moment, by seed."""
    return [Cell(f"random-{seed}", "any", "SIGKILL") for seed in range(count)]


def _cells(meant: dict[tuple[str, str], tuple[str, ...]], variant: Variant) -> Iterator[Cell]:
    for (target, fault), points in meant.items():
        for point in points:
            yield Cell(point, target, fault, variant)


ORDERED = (
    *(*EVERYWHERE, DELIVERING, SCORING, JUDGING, PAYING, PLAYING),
    *(CALLING, NOTING, LOOKING, MODEL_SCORING, JUDGE_LOADING, ENGINE_JUDGING, ASLEEP, ANSWERING),
    *(*far_cells.POINTS, *in_flight_cells.POINTS, *carried_cells.POINTS),
)


def _place(cell: Cell) -> tuple[int, int, int]:
    return (
        ORDERED.index(cell.point),
        TARGETS.index(cell.target),
        FAULTS.index(cell.fault),
    )


def num_left_out() -> dict[str, int]:
    """Reason -> cells of faults x targets x points that mean nothing, or that are not made."""
    counts: dict[str, int] = {}
    for target in TARGETS:
        for fault in FAULTS:
            missing = len(POINTS) - sum(point in POINTS for point in MEANT.get((target, fault), ()))
            if missing:
                reason = f"{target}: {LEFT_OUT[target, fault]}"
                counts[reason] = counts.get(reason, 0) + missing
    return counts


def cell_of(address: str) -> Cell:
    """Raises ValueError for an address that names no cell."""
    if address.startswith("random-"):
        return Cell(address.split("/")[0], "any", "SIGKILL")
    for cell in (*matrix(), *REAL):
        if str(cell) == address:
            return cell
    raise ValueError(f"cell {address!r} is not in the matrix; an address is such as {SAMPLE[1]} or random-17")


def table(rows: Iterable[str] = TARGETS) -> str:
    """The matrix as Markdown: at how many points each fault strikes each target."""
    lines = ["| target | " + " | ".join(FAULTS) + " |", "|--|" + "--:|" * len(FAULTS)]
    for target in rows:
        counts = [sum(len(cells.get((target, fault), ())) for cells in VARIANTS.values()) for fault in FAULTS]
        lines.append(f"| {target} | " + " | ".join(str(count or "-") for count in counts) + " |")
    return "\n".join(lines)
