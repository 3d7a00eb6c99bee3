"""What commands share that make flows run in this process: the Prefect server, log lines, tables."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from infra.config import RunConfig
    from infra.config.tools.schema import FieldSource
    from infra.records import RunReport

DOWN = "`ratchet down` ends them"
console = Console(highlight=False, soft_wrap=False)


def log_to_terminal() -> None:
    """Show the log lines of the program itself, plainly, on stdout."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def show_warnings_only() -> None:
    """From here on: what a command prints is what it is for."""
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)


@contextmanager
def with_prefect() -> Iterator[None]:
    """Flows that are called inside talk to PREFECT_API_URL, or to the workspace's own server, which is started where it is missing."""
    from prefect.settings import temporary_settings

    from infra.services import servers

    log_to_terminal()
    with temporary_settings(client_settings(servers.ensure_prefect())):
        yield


def client_settings(url: str) -> dict[Any, str]:  # Any: Prefect does not export the type of its settings
    """What a client of a Prefect server needs: its address, the password where there is one, and the place of results."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

    from infra.services import prefect_password

    auth = prefect_password.of(url)
    return results_settings() | {PREFECT_API_URL: url} | ({PREFECT_API_AUTH_STRING: auth.get_secret_value()} if auth else {})


def results_settings() -> dict[Any, str]:
    """Where flows that are called in this process store their results and those of their tasks."""
    from prefect.settings import PREFECT_LOCAL_STORAGE_PATH

    from infra.settings import settings

    return {PREFECT_LOCAL_STORAGE_PATH: str(settings().results)}


def keep_resolved(config: "RunConfig", found: "list[FieldSource]") -> None:
    """Print a configuration that was checked, and write it beside the run: each value with its source."""
    from infra.store.files import write_json
    from infra.store.layout import RunFolder

    print_resolved(found)
    write_json(RunFolder.of(config.name).resolved_config, [origin._asdict() for origin in found])


def print_resolved(found: "list[FieldSource]") -> None:
    from infra.config.tools.schema import shown

    table = Table(title="configuration")
    for column in ("field", "value", "source"):
        table.add_column(column, overflow="fold")
    for origin in found:
        table.add_row(origin.field, shown(origin.value), origin.source, style=None if origin.source == "default" else "bold")
    console.print(table)


def print_report(made: "RunReport") -> None:
    from infra.store.layout import run_folder

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
    console.print("to end   ratchet down   ends the engine and the servers, which stay up for the next run")


def print_step(run: str, step: int) -> None:
    """The metrics of a committed step and the adapter that it made."""
    from infra.store.files import read_json
    from infra.store.layout import StepFolder

    report = read_json(StepFolder.at(run, step).report)
    table = Table(title=f"run {run}, step {step}")
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")
    for name, value in sorted(report["metrics"].items()):
        table.add_row(name, f"{value:.6g}")
    table.add_row("adapter version", str(report["adapter"]["version"]))
    table.add_row("adapter SHA-256", report["adapter"]["weights"]["sha256"])
    console.print(table)


def stopped_line(run: str) -> str:
    """What a Ctrl-C on a run in this process leaves."""
    import shlex

    from infra.runs.lineage import next_step

    again = shlex.join(["ratchet", *sys.argv[1:]])
    return (
        f"interrupted: run {run} has stopped, {next_step(run)} of its steps are committed and the step at work keeps what it has; `{again}` "
        f"goes on there; engine and servers stay up: {DOWN}"
    )
