"""All calls of Prefect's API wait for the server by one rule."""

import asyncio
import contextvars
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread, Timer
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED, temporary_settings
from prefect.states import Completed
from shared import FIRST_PORT, becomes

from infra import failures
from infra.machine.ports import free_port
from infra.processes import children
from infra.services import prefect_server
from infra.services import servers as services
from infra.settings import CHECKOUT
from infra.store.files import write_json
from tasks.support import prefect_calls
from tasks.support.prefect_calls import FlowRunDeleted, PrefectAway

SERVER = """
import http.server
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"true")
http.server.HTTPServer(("127.0.0.1", {port}), Answers).serve_forever()
"""


class Api(BaseHTTPRequestHandler):
    """Says what it is told to say, then 200."""

    codes: list[int]

    def do_POST(self) -> None:
        self.codes.append(404)
        self.do_GET()

    def do_GET(self) -> None:
        self.send_response(self.codes.pop(0) if self.codes else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps("3.8.8").encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> int:
    return free_port(FIRST_PORT + 90)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, port: int, workspace: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(prefect_calls, "PAUSES_S", (0.1, 0.1, 0.1))
    monkeypatch.setattr(prefect_calls, "LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr(prefect_calls, "FIRST_LINE_S", 0.3)
    monkeypatch.setattr(prefect_calls, "WAITING", prefect_calls.Waiting())
    monkeypatch.setattr(prefect_calls, "_silence_prefect", lambda: None)
    (workspace / "services").mkdir()
    caplog.set_level(logging.INFO)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}):
        yield


@pytest.fixture
def serve(port: int) -> Iterator[Callable[[list[int]], None]]:
    servers: list[ThreadingHTTPServer] = []

    def begin(codes: list[int]) -> None:
        servers.append(ThreadingHTTPServer(("127.0.0.1", port), type("Told", (Api,), {"codes": codes})))
        Thread(target=servers[-1].serve_forever, daemon=True).start()

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def called() -> str:
    with get_client(sync_client=True) as client:
        return str(client.api_version())


async def acalled() -> str:
    async with get_client() as client:
        return str(await client.api_version())


CALLS = pytest.mark.parametrize("call", [called, lambda: asyncio.run(acalled())], ids=["sync", "async"])


@CALLS
@pytest.mark.parametrize("codes", [[503] * 8, [429, 502, 408, 503] * 2], ids=["busy", "each"])
def test_a_server_that_is_busy_is_asked_again(
    call: Callable[[], str], codes: list[int], serve: Callable[[list[int]], None]
) -> None:
    serve(list(codes))  # more often than Prefect's own client would ask
    assert call() == "3.8.8"


async def areport(flow_run: UUID) -> None:
    async with get_client() as client:
        await client.set_flow_run_state(flow_run, Completed())


def report(flow_run: UUID) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, Completed())


@pytest.mark.parametrize("call", [report, lambda flow_run: asyncio.run(areport(flow_run))], ids=["sync", "async"])
def test_a_flow_run_that_was_deleted_while_it_ran_is_named(
    call: Callable[[UUID], None], serve: Callable[[list[int]], None]
) -> None:
    serve([])
    flow_run, without_tokens = uuid4(), temporary_settings({PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False})
    with without_tokens, pytest.raises(FlowRunDeleted, match=f"does not have flow run {flow_run} any more.* run the same again"):
        call(flow_run)


@pytest.mark.parametrize("call", [report, lambda flow_run: asyncio.run(areport(flow_run))], ids=["sync", "async"])
def test_a_server_whose_disk_is_full_is_named(
    call: Callable[[UUID], None], serve: Callable[[list[int]], None], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve([500, 500])
    flow_run = uuid4()
    without_tokens = lambda: temporary_settings({PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False})  # noqa: E731
    with without_tokens(), pytest.raises(PrefectHTTPStatusError, match="500"):
        call(flow_run)  # there is room: the server's own mistake
    monkeypatch.setattr(prefect_calls, "FULL_BYTES", 2**60)
    full = f"No space left on device: Prefect's server answered HTTP 500 to the state of flow run {flow_run}, and the disk of {workspace} has"
    with without_tokens(), pytest.raises(OSError, match=full) as caught:
        call(flow_run)
    assert failures.is_disk_full(caught.value)


@CALLS
def test_the_first_call_of_a_connection_waits_for_a_server_that_is_away(
    call: Callable[[], str], serve: Callable[[list[int]], None], caplog: pytest.LogCaptureFixture, port: int
) -> None:
    Timer(4, serve, ([],)).start()
    assert call() == "3.8.8"
    assert becomes(lambda: "answers again" in caplog.text)
    (waiting,) = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
    assert f"http://127.0.0.1:{port}/api" in waiting and "was not started here, so the run ends after 600 s" in waiting
    assert "GET /api/admin/version: ConnectError" in waiting


def test_a_line_is_written_once_a_minute_however_many_calls_wait(
    serve: Callable[[list[int]], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefect_calls, "LINE_EVERY_S", 1.0)
    threads = [Thread(target=contextvars.copy_context().run, args=(called,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(4)
    serve([])
    for thread in threads:
        thread.join()
    assert 1 <= caplog.text.count("waiting for") < len(threads)


def test_a_server_that_stays_away_is_given_up_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, serve: Callable[[list[int]], None]
) -> None:
    monkeypatch.setattr(prefect_calls, "WAIT_S", 1.0)
    with pytest.raises(
        PrefectAway, match=r"did not answer for 1 s .*ConnectError.*Start it again, then run the same again"
    ) as caught:
        called()
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(prefect_calls, "WAIT_S", 600.0)
    with pytest.raises(PrefectAway):  # what the flow's end still wants to say does not wait once more
        called()
    prefect_calls.WAITING.is_given_up = False
    serve([])
    assert called() == "3.8.8"


def test_a_server_of_ours_that_ended_is_started_again_at_its_address(
    workspace: Path, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://127.0.0.1:{port}/api"
    monkeypatch.setattr(prefect_server, "command", lambda url: [sys.executable, "-c", SERVER.format(port=port)])
    first = services._start(services.PREFECT, prefect_server.command(url), {}, url=url, health=f"{url}/health")
    try:
        assert called() == "True"
        process = children.find(first.process)
        assert process is not None
        process.kill()
        assert becomes(lambda: children.find(first.process) is None)
        assert called() == "True"
        again = services.living(services.PREFECT)
        assert again is not None and again.process != first.process and again.url == url
        assert f"Prefect's server at {url} has ended: it is started again" in caplog.text
    finally:
        services.stop_all()


def test_a_server_of_ours_that_lives_and_does_not_answer_is_replaced(
    workspace: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{port}/api"
    monkeypatch.setattr(services, "HUNG_S", 0.5)
    monkeypatch.setattr(services, "NUM_LOOKS", 1)
    monkeypatch.setattr(prefect_server, "command", lambda url: [sys.executable, "-c", SERVER.format(port=port)])
    stuck = children.start([sys.executable, "-c", "import time; time.sleep(600)"], workspace / "stuck.log")
    about = services.Service(process=stuck, url=url, log_path=workspace / "stuck.log")
    write_json(workspace / "services/prefect.json", about.model_dump(mode="json"))
    try:
        assert called() == "True"
        assert children.find(stuck) is None
    finally:
        services.stop_all()


def test_a_server_of_somebody_else_is_not_touched(workspace: Path, port: int) -> None:
    about = services.Service(process=children.ref_of(1), url="http://127.0.0.1:1/api", log_path=workspace / "x.log")
    write_json(workspace / "services/prefect.json", about.model_dump(mode="json"))
    services.revive_prefect(f"http://127.0.0.1:{port}/api", 1000.0)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_process_that_ends_does_not_wait_for_what_its_threads_still_send(tmp_path: Path, port: int) -> None:
    program = (
        "import tasks\nimport threading\nfrom prefect.client.orchestration import get_client\n"
        "def call():\n    with get_client(sync_client=True) as client:\n        client.api_version()\n"
        "threading.Thread(target=call).start()\nprint('main is over', flush=True)\n"
    )
    environment = os.environ | {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "RATCHET_WORKSPACE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "main is over\n" and "PrefectAway" in done.stderr
