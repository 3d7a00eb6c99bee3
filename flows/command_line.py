"""`python -m flows.run`: a run in this process; flows/arguments.py has its options."""

import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_LOCAL_STORAGE_PATH, temporary_settings
from rich.console import Console
from rich.table import Table

from flows import interrupts
from flows.arguments import resolved
from flows.run import rl_run
from infra.config.tools.schema import FieldSource, shown
from infra.processes.children import ProgramFailed
from infra.records import RunReport
from infra.runs.lineage import next_step
from infra.services import prefect_password, servers
from infra.settings import settings
from infra.store.files import write_json
from infra.store.layout import RunFolder, run_folder
from tasks.support.preflight import check_run, open_run

"""Beside config.json: each value with its source, of the latest command that worked on the run."""
console = Console(highlight=False)


def print_resolved(found: list[FieldSource]) -> None:
    table = Table(title="configuration")
    for column in ("field", "value", "source"):
        table.add_column(column, overflow="fold")
    for origin in found:
        table.add_row(origin.field, shown(origin.value), origin.source, style=None if origin.source == "default" else "bold")
    console.print(table)


def print_report(made: RunReport) -> None:
    table = Table(title=f"run {made.run}: {made.num_steps} steps, {made.stopped}")
    for column in ("adapter version", "pass@1", "pass@k", "mean reward"):
        table.add_column(column, justify="right")
    for each in made.evaluations:
        table.add_row(
            str(each.step),
            f"{each.pass_at_1:.3f}",
            ", ".join(f"{k}: {value:.3f}" for k, value in each.pass_at_k.items()),
            "-" if each.mean_reward is None else f"{each.mean_reward:.4g}",
        )
    console.print(table)
    console.print(f"best     adapter {made.best.version}, SHA-256 {made.best.sha256}")
    console.print(f"files    {run_folder(made.run)}")
    console.print("to end   ./infra/quickstart --stop   ends the engine and the servers, which stay up for the next run")


@contextmanager
def with_prefect() -> Iterator[None]:
    """Flows that are called inside talk to PREFECT_API_URL, or to the workspace's own server, which is started where it is missing."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with temporary_settings(client_settings(servers.ensure_prefect())):
        yield


def client_settings(url: str) -> dict[Any, str]:  # Any: Prefect does not export the type of its settings
    """What a client of a Prefect server needs: its address, the password where there is one, and the place of results."""
    auth = prefect_password.of(url)
    return results_settings() | {PREFECT_API_URL: url} | ({PREFECT_API_AUTH_STRING: auth.get_secret_value()} if auth else {})


def results_settings() -> dict[Any, str]:
    """Where flows that are called in this process store their results and those of their tasks."""
    return {PREFECT_LOCAL_STORAGE_PATH: str(settings().results)}


def stopped_line(run: str) -> str:
    """What a Ctrl-C on a run in this process leaves."""
    again = shlex.join(["python", "-m", "flows.run", *sys.argv[1:]])
    return (
        f"interrupted: run {run} has stopped, {next_step(run)} of its steps are committed and the step at work keeps what it has; `{again}` "
        "goes on there; engine and servers stay up: `./infra/quickstart --stop` ends them"
    )


def main() -> None:
    try:
        config, found, show = resolved(sys.argv[1:])
        if show:
            print_resolved(found)
            return
        servers.given_prefect()  # a wrong address is said before anything is written
        check_run(config)
        open_run(config, nothing_committed="leave")
        print_resolved(found)  # after the checks: their line stands alone
        write_json(RunFolder.of(config.name).resolved_config, [origin._asdict() for origin in found])
        interrupts.say(lambda: stopped_line(config.name))
        with with_prefect():
            print_report(rl_run(config))
    except (ValueError, ProgramFailed) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    interrupts.run(main)
