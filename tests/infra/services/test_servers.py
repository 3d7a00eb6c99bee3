"""Servers are started once, adopted while they live, and never touched when they are not ours."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from shared import is_gone

from infra.processes import children
from infra.services import prefect_address, prefect_server, servers
from infra.settings import settings
from infra.store.files import write_json


class Always200(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answering_url() -> str:
    server = HTTPServer(("127.0.0.1", 0), Always200)
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/api"


def remember_sleeper(name: str, url: str, *, has_child: bool = False) -> "subprocess.Popen[bytes]":
    sleeps = "import time; time.sleep(60)"
    if has_child:
        sleeps = (
            f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeps!r}]); print('up', flush=True); {sleeps}"
        )
    sleeper = subprocess.Popen([sys.executable, "-c", sleeps], stdout=subprocess.PIPE)
    assert not has_child or (sleeper.stdout and sleeper.stdout.readline())
    service = servers.Service(process=children.ref_of(sleeper.pid), url=url, log_path=Path("x.log"))
    write_json(settings().workspace / "services" / f"{name}.json", service.model_dump(mode="json"))
    return sleeper


def test_a_prefect_server_that_the_user_names_is_used_and_none_is_started(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, answering_url: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", answering_url)
    assert servers.ensure_prefect() == answering_url
    assert not (workspace / "services").exists()


def test_a_prefect_server_that_the_user_names_and_that_is_away_is_a_clear_error(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/api does not answer as Prefect"):
        servers.ensure_prefect()


@pytest.fixture
def prefect_with_pages() -> Iterator[str]:
    """The address of a server whose API is at /api; other paths give a page, or 404."""

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_api = self.path == "/api/health"
            self.send_response(200 if is_api or self.path.startswith("/pages") else 404)
            self.send_header("Content-Type", "application/json" if is_api else "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(b"true" if is_api else b"<title>a page</title>")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize("slash", ["", "/"])
def test_the_address_of_a_prefect_servers_pages_is_refused_with_that_of_its_api(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, prefect_with_pages: str, slash: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_with_pages + slash)
    with pytest.raises(ValueError) as caught:
        servers.ensure_prefect()
    assert str(caught.value) == (
        f"PREFECT_API_URL {prefect_with_pages}{slash} is the address of the server's pages, not of its API: set it to {prefect_with_pages}/api"
    )
    monkeypatch.setenv("PREFECT_API_URL", f"{prefect_with_pages}/api{slash}")
    assert prefect_address.given() == f"{prefect_with_pages}/api"


@pytest.mark.parametrize("path", ["/pages", "/elsewhere"])
def test_an_address_that_is_no_api_is_refused_with_what_one_looks_like(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, prefect_with_pages: str, path: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_with_pages + path)
    with pytest.raises(
        ValueError, match=f"{path} does not answer as Prefect's API .the address of an API is that of the server with /api"
    ):
        servers.ensure_prefect()


@pytest.mark.parametrize("given", ["nonsense", "127.0.0.1:4200/api", "ftp://127.0.0.1/api"])
def test_what_is_no_address_is_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("PREFECT_API_URL", given)
    with pytest.raises(ValueError, match=r"is no address of a server: set it to http://HOST:PORT/api"):
        servers.ensure_prefect()
    monkeypatch.setenv("PREFECT_API_URL", "http://[")
    with pytest.raises(ValueError, match=r"http://\[ does not answer"):
        servers.ensure_prefect()


def test_a_living_server_of_ours_is_adopted(workspace: Path, monkeypatch: pytest.MonkeyPatch, answering_url: str) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    sleeper = remember_sleeper(servers.PREFECT, answering_url)
    assert servers.ensure_prefect() == answering_url
    assert servers.stop_all() == [servers.PREFECT]
    sleeper.wait(10)  # raises where it still runs


def test_a_server_that_somebody_started_a_moment_ago_is_waited_for(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow that had missed it, say: it is on record before it listens."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    server = HTTPServer(("127.0.0.1", 0), Always200, bind_and_activate=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        server.server_address = probe.getsockname()
    url = f"http://127.0.0.1:{server.server_address[1]}/api"

    def listen() -> None:
        time.sleep(1)
        server.server_bind()
        server.server_activate()
        server.serve_forever()

    sleeper = remember_sleeper("prefect", url)
    try:
        Thread(target=listen, daemon=True).start()
        assert servers.ensure_prefect() == url
        assert httpx.get(f"{url}/health").status_code == httpx.codes.OK
    finally:
        sleeper.kill()
        server.shutdown()


def test_a_server_that_ends_while_it_starts_is_an_error_that_shows_its_log(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    sleeper = remember_sleeper("mlflow", "http://127.0.0.1:9")
    Thread(target=lambda: (time.sleep(0.5), sleeper.kill(), sleeper.wait()), daemon=True).start()
    with pytest.raises(children.ProgramFailed, match=r"mlflow ended while starting; the end of x\.log"):
        servers.ensure_mlflow()


def test_stopping_when_nothing_runs_is_no_error_and_a_dead_record_is_cleared(workspace: Path) -> None:
    sleeper = remember_sleeper(servers.MLFLOW, "http://127.0.0.1:1")
    sleeper.kill()
    sleeper.wait()
    assert servers.running_mlflow_url() is None
    assert servers.stop_all() == []
    assert list((workspace / "services").iterdir()) == []


def test_this_folder_no_longer_names_a_prefect_server_that_was_stopped(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(servers, "CHECKOUT", tmp_path)
    told = tmp_path / servers.PREFECT_TOML_FILE
    ours = servers.PREFECT_TOML.format(api_url="http://127.0.0.1:1/api")
    told.write_text(ours)
    servers.stop_all()
    assert told.exists(), "it is another workspace's"
    monkeypatch.setattr(servers, "DEFAULT_WORKSPACE", workspace)
    servers.stop_all()
    assert not told.exists()
    told.write_text("[api]\n")  # the user's own
    servers.stop_all()
    assert told.exists()


def test_an_mlflow_elsewhere_is_used_as_it_was_given(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_MLFLOW_URI", "http://elsewhere:5000")
    settings.cache_clear()
    assert servers.ensure_mlflow() == "http://elsewhere:5000"


def test_every_deployment_in_prefect_yaml_names_a_flow_by_its_module() -> None:
    import importlib

    import yaml

    for deployment in yaml.safe_load((servers.CHECKOUT / "prefect.yaml").read_text())["deployments"]:
        module, _, name = deployment["entrypoint"].rpartition(".")
        flow = getattr(importlib.import_module(module), name)
        assert flow.name in deployment["tags"]
        assert json.dumps(flow.parameters.model_dump_for_openapi())


SLOW_SERVER = """#!{python}
import http.server, sys, time
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
time.sleep(1)  # as real ones, which import for seconds before they listen
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
"""


@pytest.fixture
def slow_servers(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Prefect and MLflow are stand-ins, and both have the same first choice of a port, which is taken; gives that port."""
    program = workspace / "python"
    program.write_text(SLOW_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(prefect_server, "main_python", lambda: program)
    monkeypatch.setattr(servers, "main_python", lambda: program)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        for name in ("PREFECT_API_URL", "RATCHET_MLFLOW_URI"):
            monkeypatch.delenv(name, raising=False)
        for name in ("PREFECT", "MLFLOW"):
            monkeypatch.setenv(f"RATCHET_{name}_PORT", str(port))
        settings.cache_clear()
        yield port
        servers.stop_all()


def test_servers_that_are_started_side_by_side_take_different_ports(slow_servers: int) -> None:
    with ThreadPoolExecutor() as pool:
        started = [pool.submit(servers.ensure_prefect), pool.submit(servers.ensure_mlflow)]
        used = {urlsplit(each.result()).port for each in started}
    assert len(used) == 2 and slow_servers not in used


def test_a_port_that_is_taken_while_a_server_starts_is_not_its_end(
    slow_servers: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = servers._start
    intruders: list[HTTPServer] = []

    def while_somebody_takes_the_port(*args: Any, **how: Any) -> servers.Service:
        if not intruders:  # a healthy server, which must not be taken for ours
            intruders.append(HTTPServer(("127.0.0.1", urlsplit(how["url"]).port or 0), Always200))
            Thread(target=intruders[0].serve_forever, daemon=True).start()
        started = real(*args, **how)
        assert isinstance(started, servers.Service)
        return started

    monkeypatch.setattr(servers, "_start", while_somebody_takes_the_port)
    url = servers.ensure_mlflow()
    taken = intruders[0].server_port
    intruders[0].shutdown()
    intruders[0].server_close()
    assert urlsplit(url).port != taken
    assert f"port {taken} was taken while the server started, trying the next" in caplog.text


START_AND_DIE = """
import os, signal
from infra.services import servers
servers._remember = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
servers._start("mlflow", ["sleep", "600"], {}, url="http://127.0.0.1:9", health="http://127.0.0.1:9")
"""


def test_a_server_whose_starter_was_killed_before_it_could_note_it_is_ended_by_stop(workspace: Path) -> None:
    subprocess.run([sys.executable, "-c", START_AND_DIE], cwd=servers.CHECKOUT, check=False)
    (sleeper,) = [each for each in psutil.process_iter() if _environment_of(each) == str(workspace)]
    try:
        assert sleeper.cmdline() == ["sleep", "600"]
        assert servers.stop_all() == ["mlflow"]
        assert is_gone(sleeper.pid)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            sleeper.kill()


def _environment_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("RATCHET_WORKSPACE", "")
    return ""


@pytest.mark.parametrize(("is_older", "is_at_work", "stays"), [(True, False, False), (True, True, True), (False, False, True)])
def test_a_worker_that_was_there_before_the_server_is_started_again_unless_it_is_at_work(
    is_older: bool, is_at_work: bool, stays: bool, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, tick_s = "http://127.0.0.1:1/api", 0.02
    names = (servers.WORKER, servers.PREFECT) if is_older else (servers.PREFECT, servers.WORKER)
    started, refs = {}, {}
    for name in names:
        started[name] = remember_sleeper(name, url, has_child=is_at_work)
        refs[name] = children.ref_of(started[name].pid)
        time.sleep(tick_s)
    launched: list[str] = []

    def launch(name: str, *_: object) -> children.ProcessRef:
        launched.append(name)
        return refs[servers.PREFECT]

    monkeypatch.setattr(servers, "_launch", launch)
    try:
        servers.ensure_worker(url)
        assert launched == ([] if stays else [servers.WORKER])
        assert (started[servers.WORKER].poll() is None) is stays
    finally:
        for ref in refs.values():
            children.stop(ref, grace_s=0.1)
