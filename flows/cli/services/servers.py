"""What the commands of this folder share: the servers are started and ended together."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.config import RunConfig


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


def config_to_warm(name: str) -> "RunConfig":
    """Return a preset, or the configuration in a file. Raises ValueError if there is none of this name."""
    from flows.cli.fields import Chosen

    is_file = Path(name).is_file()
    config, _ = Chosen(preset=None if is_file else name, file=Path(name) if is_file else None, changes=()).run(name)
    return config


def warm_engine(config: "RunConfig") -> str:
    """Start the engine with the base model, its checks included, and end it; return a line on what that took. An engine that already runs
    with this model and these flags is left alone.

    Raises:
        ValueError: for a configuration that cannot work on this machine.
        EngineUnavailable: if it does not start.
    """
    from infra.colocation.plans import resolve_colocation
    from infra.engines import open_engine
    from infra.processes.gpu_lock import gpu_lock
    from infra.runs.lineage import base_version
    from tasks.support.planning.layout import laid_out
    from tasks.support.preflight import check

    config, _ = laid_out(config)
    with gpu_lock("ratchet up --warm", preflight=partial(check, config, ("wake_engine",))):
        adapter = base_version(config)
        engine = open_engine(resolve_colocation(config).engine, adapter)
        try:
            engine.wake()
            engine.load_adapter(adapter)
            figures = engine.start_figures()
        except BaseException:
            engine.stop()
            raise
        if not figures:
            return "runs already, or compiles nothing"
        engine.stop()
        return f"started in {figures['s']:.0f} s, compiled {figures['compiled_files']:.0f} files, ended; they are kept in the workspace"


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
