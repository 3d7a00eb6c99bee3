"""Remove a run's folder: its steps, adapters, evaluations and exports. Asks first.

What MLflow has of the run stays: figures, artifacts with all adapters, and the versions of its model (models:/NAME@best). So do the answers
of a model that judged; a new run of the name has its own budget for one.

ratchet rm mine
ratchet rm mine --yes                                            without a question
ratchet export mine --to /models/mine && ratchet rm mine
"""

from typing import Annotated

from cyclopts import Parameter

Yes = Annotated[bool, Parameter(name=("--yes", "-y"), help="Do not ask.", negative=())]


def rm(run: str, /, *, yes: Yes = False) -> None:
    from flows.cli.session import is_confirmed
    from flows.cli.terminal import console, log_to_terminal
    from infra.mirror import copying
    from infra.runs import run_state
    from infra.settings import settings
    from infra.store import disk_usage
    from infra.store.files import open_workspace
    from infra.store.layout import run_folder
    from infra.tracking import mlflow_store, upload

    log_to_terminal()
    open_workspace()
    run_state.check_exists(run)
    if owner := run_state.owner_at_work(run):
        raise ValueError(f"run {run!r} is at work, {owner}: `ratchet stop {run}` ends it first")
    for name, size in disk_usage.run_parts(run).items():
        console.print(f"{name:14}{disk_usage.shown(size):>12}")
    console.print(f"{'all':14}{disk_usage.shown(disk_usage.num_bytes(run_folder(run))):>12}")
    if waiting := mlflow_store.waiting(run):
        console.print(
            f"MLflow does not have {len(waiting)} of its steps and evaluations: `ratchet upload {run}` brings them there"
        )
    if copying.waiting(run):
        console.print(f"{settings().store_url} does not have all of it: `ratchet upload {run}` copies it there")
    if not is_confirmed(f"Remove {run_folder(run)}?", f"removing run {run!r}", yes):
        return
    upload.remove(run)
    console.print(f"removed run {run}; what MLflow has of it stays")
