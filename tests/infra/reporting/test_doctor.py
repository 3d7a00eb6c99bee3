"""Each finding is true, and names its cure."""

import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from shared import FIRST_PORT, RATCHET

from infra import engines
from infra.engines.server.server_process import ServerState
from infra.processes import children
from infra.reporting import doctor
from infra.runs.run_state import REMOVED_RUNS
from infra.settings import CHECKOUT, settings
from infra.store.files import write_json


def wrong(findings: list[doctor.Finding]) -> dict[str, str]:
    return {each.what: each.cure for each in findings if each.level != "ok"}


def test_packages_that_are_not_the_locked_ones_are_named(tmp_path: Path) -> None:
    here = version("pydantic")
    (tmp_path / "lock.txt").write_text(f"# comment\npydantic=={here}+cpu\nhttpx==0.0.1\nno-such-package==1.2\n")
    assert doctor.differing(tmp_path / "lock.txt") == [
        ("httpx", "0.0.1", version("httpx")),
        ("no-such-package", "1.2", None),
    ]


def test_this_environment_is_that_of_its_lock() -> None:
    assert doctor.differing(doctor.LOCK) == []


def test_a_wrong_setting_is_the_last_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_ENGINE_PRT", "1")
    settings.cache_clear()
    try:
        *_, last = doctor.findings()
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert last.level == "problem" and "nearest is RATCHET_ENGINE_PORT" in last.what and last.cure


def test_disk_ports_servers_and_leftovers_are_looked_at(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = FIRST_PORT + 295
    for name, value in (
        ("RATCHET_MIN_FREE_GIB", "1000000"),
        ("RATCHET_SGLANG_PYTHON", "/no/python"),
        ("RATCHET_MLFLOW_PORT", str(port)),
        ("RATCHET_MLFLOW_URI", f"http://127.0.0.1:{port + 1}"),
    ):
        monkeypatch.setenv(name, value)
    settings.cache_clear()
    write_json(workspace / "workspace.json", {"layout": 1})
    (workspace / REMOVED_RUNS).mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        found = wrong(list(doctor.findings()))
    text = "\n".join(found)
    for words in (
        *(
            "a step needs 1e+06",
            "SGLang's interpreter /no/python does not exist",
            f"port {port} for mlflow is taken by pid {os.getpid()}",
        ),
        *(f"RATCHET_MLFLOW_URI http://127.0.0.1:{port + 1} does not answer", "has layout 1", "removal of a run was interrupted"),
    ):
        assert words in text, text
    assert all(found.values()), "a finding without a cure"


def test_the_port_of_an_engine_of_this_workspace_is_no_finding(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, me = taken.getsockname()[1], children.ref_of(os.getpid())
        monkeypatch.setenv("RATCHET_ENGINE_PORT", str(port))
        settings.cache_clear()
        assert f"port {port} for engine is taken by pid {me.pid}" in "\n".join(wrong(list(doctor.findings())))
        state = ServerState(
            kind="sglang", process=me, url=f"http://127.0.0.1:{port}", identity="x", log_path=workspace / "log", launch=1
        )
        monkeypatch.setattr(engines, "recorded", lambda: [state])
        assert f"port {port} for engine" not in "\n".join(wrong(list(doctor.findings())))


def test_the_command_fails_where_there_is_a_problem_and_shows_the_cure(workspace: Path) -> None:
    environment = os.environ | {"RATCHET_SGLANG_PYTHON": "/no/python"}
    done = subprocess.run([*RATCHET, "doctor"], cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "problem  SGLang's interpreter /no/python does not exist\n         cure: ./infra/quickstart, or set" in done.stdout
    assert f"Python {sys.version.split()[0]}" not in done.stdout
