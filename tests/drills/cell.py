"""One cell: a step that is struck, run again as a user would, and what must be true afterwards.

prepare -> attempt 1 -> the point is reached -> strike -> attempt 1 ends -> attempt 2, if the step is not committed -> check -> stop -> check
"""

import contextlib
import json
import math
import os
import random
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import carried_cells
import checks
import far_cells
import forks
import in_flight_cells
import namespace
import node_cells
import shared_cells
import strike
import tool_cells
from attempts import Attempt, ByHand, OnAWorker
from judge_server import judge_server
from matrix import ALL_REAL, DELIVERING, JUDGING, PAYING, SCORING, Cell
from own_service import OwnService, is_own_service
from session import (
    HERE,
    PASSWORD,
    Grader,
    Session,
    await_answer,
    config_of,
    copy_store,
    digits_of,
    with_environment,
    with_judge,
    with_judge_adapter,
    with_judge_server,
    with_own_reward,
    with_reward_model,
    with_taskset,
    with_tools,
    write_interpreters,
)

from infra.settings import CHECKOUT

RANDOM_TARGETS = ("engine", "rank 0", "rank 1", "torchrun", "flow")
TRAINER = ("rank 0", "rank 1", "torchrun")
TRAINER_LIVES_S = 0.5
NEEDS_MLFLOW = ("mlflow", "delivery")
"""Targets for which there is a server; the other cells have a store in a file."""
ATTEMPT_LIMIT_S = 45.0
SLOW_ATTEMPT_LIMIT_S = 300.0
SLOW_VARIANTS = (*ALL_REAL, "tasksets", *node_cells.VARIANTS, *carried_cells.NUM_STEPS)
"""With real parts, or with a worker, a taskset or several steps of episodes, which start Python several times."""
OUTAGE_S = 1.5
"""So long Prefect's server is away, or misbehaves."""
SETTLED_S, SETTLE_LIMIT_S = 0.5, 20.0
"""In the middle of a rollout: answers that were delivered are taken in, so that none of them may be asked for again. So long nothing
new has come, and so long that is waited for: a machine may be busy."""
HANG_S = 1.0
"""A user who sees a flow process or a worker hang waits this long before ending it."""


class Outcome(NamedTuple):
    cell: str
    variant: str
    target: str
    fault: str
    problems: list[str]
    seconds: float
    attempt_s: float
    """Of the first attempt."""
    recover_s: float | None
    """From the strike to the commit; None where the step was committed before."""
    attempts: int
    struck: str
    """Whom, where and when, for people."""
    digest: str | None
    num_sampled_again: int
    """Samples that were delivered, and asked for once more."""
    calls: dict[str, dict[str, int]]
    """Tool -> how often it was asked for, made, repeated and served, where calls of tools are struck."""


class Running:
    """A cell while it runs; lane is the number of cells side by side with it."""

    def __init__(self, cell: Cell, session: Session, lane: int) -> None:
        self.cell, self.session, self.lane = cell, session, lane
        self.folder = session.folder / "cells" / f"{session.folder.name}-{str(cell).replace('/', '_').replace(' ', '-')}"
        self.workspace = self.folder / "workspace"
        is_slow = cell.variant in SLOW_VARIANTS or cell.target == "worker"
        self.limit_s = SLOW_ATTEMPT_LIMIT_S if is_slow else ATTEMPT_LIMIT_S
        self.limit_s *= self.num_steps
        self.needs_mlflow = cell.target in NEEDS_MLFLOW and cell.variant != "store"
        self.run = f"r{abs(hash(str(cell))) % 10**8}" if self.needs_mlflow else "r"
        self.config = config_of(session, cell.variant, self.run)
        self.port = session.first_port + 100 * (lane + 1)
        self.environment = self._environment()
        self.services = {cell.target: OwnService(self, cell.target)} if is_own_service(cell) else {}
        self.grader: Grader | None = None
        self.nodes: node_cells.Nodes | None = None
        self.judge = contextlib.ExitStack()
        self.judge_port = 0
        self.door: int | None = None
        self.is_door_gone = False
        self.attempt_s = 0.0
        self.struck_at: float | None = None
        self.settled_at: float | None = None
        """The latest time at which the journal was seen to hold all answers that the engine had delivered, in seconds since the epoch. None: the
        strike did not wait for that."""
        self.struck = ""
        self.restore: tuple[float, Callable[[], None]] | None = None

    def _environment(self) -> dict[str, str]:
        api_port, session = self.session.prefect_port, self.session
        environment = {
            "DRILL_FOLDER": str(self.folder),
            "RATCHET_PASS_ENVIRONMENT": '["DRILL_FOLDER"]',
            "PYTHONPATH": f"{CHECKOUT}:{HERE}",
            "RATCHET_WORKSPACE": str(self.workspace),
            "RATCHET_ENGINE_PORT": str(self.port + 10),
            "RATCHET_NUM_CPU_THREADS": "2",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "2",
            "PREFECT_HOME": str(session.home / "prefect-client"),
            "PREFECT_API_AUTH_STRING": PASSWORD,
            "RATCHET_PREFECT_AUTH": PASSWORD,
            "PREFECT_API_REQUEST_TIMEOUT": "3",
            "PREFECT_CLIENT_RETRY_JITTER_FACTOR": "0",
        }
        if self.cell.target == "prefect":
            api_port = self.port
        environment |= far_cells.environment_of(self)
        if self.needs_mlflow and self.cell.variant not in ALL_REAL:
            environment["RATCHET_MLFLOW_URI"] = f"http://127.0.0.1:{self.port}"
        return environment | {"PREFECT_API_URL": f"http://127.0.0.1:{api_port}/api"}

    def prepare(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.workspace.mkdir(parents=True)
        if self.cell.target == "disk":
            far_cells.mount_disk(self.workspace, self.cell.fault)
        is_cut = self.cell.fault in far_cells.CUT_S and self.cell.variant not in node_cells.VARIANTS
        if is_cut and (refusal := namespace.refusal()):
            raise far_cells.Refused(refusal)
        copy_store(self.session, self.workspace)
        if self.cell.point in (SCORING, JUDGING):
            self.config = with_own_reward(self.config, self.folder)
        if self.cell.variant in ("episodes", "episodes on replicas", "episodes ahead"):
            self.config = with_environment(self.config, self.folder)
        if self.cell.variant == "carried":
            self.config = carried_cells.with_waiting_episodes(self.config, self.folder, self.session.model)
        if self.cell.variant == "tasksets":
            self.config = with_taskset(self.config, self.folder)
        if self.cell.variant in tool_cells.VARIANTS:
            self.config = with_tools(self.config, self.folder, self.cell.variant)
        if self.cell.variant == "scored":
            self.config = with_reward_model(self.config, self.session.reward_model)
        if self.cell.variant == "judged":
            self.config = with_judge_adapter(self.config, self.session.judge_adapter)
        if self.cell.variant == shared_cells.VARIANT:
            self.config = shared_cells.with_reward(self.config)
        if self.cell.variant == "second judge":
            self.config = with_judge_server(self.config, self.session.model)
        if self.cell.point == PAYING:
            self.grader = Grader()
            self.open_judge()
            self.config = with_judge(self.config, f"http://127.0.0.1:{self.judge_port}/v1")
        (self.folder / "config.json").write_text(self.config.model_dump_json())
        plan = {"point": self.cell.point, "is_real": self.cell.variant in ALL_REAL, "replicas": self.config.engine.replicas}
        plan |= {"num_steps": self.num_steps, "is_cut": is_cut}
        plan |= {"holds_samples": self.cell.variant == in_flight_cells.BY_TIME}
        plan |= {"digits": digits_of(self.session.model)} if self.cell.variant == "judged" else {}
        (self.folder / "plan.json").write_text(json.dumps(plan))
        self.environment |= write_interpreters(self.folder, real=self.cell.variant in ALL_REAL)
        for service in self.services.values():
            service.start()
        if (self.cell.target == "prefect" or self.needs_mlflow or self.cell.variant == "store") and not self.services:
            self.open_door()
        if self.cell.variant in node_cells.VARIANTS:
            node_cells.prepare(self)

    # -- the strike

    def open_judge(self) -> None:
        assert self.grader
        url = self.judge.enter_context(judge_server(self.grader, self.judge_port)).url
        self.judge_port = int(url.removesuffix("/v1").rpartition(":")[2])

    def open_door(self) -> None:
        session = self.session
        upstream = session.prefect_port if self.cell.target == "prefect" else session.mlflow_port
        upstream, path = (session.store_port, "moto-api/") if self.cell.variant == "store" else (upstream, "health")

        def serve() -> int:
            import sys

            os.execv(sys.executable, [sys.executable, str(HERE / "door.py"), str(self.port), str(upstream)])

        self.is_door_gone = False
        self.door = forks.fork(serve, self.environment, self.folder / "door.log")
        await_answer(f"http://127.0.0.1:{self.port}/{'api/' if self.cell.target == 'prefect' else ''}{path}", 10)

    def strike(self, attempt: Attempt) -> None:
        """Commit the fault, at the point that was reached."""
        cell, fault = self.cell, self.cell.fault
        target = cell.target
        if cell.point in ("roll_out.middle", far_cells.WAITING, carried_cells.GOING_ON):
            self.await_settled()
        if target in self.services:
            self.services[target].kill()
        elif target in ("prefect", "mlflow", "store"):
            self._strike_door(fault)
        elif target in ("group file", "group mark"):
            far_cells.damage(self)
        elif target == "node":
            node_cells.strike(self)
        elif target == "disk":
            far_cells.strike_disk(self)
        elif fault in far_cells.CUT_S:
            self._cut(fault)
        elif target == "judge":
            self._strike_judge(fault)
        elif (cell.variant, fault) == (shared_cells.VARIANT, "garbage"):
            shared_cells.damage(self)
        else:
            pid = attempt.flow_pid() if target == "flow" else self.find(target)
            if pid is None:
                raise LookupError(f"no {target} lives at {cell.point}")
            if fault in strike.SIGNALS and target != "tool":
                strike.send(pid, fault)
            else:
                strike.order(self.folder, target, fault, pid)
        if (cell.variant, target, fault) == (shared_cells.VARIANT, "engine", "SIGKILL"):
            shared_cells.await_end_of_lender(self)
        if target == "prefect":
            self.restore = (time.monotonic() + OUTAGE_S, self.mend)
        self.struck_at = time.time()
        self.struck = f"{target} {fault} at {cell.point}"
        (self.folder / "go").touch()

    def find(self, target: str) -> int | None:
        """The pid of a target. Of several replicas: of the one that is at the point. A tool is called in the process that is at the point."""
        if (target == "engine" and self.cell.variant == "replicas") or target == "tool":
            return int(json.loads((self.folder / "at.json").read_bytes())["pid"])
        return strike.find(self.folder, target)

    def await_settled(self) -> None:
        """Every answer that the engine has delivered is in the journal."""
        counts, since, deadline = (-1, -1), time.monotonic(), time.monotonic() + SETTLE_LIMIT_S
        while time.monotonic() < deadline:
            looked_at = time.time()
            now = (
                far_cells.num_lines(self.folder / "answers.jsonl"),
                self.num_taken_in(),
            )
            is_taken_in = now[0] == now[1] or self.cell.variant in ALL_REAL  # the real engine counts nothing
            if now != counts:
                counts, since = now, time.monotonic()
                self.settled_at = looked_at if is_taken_in else None
            if is_taken_in and time.monotonic() - since > SETTLED_S:
                return
            time.sleep(0.02)

    def num_taken_in(self) -> int:
        count = carried_cells.num_taken_in if self.cell.variant == "carried" else far_cells.num_taken_in
        return count(self.workspace / "runs" / self.run, self.config)

    def _strike_door(self, fault: str) -> None:
        assert self.door
        if fault == "SIGKILL":
            strike.send(self.door, "SIGKILL")
            forks.wait(self.door, 5)
            self.is_door_gone = True
        else:
            strike.order(self.folder, "door", fault, self.door)

    def _cut(self, fault: str) -> None:
        """Take the link of the replica that is at the point away, for a while."""
        port = namespace.port_of(int(json.loads((self.folder / "at.json").read_bytes())["pid"]))
        namespace.set_link(port, "down")

        def restore() -> None:
            namespace.set_link(port, "up")
            self.restore = None

        self.restore = (time.monotonic() + far_cells.CUT_S[fault], restore)

    def _strike_judge(self, fault: str) -> None:
        assert self.grader
        self.grader.fault = fault
        if fault == "SIGKILL":
            self.judge.close()
        self.restore = (math.inf, self.mend)

    def mend(self) -> None:
        """The server is there again."""
        self.restore = None
        if self.grader and self.grader.fault == "SIGKILL":
            self.open_judge()
        if self.grader:
            self.grader.fault = None
        (self.folder / "order.json").unlink(missing_ok=True)
        for service in self.services.values():
            service.start()
        if self.is_door_gone:
            self.open_door()

    def strike_at_random(self, attempt: Attempt) -> None:
        """kill -9 at a moment that the seed decides, of a target that it decides: a trainer lives too short to be hit otherwise."""
        rng = random.Random(self.cell.point)
        undisturbed = self.session.undisturbed(self.cell.variant)
        assert undisturbed
        target = rng.choice(RANDOM_TARGETS)
        delay_s = rng.uniform(0, TRAINER_LIVES_S if target in TRAINER else undisturbed.attempt_s)
        lives_since: float | None = None
        while not attempt.is_over():
            pid, now = attempt.flow_pid() if target == "flow" else strike.find(self.folder, target), time.monotonic()
            lives_since = (lives_since or now) if pid else lives_since
            if pid and lives_since and now - lives_since >= delay_s:
                strike.send(pid, "SIGKILL")
                self.struck_at, self.struck = time.time(), f"{target} SIGKILL"
                return
            time.sleep(0.005)
        self.struck = "nobody SIGKILL"  # it was gone before its moment came

    # -- the course of a cell

    def is_committed(self) -> bool:
        return self.manifest.exists()

    @property
    def manifest(self) -> Path:
        """Of the last step."""
        return self.workspace / "runs" / self.run / f"steps/{self.num_steps - 1:06d}/manifest.json"

    @property
    def num_steps(self) -> int:
        return far_cells.num_steps(self.cell.variant)

    def await_point(self, attempt: Attempt) -> None:
        deadline = time.monotonic() + self.limit_s
        while not (self.folder / "at.json").exists():
            if attempt.is_over() and self.cell.point != DELIVERING:
                raise LookupError(f"{self.cell.point} was never reached: attempt 1 ended with {attempt.code}")
            if time.monotonic() > deadline:
                raise LookupError(f"{self.cell.point} was not reached in {self.limit_s:g} s")
            time.sleep(0.005)

    def await_end(self, attempt: Attempt) -> bool:
        """Whether the attempt ended by itself in time."""
        deadline = time.monotonic() + self.limit_s
        while not attempt.is_over():
            if self.restore and time.monotonic() > self.restore[0]:
                self.restore[1]()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def run_cell(cell: Cell, session: Session, lane: int) -> Outcome:
    """Run one cell from an empty workspace to its verdict; the workspace stays if it failed."""
    running, begin, problems, attempts = Running(cell, session, lane), time.monotonic(), [], 0
    try:
        running.prepare()
        attempts = _attempts(running, problems)
    except far_cells.Refused as refusal:
        return Outcome(
            str(cell),
            *cell[3:],
            *cell[1:3],
            [],
            round(time.monotonic() - begin, 2),
            0.0,
            None,
            0,
            f"skipped: {refusal}",
            None,
            0,
            {},
        )
    except LookupError as error:
        problems.append(str(error))
    except Exception as error:  # noqa: BLE001  # the drill's own mistakes fail their cell, not the others
        problems.append(f"the drill itself failed: {error!r}")
        traceback.print_exc()
    recover_s = None
    if running.struck_at and running.is_committed():
        recovered = running.manifest.stat().st_mtime - running.struck_at
        recover_s = round(recovered, 2) if recovered > 0 else None
    found = checks.after(running)
    running.judge.close()
    problems += found.problems
    if cell.target == "disk" and not problems:
        far_cells.unmount_disk(running.workspace)
    if not problems and not session.keeps:
        shutil.rmtree(running.folder)
    seconds = round(time.monotonic() - begin, 2)
    return Outcome(
        str(cell),
        cell.variant,
        cell.target,
        cell.fault,
        problems,
        seconds,
        running.attempt_s,
        recover_s,
        attempts,
        running.struck,
        found.digest,
        found.again,
        {name: calls._asdict() for name, calls in found.calls.items()},
    )


def _attempts(running: Running, problems: list[str]) -> int:
    """The attempts that a user makes: one, and another if the step is not committed. Gives their number."""
    start = OnAWorker if running.cell.target == "worker" else ByHand
    begin, first = time.monotonic(), start(running, 1)
    try:
        if running.cell.point.startswith("random-"):
            running.strike_at_random(first)
        elif running.cell.point != "undisturbed":
            running.await_point(first)
            running.strike(first)
        if running.cell.target in ("flow", "worker") and running.cell.fault == "hang":
            time.sleep(HANG_S)
            first.unstick()
        if not running.await_end(first):
            problems.append(f"attempt 1 did not end within {running.limit_s:g} s")
    finally:
        first.end()
        running.attempt_s = round(time.monotonic() - begin, 2)
        if running.restore:
            running.restore[1]()
    if running.is_committed():
        return 1
    far_cells.cure(running)
    node_cells.cure(running, problems)
    second = start(running, 2)
    try:
        if not running.await_end(second):
            problems.append(f"attempt 2 did not end within {running.limit_s:g} s")
        elif second.code != 0:
            problems.append(f"attempt 2 failed ({second.code}), see {second.log}")
    finally:
        second.end()
    return 2
