"""What commands share that make flows run in this process: the Prefect server and the configuration."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.table import Table

from flows.cli.terminal import console, is_quiet, is_verbose, log_to_terminal, progress

if TYPE_CHECKING:
    from infra.config import RunConfig
    from infra.config.tools.schema import FieldSource

DOWN = "`ratchet down` ends them"


def is_confirmed(question: str, what: str, without_question: bool) -> bool:
    """Ask before something is removed. Says so where the answer is no.

    Raises:
        ValueError: where stdin is no terminal.
    """
    if without_question:
        return True
    if not sys.stdin.isatty():
        raise ValueError(f"{what} needs an answer, and stdin is no terminal: add --yes")
    if input(f"{question} [y/N] ").strip().lower() in ("y", "yes"):
        return True
    console.print("nothing was removed")
    return False


@contextmanager
def with_prefect(preset: str | None = None) -> Iterator[None]:
    """Flows that are called inside talk to PREFECT_API_URL, or to the workspace's own server, which is started where it is missing.

    preset: Name of the preset that the configuration was made from, for the flow runs' tags.
    """
    from prefect.settings import temporary_settings

    from flows.cli import interrupts
    from infra.services import servers
    from tasks.support.flow_runs import made_from

    log_to_terminal()
    interrupts.in_flows()
    with temporary_settings(client_settings(servers.ensure_prefect())), progress(), made_from(preset):
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
    """Write a configuration that was checked beside the run, each value with its source, and print what the command changed in it."""
    from infra.config.tools.schema import shown
    from infra.store.files import write_json
    from infra.store.layout import RunFolder

    path = write_json(RunFolder.of(config.name).resolved_config, [origin._asdict() for origin in found])
    if is_verbose():
        print_resolved(found)  # after the checks: their line stands alone
    elif not is_quiet():
        given = [f"{each.field}={shown(each.value)}" for each in found if each.source not in ("default", "preset")]
        console.print(
            f"run {config.name}{': ' if given else ''}{', '.join(given)}; all fields in {path}", markup=False, soft_wrap=True
        )


def print_resolved(found: "list[FieldSource]") -> None:
    from infra.config.tools.schema import shown

    table = Table(title="configuration")
    for column in ("field", "value", "source"):
        table.add_column(column, overflow="fold")
    for origin in found:
        table.add_row(origin.field, shown(origin.value), origin.source, style=None if origin.source == "default" else "bold")
    console.print(table)


def stopped_line(run: str) -> str:
    """What a Ctrl-C on a run in this process leaves."""
    from flows.cli.endings import again
    from infra.runs.lineage import next_step

    return (
        f"interrupted: run {run} has stopped, {next_step(run)} of its steps are committed and the step at work keeps what it has; `{again()}` "
        f"goes on there; engine and servers stay up: {DOWN}"
    )
