"""A generated password is one file of its owner's, is kept, and is sent to its own server only."""

import os
import stat
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from flows.cli.app import run
from infra.processes import children
from infra.services import prefect_password, prefect_server, servers
from infra.settings import settings
from infra.store.files import write_json

URL = "http://127.0.0.1:4200/api"


@pytest.fixture(autouse=True)
def _nothing_inherited(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "RATCHET_PREFECT_AUTH", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def refusing_url() -> Iterator[str]:
    class RefusesAllButHealth(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), RefusesAllButHealth)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/api"
    server.shutdown()


def test_a_server_of_ours_has_a_password_that_only_its_owner_can_read(workspace: Path) -> None:
    auth = prefect_server.environment(URL)["PREFECT_SERVER_API_AUTH_STRING"]
    user, _, password = auth.partition(":")
    assert user == "ratchet" and len(password) >= 43
    assert stat.S_IMODE(prefect_password.path().stat().st_mode) == 0o600
    assert prefect_password.client_environment(URL)["PREFECT_API_AUTH_STRING"] == auth


def test_the_password_stays_when_the_server_is_started_again_elsewhere(workspace: Path) -> None:
    first, second = prefect_server.environment(URL), prefect_server.environment("http://127.0.0.1:4201/api")
    assert first["PREFECT_SERVER_API_AUTH_STRING"] == second["PREFECT_SERVER_API_AUTH_STRING"]


def test_the_password_is_sent_to_no_other_server(workspace: Path) -> None:
    prefect_server.environment(URL)
    for elsewhere in ("http://elsewhere:4200/api", "http://127.0.0.1:4201/api"):
        assert prefect_password.of(elsewhere) is None
        assert "PREFECT_API_AUTH_STRING" not in prefect_password.client_environment(elsewhere)


def test_a_password_that_the_user_sets_is_taken_and_not_written_down(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_PREFECT_AUTH", "me:hunter2")
    settings.cache_clear()
    assert prefect_server.environment(URL)["PREFECT_SERVER_API_AUTH_STRING"] == "me:hunter2"
    assert not prefect_password.path().exists()


def test_a_file_that_holds_no_password_is_replaced(workspace: Path) -> None:
    prefect_password.path().parent.mkdir(parents=True)
    prefect_password.path().write_text("")
    assert prefect_password.of(URL) is None
    assert prefect_server.environment(URL)["PREFECT_SERVER_API_AUTH_STRING"].startswith("ratchet:")


def test_only_the_origins_of_the_servers_own_pages_are_allowed() -> None:
    allowed = prefect_server.environment(URL)["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
    assert allowed == "http://127.0.0.1:4200,http://localhost:4200"


def test_a_server_that_refuses_our_password_is_one_clear_line(refusing_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", refusing_url)
    with pytest.raises(ValueError, match=r"refuses our password: set PREFECT_API_AUTH_STRING") as caught:
        servers.ensure_prefect()
    assert "\n" not in str(caught.value)


def test_one_command_shows_the_password(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["status", "--password"])
    assert capsys.readouterr().err.startswith("error: no Prefect server of this workspace is running")
    auth = prefect_server.environment(URL)["PREFECT_SERVER_API_AUTH_STRING"]
    here = servers.Service(process=children.ref_of(os.getpid()), url=URL, log_path=Path("x.log"))
    write_json(workspace / "services/prefect.json", here.model_dump(mode="json"))
    run(["status", "--password"])
    assert capsys.readouterr().out == f"{auth}\n"


def test_prefect_by_hand_in_the_checkout_finds_server_and_password(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    auth = prefect_server.environment(URL)["PREFECT_SERVER_API_AUTH_STRING"]
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.setattr(servers, "CHECKOUT", checkout)
    servers.tell_prefect_by_hand(URL)
    told = checkout / servers.PREFECT_TOML_FILE
    assert tomllib.loads(told.read_text())["api"] == {"url": URL, "auth_string": auth}
    assert stat.S_IMODE(told.stat().st_mode) == 0o600
