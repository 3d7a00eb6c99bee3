"""What must be true after a cell, whatever was struck: see the list in `after`."""

import collections
import fcntl
import json
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import carried_cells
import far_cells
import forks
import in_flight_cells
import node_cells
import shared_cells
import strike
import tool_cells
from matrix import ALL_REAL
from session import NUM_TURNS

if TYPE_CHECKING:
    from cell import Running

EPISODES = ("episodes", "episodes on replicas", "episodes ahead")
STOP_LIMIT_S = 40.0
DELIVERY_S = 40.0
"""So long the delivery of a step may take."""
ENDED_S = 10.0
"""So long a process that was ended may take to be gone: a machine may be busy."""
SHORT_DELIVERY_S = 3.0
"""Where it was struck, nobody waits for its own next try, which comes after ten seconds."""


class Found(NamedTuple):
    problems: list[str]
    digest: str | None
    again: int
    calls: dict[str, tool_cells.Calls]
    """By tool, where calls of tools are struck."""


def after(running: "Running") -> Found:
    """The step is committed once, with the adapter of an undisturbed run; nothing was counted twice; nothing is left."""
    problems: list[str] = []
    digest, again = None, 0
    if not running.is_committed():
        problems.append("the step is not committed")
    else:
        digest = _adapter(running, problems)
        _samples(running, problems)
        again = num_sampled_again(running.folder, running.struck_at, running.settled_at)
        # A wrong answer costs the whole rollout; a random kill may hit answers that are just being taken in.
        is_lost = running.cell.fault == "garbage" or far_cells.samples_again(running.cell)
        if again and not is_lost and running.cell.target != "any":
            problems.append(f"{again} samples that had been delivered were generated again")
        _paid_once(running, problems)
        _made_once(running, problems)
        tool_cells.after(running, problems)
        carried_cells.after(running, problems)
        _trained_once(running, problems)
        _deliver(running, problems)
        far_cells.after(running, problems)
        if running.cell.variant == shared_cells.VARIANT:
            shared_cells.after(running, problems)
    node_cells.after(running, problems)
    _nothing_left(running, problems)
    calls = tool_cells.calls_of(running.folder) if running.cell.variant in tool_cells.VARIANTS else {}
    return Found(problems, digest, again, calls)


def _adapter(running: "Running", problems: list[str]) -> str:
    runs = running.workspace / "runs" / running.run
    last = running.num_steps
    report = json.loads((running.manifest.parent / "report.json").read_bytes())["adapter"]
    digest: str = report["weights"]["sha256"]
    expected = running.session.undisturbed(running.cell.variant)
    may_differ = tool_cells.ends_unknown(running.cell) or running.cell.variant == in_flight_cells.BY_TIME
    may_differ = may_differ or bool(_num_unknown(running))
    if expected and expected.digest != digest and not may_differ:
        problems.append(f"the adapter is {digest}, an undisturbed run's is {expected.digest}")
    if (report["version"], report["num_optimizer_steps"]) != (last, last):
        problems.append(
            f"adapter version {report['version']} after {report['num_optimizer_steps']} optimizer steps, not {last} after {last}"
        )
    from infra.store.digests import sha256_of

    versions = sorted(path.name for path in (runs / "adapters").glob("*"))
    expected_versions = [f"{version:06d}" for version in range(1, last + 1)]
    if versions != expected_versions or sha256_of(runs / f"adapters/{last:06d}/adapter_model.safetensors") != digest:
        problems.append(f"adapters {versions}: the committed one is not there as committed, or not alone")
    steps = sorted(path.name for path in (runs / "steps").glob("*"))
    if steps != [f"{step:06d}" for step in range(last)]:
        problems.append(f"steps {steps} were begun, {last} were asked for")
    return digest


def _samples(running: "Running", problems: list[str]) -> None:
    import pyarrow.parquet as pq

    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for path in running.manifest.parent.parent.glob("*/samples.parquet"):
        table = pq.read_table(path, columns=["prompt_id", "sample_index"]).to_pydict()
        counts.update(zip(table["prompt_id"], table["sample_index"], strict=True))
    expected = running.config.data.num_prompts * running.config.sampling.group_size * running.num_steps
    if len(counts) != expected or max(counts.values()) != 1:
        problems.append(f"{counts.total()} samples of {len(counts)} kinds, not {expected} once each")


def _paid_once(running: "Running", problems: list[str]) -> None:
    """The judge gave one sound answer for each sample, none of them twice; no request was under way at the strike."""
    if (grader := running.grader) is None:
        return
    if repeated := len(grader.graded) - len(set(grader.graded)):
        problems.append(f"{repeated} judgements that were paid were asked for again")
    if not grader.graded:
        problems.append("the judge got no request")
    if running.cell.target == "judge" and not grader.num_faulty and running.cell.fault != "SIGKILL":
        problems.append("no request met the judge's fault")


def _num_unknown(running: "Running") -> int:
    """Episodes that end as `outcome unknown`: where the flow process is ended while the worker calls a tool, what the call did is not known."""
    from infra.store.samples import read_samples

    if running.cell.variant not in EPISODES or running.cell.target != "flow":
        return 0
    samples = (each for path in running.manifest.parent.parent.glob("*/samples.parquet") for each in read_samples(path))
    return sum(each.unjudged == "outcome unknown" for each in samples)


def _made_once(running: "Running", problems: list[str]) -> None:
    """Each turn of each episode called its tool, none of them twice; an episode whose outcome is unknown has ended before its last turn."""
    if running.cell.variant not in EPISODES:
        return
    path = running.folder / "effects.txt"
    num_effects = len(path.read_text().splitlines()) if path.exists() else 0
    expected = running.config.data.num_prompts * running.config.sampling.group_size * running.num_steps * NUM_TURNS
    num_unknown = _num_unknown(running)
    if num_unknown > 1:
        problems.append(f"{num_unknown} episodes are of unknown outcome: one is played at a time")
    if not expected - NUM_TURNS * num_unknown <= num_effects <= expected:
        problems.append(f"{num_effects} effects were made, not {expected}; {num_unknown} episodes are of unknown outcome")


def _trained_once(running: "Running", problems: list[str]) -> None:
    """The trainer's twin did its job once, wherever its result was whole before the strike, or not begun."""
    path = running.folder / "trained.jsonl"
    is_twin, is_known = running.cell.variant not in ALL_REAL, running.cell.target != "any"
    # While a replica waits for its strike, another one makes its samples, and the step goes on.
    is_training = running.cell.point in ("train.middle", "train.publish") or running.cell.variant in (
        *("queue", "episodes ahead", "replicas"),
        *in_flight_cells.VARIANTS,
    )
    if is_twin and is_known and not is_training:
        count = len(path.read_text().splitlines()) if path.exists() else 0
        if count != running.num_steps:
            problems.append(f"the trainer did its job {count} times")


def num_sampled_again(cell: Path, struck_at: float | None, settled_at: float | None) -> int:
    """Count the samples that were on disk when a process was killed, and that the engine was asked for again afterwards.

    settled_at: The latest time at which the journal held all answers; see Running.settled_at. Answers between then and the strike do not count:
    on a busy machine the process may be killed before it has written them.
    """
    path = cell / "answers.jsonl"
    answers = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if struck_at is None:
        return sum(count - 1 for count in collections.Counter(answer["seed"] for answer in answers).values())
    before = {answer["seed"] for answer in answers if answer["at"] < (settled_at or struck_at)}
    return sum(answer["seed"] in before for answer in answers if answer["asked_at"] > struck_at)


def _deliver(running: "Running", problems: list[str]) -> None:
    """What MLflow missed comes with the next delivery, if the one that the step began does not get through; and everything is there once."""
    running.mend()
    all_once = (1, running.num_steps, running.num_steps)
    is_struck = running.cell.target in ("mlflow", "delivery", "store")
    deadline = time.monotonic() + (SHORT_DELIVERY_S if is_struck else DELIVERY_S)
    while (
        (_rows(running) != all_once or not _is_copied(running))
        and strike.find(running.folder, "delivery")
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    if _rows(running) != all_once or not _is_copied(running):
        _stop(running, problems)

        def deliver() -> int:
            from infra.tracking import upload

            upload.deliver_all()
            return 0

        forks.wait(forks.fork(deliver, running.environment, running.folder / "deliver.log"), DELIVERY_S)
    if (rows := _rows(running)) != all_once:
        problems.append(f"MLflow has {rows} runs, rows of reward/mean and model versions, not {all_once}")


def _is_copied(running: "Running") -> bool:
    """Whether the store has all of the run, as this machine knows it; where there is one."""
    if running.cell.variant != "store":
        return True
    path = running.workspace / "runs" / running.run / "copied.json"
    parts = json.loads(path.read_bytes())["parts"] if path.exists() else {}
    return f"step-{running.num_steps - 1:06d}" in parts and "report" in parts


def _rows(running: "Running") -> tuple[int, int, int]:
    """Runs, rows of one metric, versions of the adapter."""
    is_shared = running.needs_mlflow and not running.services
    workspace = running.session.home if is_shared else running.workspace
    with sqlite3.connect(f"file:{workspace}/mlflow/mlflow.db?mode=ro", uri=True) as store:
        name = (running.run,)
        runs = store.execute("SELECT count(*) FROM runs WHERE name = ? AND lifecycle_stage = 'active'", name).fetchone()[0]
        query = "SELECT count(*) FROM metrics JOIN runs USING (run_uuid) WHERE name = ? AND key = 'reward/mean' AND lifecycle_stage = 'active'"
        metrics = store.execute(query, name).fetchone()[0]
        versions = store.execute(
            "SELECT count(*) FROM model_versions WHERE name = ? AND current_stage != 'Deleted_Internal'", name
        ).fetchone()[0]
    return runs, metrics, versions


def _stop(running: "Running", problems: list[str]) -> None:
    """The user's `--stop`."""

    def stop() -> int:
        from flows.cli.services.servers import stop

        stop()
        return 0

    stopping = forks.fork(stop, running.environment, running.folder / "stop.log")
    if forks.wait(stopping, STOP_LIMIT_S) != 0:
        problems.append(f"stop failed, see {running.folder}/stop.log")


def _nothing_left(running: "Running", problems: list[str]) -> None:
    """After `--stop`: no process with the cell's mark, no lock that is held."""
    _stop(running, problems)
    if running.door:
        strike.send(running.door, "SIGKILL")
        forks.wait(running.door, 5)
    if alive := strike.left_after(running.folder, ENDED_S):
        problems.append(f"left behind: {'; '.join(alive)}")
        for line in alive:
            strike.send(int(line.split()[0]), "SIGKILL")
    if held := [str(path) for path in running.workspace.glob("locks/**/*") if path.is_file() and _is_locked(path)]:
        problems.append(f"locks are still held: {', '.join(held)}")


def _is_locked(path: Path) -> bool:
    with path.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
