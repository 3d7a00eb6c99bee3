"""Start Prefect's server, a worker and MLflow where they are missing, and deploy prefect.yaml.

ratchet up
RATCHET_PREFECT_PORT=4300 ratchet up                             on another port
ratchet up --cluster                                             and a Ray cluster of this machine, for RATCHET_CLUSTER_ADDRESS=auto
ratchet up && prefect deployment run rl-run/local --watch
"""

from typing import Annotated

from cyclopts import Parameter

Cluster = Annotated[bool, Parameter(help="Also start a Ray cluster of this machine, on loopback.", negative=())]


def up(*, cluster: Cluster = False) -> None:
    from flows.cli.services import servers
    from flows.cli.terminal import log_to_terminal
    from infra.store.files import open_workspace
    from infra.tracking import mlflow_store

    log_to_terminal()
    open_workspace()
    if cluster:
        servers.start_cluster()
    api_url, mlflow_url = servers.start_services()
    servers.print_addresses(api_url, mlflow_store.start_page(mlflow_url))
