"""Drop a run's steps from one on, so that they are made again.

The adapters that these steps made and their evaluations go with them, also from the store at RATCHET_STORE_URL; the run then goes on from
there. Rows and registered versions that MLflow has of the steps stay until the steps are made again.

ratchet drop mine --from 7                                       steps 7, 8, ... of the run `mine`
ratchet drop mine --from 0                                       all of them
ratchet drop mine --from 7 && ratchet run --config .ratchet/runs/mine/config.json
"""

from typing import Annotated

from cyclopts import Parameter

First = Annotated[int, Parameter(name="--from", help="Number of the first step to drop.", metavar="STEP")]


def drop(run: str, /, *, first: First) -> None:
    from flows.cli.terminal import console, log_to_terminal
    from infra.mirror import copying
    from infra.processes.gpu_lock import gpu_lock
    from infra.runs.run_state import check_exists
    from infra.settings import settings
    from infra.store.files import open_workspace
    from infra.tracking import upload

    log_to_terminal()
    open_workspace()
    check_exists(run)
    with gpu_lock(f"drop of steps of run {run}"):
        removed = upload.drop(run, first)
    for folder in removed:
        console.print(f"removed {folder}", soft_wrap=True)
    if any(not part.files for part in copying.waiting(run)):
        console.print(
            f"{settings().store_url} still has steps that were dropped: `ratchet upload {run}` removes them there", soft_wrap=True
        )
    console.print(f"run {run} goes on with step {first}")
