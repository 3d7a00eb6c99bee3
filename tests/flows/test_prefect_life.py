"""Pause, resume, cancel and death of a flow run, with Prefect's own server and worker, as its UI does them.

The engine is scripted, the trainer is the real one: while it starts there is time to do something to the flow run.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
from shared import FIRST_PORT

from infra.config import RunConfig
from infra.processes import children
from infra.services import crash_detection, deployments, prefect_api, servers
from infra.settings import settings
from infra.store.layout import run_folder

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]

PORT = FIRST_PORT + 50
PATIENCE_S = 180.0
SILENCE_S = 40.0
START_S = 60.0
AWAY_S = 20.0


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server and a worker in a workspace of their own; a flow run that fell silent counts as dead sooner than usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_WORKSPACE", str(tmp_path_factory.mktemp("life")))
        patch.setenv("RATCHET_PREFECT_PORT", str(PORT))
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.setattr(crash_detection, "SILENCE_S", SILENCE_S)
        patch.setattr(crash_detection, "START_S", START_S)
        settings.cache_clear()
        api_url = servers.ensure_prefect()
        try:
            servers.deploy(api_url)
            servers.ensure_worker(api_url)
            with prefect_api.api_client(api_url) as client:
                yield client
        finally:
            servers.stop_all()
            settings.cache_clear()


@pytest.fixture
def config(request: pytest.FixtureRequest, scripted: RunConfig) -> RunConfig:
    return scripted.but(name=request.node.name[:60].replace("[", "-"))


def asked(prefect: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """A server whose database is busy is asked again, as Prefect's own clients do."""
    for _ in range(30):
        answer = prefect.request(method, path, json=body)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
        time.sleep(1)
    return answer.raise_for_status().json()


def begin(prefect: httpx.Client, config: RunConfig) -> str:
    deployment = asked(prefect, "GET", "/deployments/name/rl-step/local")
    body = {"parameters": {"config": config.model_dump(mode="json")}}
    return str(asked(prefect, "POST", f"/deployments/{deployment['id']}/create_flow_run", body)["id"])


def set_state(prefect: httpx.Client, flow_run: str, state: dict[str, Any]) -> str:
    """As the buttons of the UI do it; gives the server's verdict."""
    return str(asked(prefect, "POST", f"/flow_runs/{flow_run}/set_state", {"state": state, "force": False})["status"])


def state_of(prefect: httpx.Client, flow_run: str) -> str:
    return str(asked(prefect, "GET", f"/flow_runs/{flow_run}")["state"]["name"])


def until(what: Callable[[], Any], message: str) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < PATIENCE_S, message
        time.sleep(0.2)
    return time.monotonic() - began


def is_in(prefect: httpx.Client, flow_run: str, *names: str) -> None:
    until(lambda: state_of(prefect, flow_run) in names, f"flow run never got {names}")


def reached_training(config: RunConfig) -> None:
    until((run_folder(config.name) / "steps/000000/train/job.json").exists, "training never began")


def command_line(process: psutil.Process) -> str:
    """Empty for one that has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def flow_processes() -> list[psutil.Process]:
    """The worker's children that run flows, without what those started."""
    worker = servers.living(servers.WORKER)
    found = children.find(worker.process) if worker else None
    return [child for child in (found.children(recursive=True) if found else []) if "prefect" in command_line(child)]


def trainers(config: RunConfig) -> list[psutil.Process]:
    lines = {process: command_line(process) for process in psutil.process_iter()}
    return [process for process, line in lines.items() if "infra.megatron" in line and str(run_folder(config.name)) in line]


@pytest.mark.full  # its sample is the cancelled run
def test_a_run_that_the_ui_paused_ends_its_process_and_goes_on_where_it_was(prefect: httpx.Client, config: RunConfig) -> None:
    flow_run = begin(prefect, config)
    reached_training(config)
    in_an_hour = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    details = {"pause_timeout": in_an_hour, "pause_reschedule": True}
    assert set_state(prefect, flow_run, {"type": "PAUSED", "name": "Suspended", "state_details": details}) == "ACCEPT"
    until(lambda: not flow_processes(), "the paused run's process did not end")
    assert state_of(prefect, flow_run) == "Suspended"
    step = run_folder(config.name) / "steps/000000"
    assert not (step / "manifest.json").exists(), "the whole step was made in spite of the pause"
    trained = (run_folder(config.name) / "adapters/000001/adapter_model.safetensors").stat().st_mtime_ns
    sampled = (step / "samples.parquet").stat().st_mtime_ns
    asked(prefect, "POST", f"/flow_runs/{flow_run}/resume")
    is_in(prefect, flow_run, "Completed")
    assert (step / "samples.parquet").stat().st_mtime_ns == sampled, "sampled again"
    assert (run_folder(config.name) / "adapters/000001/adapter_model.safetensors").stat().st_mtime_ns == trained, "trained again"
    assert (step / "manifest.json").exists()


def test_a_cancelled_run_ends_its_trainer_and_the_next_one_goes_on(prefect: httpx.Client, config: RunConfig) -> None:
    flow_run = begin(prefect, config)
    reached_training(config)
    until(lambda: trainers(config), "no trainer")
    assert set_state(prefect, flow_run, {"type": "CANCELLING", "name": "Cancelling"}) == "ACCEPT"
    is_in(prefect, flow_run, "Cancelled")
    until(lambda: not trainers(config) and not flow_processes(), "cancelled, and still at work")
    sampled = (run_folder(config.name) / "steps/000000/samples.parquet").stat().st_mtime_ns
    again = begin(prefect, config)
    is_in(prefect, again, "Completed")
    assert (run_folder(config.name) / "steps/000000/samples.parquet").stat().st_mtime_ns == sampled, "sampled again"


def test_a_step_goes_on_when_prefects_server_was_away(prefect: httpx.Client, config: RunConfig) -> None:
    flow_run = begin(prefect, config)
    reached_training(config)
    server = servers.living(servers.PREFECT)
    assert server is not None
    children.stop(server.process, grace_s=0.1)
    with pytest.raises(httpx.ConnectError):
        prefect.get("/health")
    time.sleep(AWAY_S)
    assert servers.ensure_prefect() == str(prefect.base_url).rstrip("/")
    is_in(prefect, flow_run, "Completed")
    assert (run_folder(config.name) / "steps/000000/manifest.json").exists()


def test_a_run_that_died_with_its_worker_crashes_and_its_successor_goes_on(prefect: httpx.Client, config: RunConfig) -> None:
    flow_run = begin(prefect, config)
    reached_training(config)
    worker = servers.living(servers.WORKER)
    assert worker is not None
    ended = [process for process in [children.find(worker.process), *flow_processes()] if process]
    for process in ended:
        process.kill()
    stuck = begin(prefect, config.but(name="stuck"))
    assert set_state(prefect, stuck, {"type": "PENDING", "name": "Pending"}) == "ACCEPT"  # as if a worker had taken it and died
    assert state_of(prefect, flow_run) == "Running"
    seconds = until(lambda: state_of(prefect, flow_run) == "Crashed", "still Running, and nobody runs it")
    print(f"Crashed {seconds:.0f} s after the kill, with a silence of {SILENCE_S:g} s")
    is_in(prefect, stuck, "Crashed")
    servers.ensure_worker(str(prefect.base_url).rstrip("/"))
    again = begin(prefect, config)
    is_in(prefect, again, "Completed")


def test_deploying_again_adds_no_second_automation(prefect: httpx.Client) -> None:
    crash_detection.ensure(str(prefect.base_url).rstrip("/"), deployments.WORK_POOL)
    found = asked(prefect, "POST", "/automations/filter", {})
    assert len(found) == 2
    ours = asked(prefect, "POST", "/deployments/filter", {})
    for automation in found:
        watched = automation["trigger"]["match_related"]["prefect.resource.id"]
        assert sorted(watched) == sorted(f"prefect.deployment.{deployment['id']}" for deployment in ours)
