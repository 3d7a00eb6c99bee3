"""The user's command, once: a flow process that we fork, or a run of a deployment on a real worker."""

import base64
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import forks
import strike
from session import HERE, PASSWORD

if TYPE_CHECKING:
    from cell import Running

FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
AUTHORIZATION = f"Basic {base64.b64encode(PASSWORD.encode()).decode()}"
SUBMIT_LIMIT_S = 90.0


class Attempt(Protocol):
    log: Path
    code: int | None

    def flow_pid(self) -> int | None:
        """Of the process that runs the flow, while it lives."""

    def is_over(self) -> bool: ...

    def unstick(self) -> None:
        """What a user does about something that hangs: kill -9."""

    def end(self) -> None:
        """Whatever is left of it."""


class ByHand:
    def __init__(self, running: "Running", number: int) -> None:
        self.log = running.folder / f"attempt-{number}.log"
        self.code: int | None = None
        config = running.folder / "config.json"

        def make_step() -> int:
            import flow_program

            return flow_program.main(config)

        self.pid = forks.fork(make_step, running.environment, self.log)

    def flow_pid(self) -> int | None:
        return None if self.is_over() else self.pid

    def is_over(self) -> bool:
        if self.code is None:
            self.code = forks.exit_code(self.pid)
        return self.code is not None

    def unstick(self) -> None:
        self.end()

    def end(self) -> None:
        if not self.is_over():
            strike.send(self.pid, "SIGKILL")
            while not self.is_over():
                time.sleep(0.01)


class OnAWorker:
    """A worker that is gone is started again, as a user would, before the run is asked for."""

    def __init__(self, running: "Running", number: int) -> None:
        self.log, self.folder = running.folder / f"attempt-{number}.log", running.folder
        self.code: int | None = None
        self.api_url = running.environment["PREFECT_API_URL"]
        name = "rl_run" if running.num_steps > 1 else "rl_step"
        pool, answer = f"drill-{name}-{running.lane}", running.folder / f"flow-run-{number}.json"
        _deploy_once(running, pool, name)
        environment = running.environment | {"DRILL_WORKER": "1"}
        config = json.loads((running.folder / "config.json").read_bytes())
        submitting = forks.fork(lambda: _submit(name, pool, self.api_url, config, answer), environment, self.log)
        if forks.wait(submitting, SUBMIT_LIMIT_S) != 0:
            raise LookupError(f"no run could be asked for, see {self.log}")
        self.run_id = json.loads(answer.read_text())
        self.has_begun = False

    def flow_pid(self) -> int | None:
        return strike.find(self.folder, "flow")

    def is_over(self) -> bool:
        """The run is in a final state, or its process has come and gone: a dead worker reports nothing."""
        if self.code is None:
            state = self._state()
            is_alive = self.flow_pid() is not None
            self.has_begun |= is_alive
            if state in FINAL or (self.has_begun and not is_alive and strike.find(self.folder, "worker") is None):
                self.code = 0 if state == "COMPLETED" else 1
        return self.code is not None

    def unstick(self) -> None:
        if (worker := strike.find(self.folder, "worker")) and strike.is_stopped(worker):
            strike.send(worker, "SIGKILL")

    def end(self) -> None:
        """Its process, and the run's record, so that no later worker takes it up."""
        if self.code is None and (pid := self.flow_pid()):
            strike.send(pid, "SIGKILL")
        self._call("DELETE", f"/flow_runs/{self.run_id}")

    def _state(self) -> str:
        found = self._call("GET", f"/flow_runs/{self.run_id}")
        return str((found.get("state") or {}).get("type"))

    def _call(self, method: str, path: str) -> dict[str, Any]:
        request = urllib.request.Request(self.api_url + path, method=method, headers={"Authorization": AUTHORIZATION})
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                content: dict[str, Any] = json.loads(response.read() or b"{}")
                return content
        except OSError:  # already deleted, or the server is busy: asked again at the next look
            return {}


def _deploy_once(running: "Running", pool: str, name: str) -> None:
    done = running.session.folder / f"deployed-{pool}"
    if done.exists():
        return

    def deploy() -> int:
        import subprocess

        import flows.run
        import flows.step
        from infra.settings import CHECKOUT

        flow = getattr(flows.run if name == "rl_run" else flows.step, name)

        command = [sys.executable, "-m", "prefect", "work-pool", "create", pool, "--type", "process", "--overwrite"]
        subprocess.run(command, check=True)
        entrypoint = f"{(HERE / 'flow_program.py').relative_to(CHECKOUT)}:{name}"
        found = flow.from_source(source=str(CHECKOUT), entrypoint=entrypoint)
        found.deploy(name=pool, work_pool_name=pool, build=False, push=False, print_next_steps=False)  # type: ignore[union-attr]
        return 0

    environment = {name: value for name, value in running.environment.items() if name != "DRILL_FOLDER"}
    log = running.session.folder / f"deploy-{pool}.log"
    if forks.wait(forks.fork(deploy, environment, log), SUBMIT_LIMIT_S) != 0:
        raise LookupError(f"the deployment could not be made, see {log}")
    done.touch()


def _submit(name: str, pool: str, api_url: str, config: dict[str, Any], answer: Path) -> int:
    from prefect.deployments import run_deployment

    from infra.services import deployments, servers

    deployments.WORK_POOL = pool
    servers.ensure_worker(api_url)
    flow_run = run_deployment(f"{name.replace('_', '-')}/{pool}", parameters={"config": config}, timeout=0, as_subflow=False)
    partial = answer.with_suffix(".partial")
    partial.write_text(json.dumps(str(flow_run.id)))  # type: ignore[union-attr]
    partial.rename(answer)
    return 0
