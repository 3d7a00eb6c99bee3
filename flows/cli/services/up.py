"""Start Prefect's server, a worker and MLflow where they are missing, and deploy prefect.yaml.

ratchet up
ratchet up --cluster                                             and a Ray cluster of this machine, for RATCHET_CLUSTER_ADDRESS=auto
ratchet up --warm arithmetic-gpu                                 and compile what the engine of this preset needs
ratchet up && prefect deployment run rl-run/local --watch
"""

from typing import Annotated

from cyclopts import Parameter

Cluster = Annotated[bool, Parameter(help="Also start a Ray cluster of this machine, on loopback.", negative=())]
Warm = Annotated[
    str,
    Parameter(
        help="Also start the engine of this preset or configuration file once and end it: its kernels are kept for later starts."
    ),
]


def up(*, cluster: Cluster = False, warm: Warm = "") -> None:
    from flows.cli import interrupts
    from flows.cli.endings import again
    from flows.cli.services import servers
    from flows.cli.session import DOWN
    from flows.cli.terminal import console, log_to_terminal
    from infra.store.files import open_workspace
    from infra.tracking import mlflow_store

    log_to_terminal()
    open_workspace()
    config = servers.config_to_warm(warm) if warm else None  # a wrong name is an error before anything is started
    interrupts.say(lambda: f"interrupted: what was started stays up: {DOWN}; `{again()}` starts the rest")
    if cluster:
        servers.start_cluster()
    api_url, mlflow_url = servers.start_services()
    servers.print_addresses(api_url, mlflow_store.start_page(mlflow_url))
    if config is not None:
        console.print(f"engine     {servers.warm_engine(config)}")
