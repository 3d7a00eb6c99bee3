"""Show how much room the workspace takes: runs, models, logs, MLflow.

ratchet du
ratchet du mine                                                  the parts of a run
RATCHET_WORKSPACE=/data/other ratchet du                         of another workspace
"""

from typing import Annotated

from cyclopts import Parameter

Run = Annotated[str | None, Parameter(help="Name of a run.", show_default=False)]


def du(run: Run = None, /) -> None:
    import shutil

    from rich.table import Table

    from flows.cli.terminal import console
    from infra.runs import run_state
    from infra.settings import settings
    from infra.store import disk_usage
    from infra.store.layout import run_folder, runs_folder

    if run is not None:
        run_state.check_exists(run)
    rows = disk_usage.parts_of(run_folder(run)) if run else disk_usage.workspace_parts()
    table = Table()
    table.add_column("run " + run if run else str(settings().workspace), overflow="fold")
    table.add_column("size", justify="right")
    for name, size in rows.items():
        table.add_row(name, disk_usage.shown(size))
        if not run and name == runs_folder().name:
            for each, of_run in disk_usage.parts_of(runs_folder()).items():
                table.add_row(f"  {each}", disk_usage.shown(of_run))
    table.add_row("all", disk_usage.shown(sum(rows.values())), style="bold")
    console.print(table)
    free = shutil.disk_usage(settings().workspace.parent if not settings().workspace.exists() else settings().workspace).free
    console.print(f"free on this disk: {disk_usage.shown(free)}")
