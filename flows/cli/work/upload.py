"""Upload to MLflow, and copy to RATCHET_STORE_URL, what they do not have yet: committed steps, evaluations, adapters.

With --to the run belongs to that address from now on, and all of it goes there.

ratchet upload                                                   what waits of all runs
ratchet upload mine
ratchet upload mine --to http://mlflow.example:5000
"""

from typing import Annotated

from cyclopts import Parameter

Run = Annotated[str | None, Parameter(help="Name of a run; left out, all of them.", show_default=False)]
To = Annotated[
    str | None, Parameter(help="Address of another MLflow, for this run from now on.", metavar="ADDRESS", show_default=False)
]


def upload(run: Run = None, /, *, to: To = None) -> None:
    from flows.cli import interrupts
    from flows.cli.endings import again
    from flows.cli.terminal import console, log_to_terminal
    from infra.mirror import copying
    from infra.runs import run_state
    from infra.settings import settings
    from infra.store.files import usable_workspace
    from infra.tracking import mlflow_store, upload

    log_to_terminal()
    usable_workspace()
    if run is None and to is not None:
        raise ValueError(f"--to {to} needs the name of a run: ratchet upload RUN --to {to}")
    if run is not None:
        run_state.check_exists(run)
    waiting = {each: len(mlflow_store.waiting(each)) for each in ([run] if run else run_state.known_runs())}
    interrupts.say(lambda: f"interrupted: what was uploaded is kept; `{again()}` brings the rest")
    upload.upload(run, to)
    for each, before in waiting.items():
        left = len(mlflow_store.waiting(each))
        if before or to or left:
            address = mlflow_store.page_url(each) or mlflow_store.uri(each)
            console.print(
                f"run {each}: {'all of it is' if not left else f'{left} steps or evaluations are not'} in MLflow at {address}",
                soft_wrap=True,
            )
    if not any(waiting.values()) and not to:
        console.print("MLflow has everything")
    not_copied = [each for each in waiting if copying.waiting(each)]
    if store := settings().store_url:
        console.print(f"not copied to {store}: {', '.join(not_copied) or 'nothing'}", soft_wrap=True)
    if not_copied or any(mlflow_store.waiting(each) for each in waiting):
        raise SystemExit(1)
