"""Show what runs in this workspace: servers, engine, trainer, who has the GPUs, what waits for MLflow.

ratchet status
ratchet status --password                                        user:password of Prefect's server
export PREFECT_API_AUTH_STRING=$(ratchet status --password)
"""

from collections.abc import Iterator
from typing import Annotated

from cyclopts import Parameter

Password = Annotated[bool, Parameter(help="Print user:password of Prefect's server, and nothing else.", negative=())]


def status(*, password: Password = False) -> None:
    if password:
        print_password()
        return
    from flows.cli.endings import print_table
    from flows.cli.terminal import console
    from infra.processes import gpu_lock
    from infra.runs import run_state
    from infra.services import servers
    from infra.settings import settings
    from infra.tracking import mlflow_store, upload

    print_table(f"workspace {settings().workspace}", ("what", "state", "where", "log"), list(rows()))
    owner, waiting = gpu_lock.holder(), upload.waiting_runs()
    console.print(f"\nruns             {len(run_state.known_runs())}")
    console.print(f"GPUs are held by {owner or 'nothing'}", soft_wrap=True)
    console.print(f"not uploaded     {', '.join(waiting) or 'nothing'}" + ("; `ratchet upload` uploads it" if waiting else ""))
    if mlflow := servers.running_mlflow_url():
        console.print(f"runs in MLflow   {mlflow_store.start_page(mlflow)}", soft_wrap=True)


def rows() -> Iterator[tuple[str, str, str, str]]:
    from infra import engines
    from infra.processes import children
    from infra.services import servers
    from infra.trainers import resident

    for name in (servers.PREFECT, servers.WORKER, servers.MLFLOW):
        service = servers.living(name)
        yield (
            (name, f"pid {service.process.pid}", service.url, str(service.log_path)) if service else (name, "not running", "", "")
        )
    living, trainer = [state for state in engines.recorded() if children.find(state.process)], resident.recorded()
    for engine in living:
        state = f"{engine.kind}, {'awake' if engine.is_awake else 'asleep'}, pid {engine.process.pid}"
        yield f"engine {engine.replica}" if engine.replica else "engine", state, engine.url, str(engine.log_path)
    if not living:
        yield "engine", "not running", "", ""
    if trainer and children.find(trainer.process):
        yield "trainer", f"pid {trainer.process.pid}", "", str(trainer.log_path)
    else:
        yield "trainer", "not running", "", ""


def print_password() -> None:
    """For the login of Prefect's page, and for PREFECT_API_AUTH_STRING in a shell."""
    from infra.services import prefect_password, servers

    service = servers.living(servers.PREFECT)
    auth = prefect_password.of(service.url) if service else None
    if auth is None:
        raise ValueError("no Prefect server of this workspace is running: `ratchet up` starts one")
    print(auth.get_secret_value())
