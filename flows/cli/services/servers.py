"""What the commands of this folder share: the servers are started and ended together."""

from concurrent.futures import ThreadPoolExecutor


def start_services() -> tuple[str, str]:
    """Start Prefect's server, a worker and MLflow where they are missing, and deploy; give the addresses of Prefect's API and of MLflow."""
    from infra.services import prefect_address, servers

    prefect_address.given()  # a wrong address is an error before MLflow is started
    with ThreadPoolExecutor() as pool:
        prefect, mlflow = pool.submit(servers.ensure_prefect), pool.submit(servers.ensure_mlflow)
        api_url, mlflow_url = prefect.result(), mlflow.result()
    servers.deploy(api_url)
    servers.ensure_worker(api_url)
    return api_url, mlflow_url


def start_cluster() -> None:
    """Start a Ray cluster of this machine unless this workspace has one. Raises ValueError if Ray is not installed."""
    from flows.cli.terminal import console
    from infra.cluster import connection, head

    connection.check_installed()
    console.print(f"Ray        {head.ensure().address}   used with RATCHET_CLUSTER_ADDRESS=auto")


def stop() -> None:
    """End the servers, the engine, the trainer and the delivery that this workspace has started, and nothing else."""
    from flows.cli.terminal import console
    from infra import engines
    from infra.cluster import head
    from infra.services import servers
    from infra.tracking import upload
    from infra.trainers import resident

    stopped = servers.stop_all()
    if engines.stop_recorded():
        stopped.append("engine")
    if resident.stop_recorded():
        stopped.append("trainer")
    if head.stop():
        stopped.append("Ray")
    if upload.stop():
        stopped.append("delivery to MLflow")
    console.print(f"stopped: {', '.join(stopped) or 'nothing was running'}")


def print_addresses(api_url: str, mlflow_page: str) -> None:
    from flows.cli.terminal import console
    from infra.settings import settings

    console.print(f"Prefect    {api_url.removesuffix('/api')}   its password: ratchet status --password")
    console.print(f"MLflow     {mlflow_page}", soft_wrap=True)
    console.print(f"files      {settings().workspace}")
