"""Effective training time of a real run: its seconds undisturbed, over those of the same run with one failure in every tenth step.

    .venv/bin/python tests/benches/effective_time.py [--steps 40] [--workspace FOLDER] [--save OUT.json]

Real parts on a CPU: preset smoke, made by the deployment rl-run/local on a worker. SIGKILL goes in turn to engine, trainer (rank 0), flow process
and worker, each at a random moment of its step. What is gone is started again as docs/operations.md says: `ratchet up`, then the same run again,
without delay. Seconds count from the first request for the run to the commit of its last step. Both runs must make equal adapters.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "drills"))
import points
import strike

TARGETS = {"engine": "engine", "trainer": "rank 0", "flow": "flow", "worker": "worker"}
"""Who is struck, by their names in the drills."""
POLL_S = 0.1
NUM_LOOKS = 10
"""Looks without a flow process after which it counts as gone: between two of Prefect's programs there may be none."""
LIMIT_S = 4 * 3600.0


class Strike(NamedTuple):
    target: str
    step: int
    moment: float
    """Share of a step's seconds after the last commit."""


def strikes_of(num_steps: int, seed: int = 0) -> list[Strike]:
    """A failure in each ten steps, the targets in turn; in a run of fewer than 40 steps four in all."""
    rng, every = random.Random(seed), min(10, num_steps // len(TARGETS))
    targets = list(TARGETS)
    return [
        Strike(targets[number % len(targets)], number * every + every // 2, rng.random()) for number in range(num_steps // every)
    ]


class Watched:
    """A run on a worker, as somebody watches it who starts again what is gone."""

    def __init__(self, config: Any, folder: Path, strikes: list[Strike]) -> None:
        self.config, self.folder, self.strikes = config, folder, list(strikes)
        self.done: list[dict[str, Any]] = []
        self.begin, self.num_requests, self.num_missed = time.time(), 0, 0
        self.api_url, self.flow_run = "", ""

    def make(self) -> dict[str, Any]:
        load = os.getloadavg()[0]
        self.begin = time.time()
        self.request()
        while len(self.commits) < self.config.num_steps:
            self.strike()
            is_gone = strike.find(self.folder, "flow") is None
            self.num_missed = self.num_missed + 1 if is_gone else 0
            if self.num_missed == NUM_LOOKS and self.has_begun():
                self.request()
            if time.time() - self.begin > LIMIT_S:
                raise TimeoutError(f"run {self.config.name} is not done after {LIMIT_S:g} s")
            time.sleep(POLL_S)
        ends = [self.begin, *self.commits]
        return {
            "seconds": round(ends[-1] - self.begin, 1),
            "step_seconds": [round(later - earlier, 1) for earlier, later in itertools.pairwise(ends)],
            "requests": self.num_requests,
            "strikes": self.done,
            "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        }

    @property
    def commits(self) -> list[float]:
        """When each step was committed."""
        from infra.store.layout import RunFolder

        return [path.stat().st_mtime for path in sorted(RunFolder.of(self.config.name).steps.glob("*/manifest.json"))]

    def has_begun(self) -> bool:
        """Whether the last request's flow run has had a process: while it waits for one, nothing is missing."""
        from infra.services.prefect_api import api_client, asked

        with api_client(self.api_url) as client:
            state = asked(client, "GET", f"/flow_runs/{self.flow_run}", {})["state"]["type"]
        self.num_missed = 0
        return bool(state not in ("SCHEDULED", "PENDING"))

    def request(self) -> None:
        """`ratchet up`, and `prefect deployment run rl-run/local`."""
        from prefect.deployments import run_deployment
        from prefect.settings import temporary_settings

        from flows.cli.services.servers import start_services
        from flows.cli.session import client_settings

        self.api_url, _ = start_services()
        with temporary_settings(client_settings(self.api_url)):
            made: Any = run_deployment(
                "rl-run/local", parameters={"config": self.config.model_dump(mode="json")}, timeout=0, as_subflow=False
            )
        self.flow_run, self.num_missed = str(made.id), 0
        self.num_requests += 1

    def strike(self) -> None:
        """Kill who is next, if its moment has come and it lives."""
        commits = self.commits
        if not self.strikes or len(commits) < self.strikes[0].step:
            return
        target, _step, moment = self.strikes[0]
        last = (commits[-1] - commits[-2]) if len(commits) > 1 else 0.0
        since = time.time() - (commits[-1] if commits else self.begin)
        if since < moment * last or (pid := strike.find(self.folder, TARGETS[target])) is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.done.append({"target": target, "step": len(commits), "after_s": round(since, 1)})
            print(f"{target} killed in step {len(commits)}", flush=True)
            del self.strikes[0]


def digests(run: str) -> list[str]:
    from infra.store.files import read_json
    from infra.store.layout import RunFolder, StepFolder

    steps = sorted(RunFolder.of(run).steps.glob("[0-9]*"))
    return [read_json(StepFolder(path).report)["adapter"]["weights"]["sha256"] for path in steps]


def measure(num_steps: int, folder: Path) -> dict[str, Any]:
    from flows.cli.services.servers import start_services, stop
    from flows.presets import smoke
    from infra.models import base_model

    base = smoke()
    config = base.but(num_steps=num_steps, evaluation=base.evaluation.but(every=0))
    base_model.locate(config.model)  # made before a clock runs
    runs: dict[str, dict[str, Any]] = {}
    found: dict[str, list[str]] = {}
    for name in ("undisturbed", "disturbed"):
        start_services()
        try:
            runs[name] = Watched(config.but(name=name), folder, strikes_of(num_steps) if name == "disturbed" else []).make()
        finally:
            stop()  # the engine, too: both runs start one
        found[name] = digests(name)
        print(f"{name}: {runs[name]['seconds']:.0f} s", flush=True)
    return {
        "machine": f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, no GPU",
        "steps": num_steps,
        **runs,
        "effective_training_time": round(runs["undisturbed"]["seconds"] / runs["disturbed"]["seconds"], 3),
        "digests_equal": found["undisturbed"] == found["disturbed"] and len(found["disturbed"]) == num_steps,
        "num_different_digests": len(set(found["undisturbed"])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40, help="4 or more; one failure in every tenth, four at least")
    parser.add_argument("--workspace", type=Path, help="a folder that stays (default: a temporary one)")
    parser.add_argument("--save", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.steps < len(TARGETS):
        parser.error(f"--steps {options.steps} is fewer than {len(TARGETS)}")
    with contextlib.ExitStack() as stack:
        folder = (options.workspace or Path(stack.enter_context(tempfile.TemporaryDirectory()))).absolute()
        os.environ |= {
            "RATCHET_WORKSPACE": str(folder),
            points.MARK: str(folder),  # by which processes are found
            "RATCHET_PASS_ENVIRONMENT": json.dumps([points.MARK]),
        }
        for name in ("PREFECT_API_URL", "RATCHET_STORE_URL"):
            os.environ.pop(name, None)
        result = measure(options.steps, folder)
    text = json.dumps(result, indent=1)
    print(text)
    if options.save:
        options.save.write_text(text + "\n")
    return 0 if result["digests_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
