"""Make one whole RL step on this machine, from nothing: servers, deployment, engine, trainer.

`./infra/quickstart` does the same and makes the environments first. The same command again makes the next step.

ratchet quickstart                                               a step of the tiny model
ratchet quickstart --preset gsm8k-qwen2.5-0.5b --run my-run --trainer.learning_rate 3e-5
ratchet quickstart --stop                                        as `ratchet down`
"""

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

from cyclopts import Parameter

from flows.cli.fields import Chosen, takes_fields
from infra.config import RunConfig

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

DEPLOYMENT = "rl-step/local"
POLL_S = 1.0
STAY_UP = "servers that were started stay up: `ratchet down` ends them"
Run = Annotated[
    str | None, Parameter(help="Name of the run, as --name; one that exists goes on with its next step.", metavar="NAME")
]
Stop = Annotated[bool, Parameter(help="End what was started, and do nothing else.", negative=())]


@takes_fields(RunConfig)
def quickstart(*, run: Run = None, stop: Stop = False, chosen: Chosen) -> None:
    from flows.cli.services import servers
    from flows.cli.terminal import log_to_terminal

    log_to_terminal()
    if stop:
        servers.stop()
        return
    named = chosen._replace(changes=(*chosen.changes, f'name="{run}"')) if run else chosen
    config, _ = named.run("smoke")
    make_step(config, chosen.made_from("smoke"))


def make_step(config: RunConfig, preset: str | None) -> None:
    """Start what is missing, and have the deployment make the run's next step."""
    from prefect.settings import temporary_settings

    from flows.cli import interrupts
    from flows.cli.services import servers
    from flows.cli.session import client_settings
    from flows.cli.terminal import console
    from infra.concurrency.background import run_concurrently
    from infra.models import base_model
    from infra.runs.opening import check_begun
    from infra.services import prefect_address
    from infra.store.files import open_workspace
    from infra.tracking import mlflow_address, mlflow_store
    from tasks.support.preflight import check

    open_workspace()
    prefect_address.given()  # a wrong address is an error before anything is written
    check_begun(config)
    mlflow_address.note(config.name)  # of this terminal: the worker may have been started with another
    interrupts.say(lambda: f"interrupted: no step was begun; {STAY_UP}")
    with run_concurrently(1) as submit:
        # only while a model is made: what can be refused is refused before servers start
        starting = submit(servers.start_services) if base_model.must_be_made(config.model) else None
        base_model.locate(config.model)
        check(config)
        api_url, mlflow_url = starting.result() if starting else servers.start_services()
    mlflow_address.warn_at_start(config.name)
    with temporary_settings(client_settings(api_url)):
        succeeded = run_step(config, preset)
    mlflow_address.warn_at_end(config.name, mlflow_store.waiting(config.name))
    if succeeded:  # its table has the addresses
        console.print("password ratchet status --password   shows that of Prefect's pages")
    else:
        servers.print_addresses(api_url, mlflow_store.page_url(config.name) or mlflow_url)
        console.print("this step  fix what the last line of the log names; then the same command goes on with it")
        console.print("to end     ratchet down")
        raise SystemExit(1)


def run_step(config: RunConfig, preset: str | None) -> bool:
    """Have the deployment make one step, show its log until it ends, then its table; says whether it succeeded."""
    import inspect
    import time

    from prefect.deployments import run_deployment

    from flows.cli import interrupts
    from flows.cli.endings import print_step
    from flows.cli.terminal import console
    from infra.runs.lineage import next_step
    from tasks.support.flow_runs import PRESET

    step = next_step(config.name)
    console.print(f"run {config.name}, step {step}: prefect deployment run {DEPLOYMENT}")
    begun = time.monotonic()
    flow_run = run_deployment(
        DEPLOYMENT,
        parameters={"config": config.model_dump(mode="json")},
        timeout=0,
        tags=[f"{PRESET}{preset}"] if preset else None,
        as_subflow=False,
    )
    assert not inspect.isawaitable(flow_run)  # outside an event loop it is the flow run itself
    interrupts.say(
        lambda: (
            f"interrupted: this display has stopped, and flow run {flow_run.id} goes on in the worker; `ratchet stop {config.name} --now` "
            f"ends it, the same command afterwards goes on with run {config.name}; {STAY_UP}"
        )
    )
    state = follow(flow_run.id)
    console.print(f"{state.name} after {time.monotonic() - begun:.0f} s" + (f": {state.message}" if state.message else ""))
    if state.is_completed():
        print_step(config.name, step)
    return bool(state.is_completed())


def follow(flow_run_id: UUID) -> "State":
    """Print the flow run's log as it grows; gives the final state."""
    import time

    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
    from prefect.client.schemas.sorting import LogSort

    from flows.cli import terminal

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
                if terminal.is_shown(line.name, line.level):
                    print(terminal.line_of(line.timestamp.astimezone(), line.name, line.level, line.message), flush=True)
            if state is not None and state.is_final() and not lines:
                return state
            time.sleep(POLL_S)
