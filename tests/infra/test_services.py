"""Servers are started once, adopted while they live, and never touched when they are not ours."""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from infra import processes, services
from infra.files import write_json
from infra.settings import settings


@pytest.fixture
def answering_url() -> str:
    class Always200(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Always200)
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/api"


def remember_sleeper(name: str, url: str) -> "subprocess.Popen[bytes]":
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    service = services.Service(process=processes.ref_of(sleeper.pid), url=url, log_path=Path("x.log"))
    write_json(settings().workspace / "services" / f"{name}.json", service.model_dump(mode="json"))
    return sleeper


def test_a_prefect_server_that_the_user_names_is_used_and_none_is_started(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, answering_url: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", answering_url)
    assert services.ensure_prefect() == answering_url
    assert not (workspace / "services").exists()


def test_a_prefect_server_that_the_user_names_and_that_is_away_is_a_clear_error(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/api does not answer"):
        services.ensure_prefect()


def test_a_living_server_of_ours_is_adopted(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    sleeper = remember_sleeper(services.PREFECT, "http://127.0.0.1:1/api")
    assert services.ensure_prefect() == "http://127.0.0.1:1/api"
    assert services.stop_all() == [services.PREFECT]
    sleeper.wait(10)  # raises where it still runs


def test_stopping_when_nothing_runs_is_no_error_and_a_dead_record_is_cleared(workspace: Path) -> None:
    sleeper = remember_sleeper(services.MLFLOW, "http://127.0.0.1:1")
    sleeper.kill()
    sleeper.wait()
    assert services.running_mlflow_url() is None
    assert services.stop_all() == []
    assert list((workspace / "services").iterdir()) == []


def test_this_folder_no_longer_names_a_prefect_server_that_was_stopped(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(services, "CHECKOUT", tmp_path)
    told = tmp_path / services.PREFECT_TOML_FILE
    ours = services.PREFECT_TOML.format(api_url="http://127.0.0.1:1/api")
    told.write_text(ours)
    services.stop_all()
    assert told.exists(), "it is another workspace's"
    monkeypatch.setattr(services, "DEFAULT_WORKSPACE", workspace)
    services.stop_all()
    assert not told.exists()
    told.write_text("[api]\n")  # the user's own
    services.stop_all()
    assert told.exists()


def test_an_mlflow_elsewhere_is_used_as_it_was_given(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_MLFLOW_URI", "http://elsewhere:5000")
    settings.cache_clear()
    assert services.ensure_mlflow() == "http://elsewhere:5000"


def test_every_deployment_in_prefect_yaml_names_a_flow_by_its_module() -> None:
    import importlib

    import yaml

    for deployment in yaml.safe_load((services.CHECKOUT / "prefect.yaml").read_text())["deployments"]:
        module, _, name = deployment["entrypoint"].rpartition(".")
        flow = getattr(importlib.import_module(module), name)
        assert flow.name in deployment["tags"]
        assert json.dumps(flow.parameters.model_dump_for_openapi())
