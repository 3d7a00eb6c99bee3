"""One whole RL step on this machine, from nothing: `./infra/quickstart`, or `python -m flows.quickstart` once all is set up."""

import argparse
import inspect
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import State
from prefect.client.schemas.sorting import LogSort
from prefect.deployments import run_deployment
from prefect.settings import temporary_settings
from rich.console import Console
from rich.table import Table

from flows import interrupts
from flows.command_line import client_settings
from flows.presets import PRESETS, preset
from infra import engines
from infra.config import RunConfig
from infra.config.tools.overrides import with_overrides
from infra.models import base_model
from infra.processes.children import ProgramFailed
from infra.runs.lineage import next_step
from infra.services import prefect_password, servers
from infra.settings import settings
from infra.store.files import open_workspace, read_json, run_folder
from infra.tracking import mlflow_address, mlflow_store, upload
from infra.trainers import resident
from tasks.open_step import check

DEPLOYMENT = "rl-step/local"
POLL_S = 1.0
OURS = ("infra.", "tasks.")
"""Loggers whose lines are shown; of the others only warnings."""
STAY_UP = "servers that were started stay up: `./infra/quickstart --stop` ends them"
console = Console(highlight=False)


def main() -> None:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if options.stop:
        stop()
        return
    if options.password:
        print_password()
        return
    try:
        config = with_overrides(preset(options.preset), options.set, name=options.run)
        open_workspace()
        base_model.locate(config.model)
        check(config)
        mlflow_address.note(config.name)  # of this terminal: the worker may have been started with another
        interrupts.say(lambda: f"interrupted: no step was begun; {STAY_UP}")
        api_url, mlflow_url = start_services()
    except (ValueError, ProgramFailed) as error:
        sys.exit(f"error: {error}")
    mlflow_address.warn_at_start(config.name)
    with temporary_settings(client_settings(api_url)):
        succeeded = run_step(config)
    mlflow_address.warn_at_end(config.name, mlflow_store.waiting(config.name))
    print_addresses(api_url, mlflow_url)
    sys.exit(0 if succeeded else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./infra/quickstart", description="Set up what is missing, then make one RL step on this machine."
    )
    parser.add_argument("--preset", default="smoke", help=f"what to run: {', '.join(PRESETS)} (default: %(default)s)")
    parser.add_argument("--run", help="name of the run; a run that exists goes on with its next step (default: the preset's)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field, such as --set trainer.learning_rate=1e-4",
    )
    parser.add_argument(
        "--stop", action="store_true", help="end the servers, engine and trainer that were started, and nothing else"
    )
    parser.add_argument("--password", action="store_true", help="print user:password of Prefect's server, and do nothing else")
    return parser.parse_args()


def print_password() -> None:
    """For the login of Prefect's page, and for PREFECT_API_AUTH_STRING in a shell."""
    service = servers.living(servers.PREFECT)
    auth = prefect_password.of(service.url) if service else None
    if auth is None:
        sys.exit("error: no Prefect server of this workspace is running: ./infra/quickstart starts one")
    print(auth.get_secret_value())


def stop() -> None:
    stopped = servers.stop_all()
    if engines.stop_recorded():
        stopped.append("engine")
    if resident.stop_recorded():
        stopped.append("trainer")
    if upload.stop():
        stopped.append("delivery to MLflow")
    console.print(f"stopped: {', '.join(stopped) or 'nothing was running'}")


def start_services() -> tuple[str, str]:
    """The addresses of Prefect's API and of MLflow; both servers start side by side."""
    with ThreadPoolExecutor() as pool:
        prefect, mlflow = pool.submit(servers.ensure_prefect), pool.submit(servers.ensure_mlflow)
        api_url, mlflow_url = prefect.result(), mlflow.result()
    servers.deploy(api_url)
    servers.ensure_worker(api_url)
    return api_url, mlflow_url


def run_step(config: RunConfig) -> bool:
    """Have the deployment make one step, show its log until it ends, then its table; says whether it succeeded."""
    step = next_step(config.name)
    console.print(f"run {config.name}, step {step}: prefect deployment run {DEPLOYMENT}")
    begun = time.monotonic()
    flow_run = run_deployment(DEPLOYMENT, parameters={"config": config.model_dump(mode="json")}, timeout=0, as_subflow=False)
    assert not inspect.isawaitable(flow_run)  # outside an event loop it is the flow run itself
    interrupts.say(
        lambda: (
            f"interrupted: this display has stopped, and flow run {flow_run.id} goes on in the worker; `.venv/bin/prefect flow-run cancel "
            f"{flow_run.id}` ends it, the same command afterwards goes on with run {config.name}; {STAY_UP}"
        )
    )
    state = _follow(flow_run.id)
    console.print(f"{state.name} after {time.monotonic() - begun:.0f} s" + (f": {state.message}" if state.message else ""))
    if state.is_completed():
        print_table(config.name, step)
    return bool(state.is_completed())


def _follow(flow_run_id: UUID) -> State:
    """Print the flow run's log as it grows; gives the final state."""
    num_seen = 0
    with get_client(sync_client=True) as client:
        while True:
            state = client.read_flow_run(flow_run_id).state
            lines = client.read_logs(
                LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id])),
                limit=200,
                offset=num_seen,
                sort=LogSort.TIMESTAMP_ASC,
            )
            num_seen += len(lines)
            for line in lines:
                if line.name.startswith(OURS) or line.level >= logging.WARNING:
                    console.print(f"{_clock(line.timestamp)} {line.message}", markup=False, soft_wrap=True)
            if state is not None and state.is_final() and not lines:
                return state
            time.sleep(POLL_S)


def _clock(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%H:%M:%S")


def print_table(run: str, step: int) -> None:
    report = read_json(run_folder(run) / "steps" / f"{step:06d}" / "report.json")
    table = Table(title=f"run {run}, step {step}")
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")
    for name, value in sorted(report["metrics"].items()):
        table.add_row(name, f"{value:.6g}")
    table.add_row("adapter version", str(report["adapter"]["version"]))
    table.add_row("adapter SHA-256", report["adapter"]["weights"]["sha256"])
    console.print(table)


def print_addresses(api_url: str, mlflow_url: str) -> None:
    console.print(f"Prefect    {api_url.removesuffix('/api')}   its password: .venv/bin/python -m flows.quickstart --password")
    console.print(f"MLflow     {mlflow_url}")
    console.print(f"files      {settings().workspace}")
    console.print("next step  the same command again")
    console.print("to end     ./infra/quickstart --stop")


if __name__ == "__main__":
    interrupts.run(main)
