"""The servers that the flows need: Prefect's API, a worker, MLflow. Started on loopback or adopted, and ended only if we started them.

`services/<name>.json` in the workspace holds the pid and start time of each. A Prefect API named by PREFECT_API_URL, or an MLflow named by
RATCHET_MLFLOW_URI, is used as it is and never ended.
"""

import contextlib
import fcntl
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, SecretStr

from infra.machine import ports
from infra.processes import children
from infra.processes.children import ProcessRef
from infra.progress.brief import brief
from infra.services import crash_detection, deployments, flow_runs, prefect_address, prefect_password, prefect_server
from infra.settings import CHECKOUT, DEFAULT_WORKSPACE, LOOPBACK, host_port, main_python, settings
from infra.store.files import read_note, write_json, write_note, write_secret
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
HUNG_S = 60.0
"""Seconds without an answer after which a running server of ours is restarted."""
NUM_LOOKS = 5
"""Health checks before a restart, of 5 s each."""
PREFECT_TOML_FILE = "prefect.toml"
PREFECT_TOML = """# Written by ratchet, so that `prefect` in this folder finds its server.
[api]
url = "{api_url}"
"""
PREFECT, MLFLOW, WORKER = "prefect", "mlflow", "worker"


class Service(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    process: ProcessRef
    url: str
    log_path: Path


def _memory(name: str) -> Path:
    return Workspace.here().services / f"{name}.json"


def living(name: str) -> Service | None:
    """Return a service that we started and that still runs."""
    service = read_note(_memory(name), Service)
    return service if service and children.find(service.process) else None


def running_mlflow_url() -> str | None:
    """Return the URL of this workspace's MLflow server, if it runs."""
    service = living(MLFLOW)
    return service.url if service else None


def ensure_prefect() -> str:
    """Return the URL of a Prefect API that answers."""
    if given := prefect_address.given():
        flow_runs.close_dead(given)
        return given
    if living(PREFECT) is None:
        _check_host()
    with _one_starter(PREFECT):
        service = _adopt(PREFECT) or _start_on_free_port(_start_prefect, settings().prefect_port, settings().host)
    prefect_address.check_password(service.url)
    flow_runs.close_dead(service.url)
    return service.url


def _check_host() -> None:
    """Raises ValueError if a Prefect server that we start would listen beyond loopback without a password chosen by the user."""
    if settings().prefect_auth is None and not settings().is_loopback:
        raise ValueError(
            f"RATCHET_HOST {settings().host} would open Prefect's server, which can start programs here, to the network: set "
            "RATCHET_PREFECT_AUTH to user:password, or leave RATCHET_HOST at 127.0.0.1"
        )


def is_our_prefect(api_url: str) -> bool:
    """Whether the server at api_url was started by this workspace. It need not be running."""
    note = read_note(_memory(PREFECT), Service)
    return note is not None and note.url == api_url


def revive_prefect(api_url: str, waited_s: float) -> None:
    """Restart our Prefect server at its address if it ended, or if it has not answered for HUNG_S.

    waited_s: Seconds since its last known answer.
    """
    with _one_starter(PREFECT):  # several flows may need it
        if not is_our_prefect(api_url) or _answers(f"{api_url}/health"):
            return
        if (service := living(PREFECT)) is not None:
            if waited_s < HUNG_S or any(_answers(f"{api_url}/health") for _ in range(NUM_LOOKS)):
                return  # it is only slow
            log.warning(
                "Prefect's server at %s lives and has not answered for %.0f s: it is ended and started again", api_url, waited_s
            )
            children.stop(service.process)
        else:
            log.warning("Prefect's server at %s has ended: it is started again", api_url)
        _start_prefect_at(api_url)


def _start_prefect(port: int) -> Service:
    return _start_prefect_at(f"http://{host_port(settings().own_host, port)}/api")


def _start_prefect_at(url: str) -> Service:
    return _start(PREFECT, prefect_server.command(url), prefect_server.environment(url), url=url, health=f"{url}/health")


def ensure_mlflow() -> str:
    """Return the URL of an MLflow tracking server: RATCHET_MLFLOW_URI if given, else ours. Ours has no password and listens on loopback only."""
    if settings().mlflow_uri:
        return settings().mlflow_uri or ""
    with _one_starter(MLFLOW):
        service = _adopt(MLFLOW) or _start_on_free_port(_start_mlflow, settings().mlflow_port, LOOPBACK)
    return service.url


def _start_mlflow(port: int) -> Service:
    url, folder = f"http://{LOOPBACK}:{port}", Workspace.here().mlflow
    (folder / "artifacts").mkdir(parents=True, exist_ok=True)
    argv = [str(main_python()), "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"]
    argv += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts")]
    # Without the switch it also starts job consumers, 2 GB of them.
    return _start(MLFLOW, argv, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, url=url, health=f"{url}/health")


def ensure_worker(api_url: str) -> None:
    """Make sure that a process worker runs for our work pool. A worker of another server is replaced, and one that was there before the server:
    it would start flow runs, and cancel none. One that is at work stays until it is not."""
    if (worker := living(WORKER)) is not None:
        if worker.url == api_url and (not _is_older_than_prefect(worker) or _is_at_work(worker)):
            return
        children.stop(worker.process)
    argv = [str(main_python()), "-m", "prefect", "worker", "start", "--pool", deployments.WORK_POOL, "--type", "process"]
    environment = prefect_password.client_environment(api_url) | {
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_LOCAL_STORAGE_PATH": str(settings().results),  # its flow runs inherit this
        "RATCHET_WORKSPACE": str(settings().workspace),
    }
    log_path = Workspace.here().logs / f"{WORKER}.log"
    _remember(WORKER, Service(process=_launch(WORKER, argv, log_path, environment), url=api_url, log_path=log_path))


def _is_older_than_prefect(worker: Service) -> bool:
    """Whether our server was started after the worker. Prefect's worker gives up looking for what is to be cancelled when its server goes away
    (3.8.8, prefect/_internal/observers.py)."""
    server = living(PREFECT)
    return server is not None and worker.process.started_ticks < server.process.started_ticks


def _is_at_work(worker: Service) -> bool:
    """Whether flow runs run under the worker."""
    process = children.find(worker.process)
    return process is not None and bool(process.children())


def deploy(api_url: str) -> None:
    """Make sure that the server has our work pool and deployments, and the detection of dead flow runs."""
    deployments.ensure(api_url)
    crash_detection.ensure(api_url, deployments.WORK_POOL)
    if settings().workspace == DEFAULT_WORKSPACE:
        tell_prefect_by_hand(api_url)


def tell_prefect_by_hand(api_url: str) -> None:
    """Write the server's address and its generated password to a file that `prefect` in the checkout reads. A password set by the user is
    left out."""
    auth = prefect_password.of(api_url) if settings().prefect_auth is None else None
    password = f"auth_string = {json.dumps(auth.get_secret_value())}\n" if auth else ""
    write_secret(CHECKOUT / PREFECT_TOML_FILE, SecretStr(PREFECT_TOML.format(api_url=api_url) + password))


def stop_all() -> list[str]:
    """End all running servers that we started, the worker first. Returns their names."""
    stopped = []
    for name in (WORKER, PREFECT, MLFLOW):
        if service := living(name):
            children.stop(service.process)
            stopped.append(name)
        elif _end_unnoted(name):
            stopped.append(name)
        _memory(name).unlink(missing_ok=True)
        _launched(name).unlink(missing_ok=True)
    told = CHECKOUT / PREFECT_TOML_FILE
    if (
        settings().workspace == DEFAULT_WORKSPACE
        and told.exists()
        and told.read_text().startswith(PREFECT_TOML.partition("\n")[0])
    ):
        told.unlink()  # otherwise the next `prefect` command in this folder would call a server that is gone
    return stopped


@contextlib.contextmanager
def _one_starter(name: str) -> Iterator[None]:
    """Make sure that only one process starts a server: several commands and flows may miss it at the same moment."""
    path = Workspace.here().services / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _adopt(name: str) -> Service | None:
    """Return a running server of ours, once it answers. The command that started it may have ended in the meantime.

    Raises:
        ProgramTimedOut: if it has not answered after START_TIMEOUT_S. It is ended.
    """
    service = living(name)
    if service is None:
        return None
    if not _answers(f"{service.url}/health"):
        log.info("waiting for %s at %s, which lives and does not answer yet; its log is %s", name, service.url, service.log_path)
        children.wait_until(
            lambda: _answers(f"{service.url}/health"),
            what=name,
            timeout_s=START_TIMEOUT_S,
            ref=service.process,
            log_path=service.log_path,
        )
    return service


def _start_on_free_port(start: Callable[[int], Service], first_choice: int, host: str) -> Service:
    """Start a server at first_choice or a later port. If the port was taken in the meantime, the next one is tried."""
    while True:
        with ports.reserved(first_choice, host) as port:
            try:
                return start(port)
            except children.ProgramFailed:
                if ports.is_free(port, host):
                    raise
                log.warning("port %d was taken while the server started, trying the next", port)


def _start(name: str, argv: list[str], environment: dict[str, str], *, url: str, health: str) -> Service:
    log_path = Workspace.here().logs / f"{name}.log"
    brief.info("starting %s at %s; its log is %s", name, url, log_path)
    service = Service(process=_launch(name, argv, log_path, environment), url=url, log_path=log_path)
    _remember(name, service)

    def is_ready() -> bool:
        return _answers(health) and _listens(service)

    children.wait_until(is_ready, what=name, timeout_s=START_TIMEOUT_S, ref=service.process, log_path=log_path)
    return service


def _listens(service: Service) -> bool:
    """Whether this service is the one that listens at its address: another program may have taken the port while it started."""
    pids = {pid for pid in ports.listeners(urlsplit(service.url).port or 0) if pid}
    return bool(children.of_program(pids, service.process.program))


def _launch(name: str, argv: list[str], log_path: Path, environment: dict[str, str]) -> ProcessRef:
    """Start a server whose program id is recorded before it runs. If this process ends before its note is written, the server is still found."""
    _end_unnoted(name)
    program = children.new_program()
    write_note(_launched(name), {"program": program})
    return children.start(argv, log_path, environment, CHECKOUT, program=program)


def _launched(name: str) -> Path:
    return Workspace.here().services / "launched" / f"{name}.json"


def _end_unnoted(name: str) -> bool:
    """End a server that was launched but whose note was never written. Returns whether one was running."""
    launched, noted = read_note(_launched(name), dict[str, str]) or {}, read_note(_memory(name), Service)
    program = launched.get("program")
    if program is None or (noted and noted.process.program == program):
        return False
    if not children.members(program):
        return False
    log.warning("ending the %s server that an earlier command started and could not note", name)
    children.stop_program(program)
    return True


def _remember(name: str, service: Service) -> None:
    write_json(_memory(name), service.model_dump(mode="json"))


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == httpx.codes.OK
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
