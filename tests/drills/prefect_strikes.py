"""Strike Prefect's server, its worker or both while a run is made, and see the run end with the digests of an undisturbed one.

    .venv/bin/python tests/drills/prefect_strikes.py --folder FOLDER --port PORT [--only worker-both] [--seed 1]

A scripted engine and the real trainer. A run is started in a shell or given to the worker; the seed decides the moment. Where the run does
not end well by itself, the same command is given again, once. Then the next start must leave nothing Running. One JSON line for each trial.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
TRIALS = [("shell", "server", each) for each in SIGNALS] + [
    ("worker", part, each) for part in ("server", "worker", "both") for each in SIGNALS
]
NUM_STEPS = 3
LIMIT_S = 420.0
FIELDS = {
    "engine.kind": "scripted",
    "trainer.max_mismatch": "null",
    "num_steps": NUM_STEPS,
    "data.num_prompts": 4,
    "sampling.group_size": 4,
    "evaluation.every": 0,
}


def options(run: str, model: Path) -> list[str]:
    fields = FIELDS | {"model": model}
    return ["--name", run, *(f"--{field}={value}" for field, value in fields.items())]


def parts(target: str) -> list[int]:
    from infra.processes import children
    from infra.services import servers

    names = {"server": [servers.PREFECT], "worker": [servers.WORKER], "both": [servers.PREFECT, servers.WORKER]}[target]
    found = [servers.living(name) for name in names]
    return [process.pid for service in found if service and (process := children.find(service.process))]


def until(is_so: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def manifests(run: str) -> list[Path]:
    return sorted(Path(os.environ["RATCHET_WORKSPACE"]).glob(f"runs/{run}/steps/*/manifest.json"))


def digests(run: str) -> list[str]:
    return [json.loads(path.read_text())["adapter_out"]["weights"]["sha256"] for path in manifests(run)]


class InShell:
    def __init__(self, run: str, model: Path, log: Path) -> None:
        from shared import RATCHET

        with log.open("a") as output:
            command = [*RATCHET, "run", "--preset", "smoke", *options(run, model)]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def succeeded(self) -> bool:
        return self.process.poll() == 0

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class OnWorker:
    """A flow run of the deployment; servers that are gone are started first, as the user's next command does."""

    def __init__(self, run: str, model: Path, log: Path) -> None:
        from flows.presets import smoke
        from infra.config.tools.overrides import with_overrides
        from infra.services import prefect_api, servers

        self.api_url = servers.ensure_prefect()
        servers.ensure_worker(self.api_url)
        config = with_overrides(smoke(), options(run, model)[3::2], name=run)
        with prefect_api.api_client(self.api_url) as client:
            deployment = client.get("/deployments/name/rl-run/local").raise_for_status().json()["id"]
            body = {"parameters": {"config": config.model_dump(mode="json")}}
            path = f"/deployments/{deployment}/create_flow_run"
            self.flow_run = prefect_api.asked(client, "POST", path, body)["id"]

    def _state(self) -> str:
        import httpx

        from infra.services import prefect_api

        try:
            with prefect_api.api_client(self.api_url) as client:
                client.timeout = httpx.Timeout(5)
                return str(client.get(f"/flow_runs/{self.flow_run}").raise_for_status().json()["state"]["type"])
        except httpx.HTTPError:
            return "?"

    def ended(self) -> bool:
        return self._state() in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

    def succeeded(self) -> bool:
        return self._state() == "COMPLETED"

    def end(self) -> None:
        pass


def left_running() -> int:
    """Flow runs that the server shows as at work after the next start."""
    from infra.services import flow_runs, prefect_api, servers

    with prefect_api.api_client(servers.ensure_prefect()) as client:
        body = {"flow_runs": {"state": {"type": {"any_": flow_runs.AT_WORK}}}}
        return len(prefect_api.asked(client, "POST", "/flow_runs/filter", body))


def end_stopped() -> None:
    """End a worker that was stopped: it holds flow runs and takes no new ones, and only its user knows that it is stopped."""
    from infra.processes import children
    from infra.services import servers

    worker = servers.living(servers.WORKER)
    process = children.find(worker.process) if worker else None
    if worker and process and process.status() == psutil.STATUS_STOPPED:
        children.stop(worker.process)


def tried(trial: tuple[str, str, str], seed: int, model: Path, expected: list[str], folder: Path) -> dict[str, Any]:
    by, target, number = trial
    run, make = f"{by}-{target}-{number}", InShell if by == "shell" else OnWorker
    moment = random.Random(f"{seed} {run}").uniform(0, 15)
    log = folder / f"{run}.log"
    running = make(run, model, log)
    until(lambda: manifests(run) != [] or running.ended(), LIMIT_S)
    time.sleep(moment)
    struck = parts(target)
    for pid in struck:
        os.kill(pid, getattr(signal, number))
    begun = time.monotonic()
    alone = until(running.ended, LIMIT_S) and running.succeeded()
    seconds = time.monotonic() - begun
    if not alone:
        if not running.ended():
            running.end()
        end_stopped()
        again = make(run, model, log)
        until(again.ended, LIMIT_S)
    end_stopped()
    is_equal = digests(run) == expected
    text = log.read_text() if log.exists() else ""
    return {
        "trial": run,
        "struck": len(struck),
        "moment_s": round(moment, 1),
        "by_itself": alone,
        "seconds": round(seconds, 1),
        "digests_equal": is_equal,
        "left_running": left_running(),
        "tracebacks": text.count("Traceback"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--only", default="", help="trials whose names begin so, such as worker-both")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PREFECT_API_URL", None)
    os.environ |= {
        "RATCHET_WORKSPACE": str(chosen.folder / "workspace"),
        "RATCHET_PREFECT_PORT": str(chosen.port),
        "RATCHET_ENGINE_PORT": str(chosen.port + 100),
        "RATCHET_NUM_CPU_THREADS": "2",
    }
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from flows.cli.services.servers import stop
    from infra.services import servers
    from infra.tiny_model.architecture import random_model
    from infra.tiny_model.tokenizer import train_tokenizer

    model, tokenizer = chosen.folder / "random-tiny", train_tokenizer()
    tokenizer.save_pretrained(model)
    random_model("tiny", tokenizer, 0).save_pretrained(model)
    try:
        api_url = servers.ensure_prefect()
        servers.deploy(api_url)
        undisturbed = InShell("undisturbed", model, chosen.folder / "undisturbed.log")
        assert undisturbed.process.wait(LIMIT_S) == 0, (chosen.folder / "undisturbed.log").read_text()[-3000:]
        expected = digests("undisturbed")
        for trial in TRIALS:
            if "-".join(trial).startswith(chosen.only):
                sys.stdout.write(json.dumps(tried(trial, chosen.seed, model, expected, chosen.folder)) + "\n")
                sys.stdout.flush()
    finally:
        stop()


if __name__ == "__main__":
    main()
