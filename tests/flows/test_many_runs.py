"""Eight runs at once on one Prefect server, with SQLite and with PostgreSQL as docs/postgresql.md sets it up: all finish."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared import FIRST_PORT, RATCHET

from infra.config import RunConfig
from infra.services import prefect_api, prefect_password, servers
from infra.settings import CHECKOUT, settings
from infra.store.files import read_json

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

NUM_RUNS, NUM_STEPS, LIMIT_S = 8, 2, 1200
PORT = FIRST_PORT + 600
BIN = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"))), Path("/nowhere"))
PAGE = CHECKOUT / "docs/postgresql.md"


class Postgres:
    """A cluster of this test's own. PostgreSQL refuses to run as root: its own user does it then."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_root = folder, os.geteuid() == 0
        if self.is_root:
            shutil.chown(folder, "postgres")

    def run(self, *command: str) -> None:
        prefix = ["runuser", "-u", "postgres", "--"] if self.is_root else []
        environment = os.environ | {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(PORT + 1),
            "PGUSER": "postgres",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            [*prefix, *command], env=environment, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
        )
        assert done.returncode == 0, done.stderr.decode()

    def start(self) -> None:
        self.run(f"{BIN}/initdb", "-D", str(self.folder / "data"), "-U", "postgres", "--auth-host=trust")
        options = f"-h 127.0.0.1 -p {PORT + 1} -k {self.folder}"
        self.run(f"{BIN}/pg_ctl", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-w", "-o", options, "start")

    def stop(self) -> None:
        self.run(f"{BIN}/pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "stop")


@pytest.fixture
def postgresql() -> Iterator[str]:
    """The address of a database that was made by the commands of the page."""
    if not (BIN / "initdb").exists():
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with tempfile.TemporaryDirectory() as folder:
        cluster = Postgres(Path(folder))
        cluster.start()
        try:
            commands = re.findall(r"^sudo -u postgres (.*)$", PAGE.read_text(), re.MULTILINE)
            assert len(commands) == 3
            for command in commands:
                cluster.run(*shlex.split(command))
            (address,) = re.findall(r"^export RATCHET_PREFECT_DATABASE=(\S+)$", PAGE.read_text(), re.MULTILINE)
            yield address.replace("5432", str(PORT + 1))
        finally:
            cluster.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def api_url(request: pytest.FixtureRequest, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("RATCHET_PREFECT_PORT", str(PORT))
    if request.param == "postgresql":
        monkeypatch.setenv("RATCHET_PREFECT_DATABASE", request.getfixturevalue("postgresql"))
    settings.cache_clear()
    try:
        yield servers.ensure_prefect()
    finally:
        servers.stop_all()
        settings.cache_clear()
    assert (workspace / "prefect/prefect.db").exists() == (request.param == "sqlite")


def started(number: int, config: RunConfig, api_url: str, folder: Path) -> "subprocess.Popen[bytes]":
    """A run in a workspace of its own: within one workspace, runs wait for each other."""
    fields = {"model": config.model, "engine.kind": "scripted", "trainer.max_mismatch": "null", "evaluation.every": 0}
    fields |= {"data.num_prompts": 4, "sampling.group_size": 4, "num_steps": NUM_STEPS}
    words = [f"--{field}={value}" for field, value in fields.items()]
    folder.mkdir()
    environment = os.environ | prefect_password.client_environment(api_url)
    environment |= {
        "RATCHET_WORKSPACE": str(folder),
        "RATCHET_ENGINE_PORT": str(PORT + 100 + 20 * number),
        "RATCHET_NUM_CPU_THREADS": "1",
    }
    with (folder / "said.log").open("wb") as log:
        command = [*RATCHET, "run", "--preset", "smoke", "--name", f"run-{number}", *words]
        return subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=log, start_new_session=True)


def test_eight_runs_at_once_on_one_server_all_finish(api_url: str, scripted: RunConfig, tmp_path: Path) -> None:
    folders = [tmp_path / f"run-{number}" for number in range(NUM_RUNS)]
    running = [started(number, scripted, api_url, folder) for number, folder in enumerate(folders)]
    try:
        codes = [each.wait(LIMIT_S) for each in running]
    finally:
        for each in running:
            if each.poll() is None:
                each.kill()
    said = {folder.name: (folder / "said.log").read_text() for folder in folders}
    assert codes == [0] * NUM_RUNS, {name: text[-1500:] for (name, text), code in zip(said.items(), codes, strict=True) if code}
    assert [name for name, text in said.items() if "Traceback" in text] == []
    digests = {
        tuple(read_json(path)["adapter_out"]["weights"]["sha256"] for path in sorted(folder.glob("runs/*/steps/*/manifest.json")))
        for folder in folders
    }
    assert {len(each) for each in digests} == {NUM_STEPS}
    with prefect_api.api_client(api_url) as client:
        found = prefect_api.asked(client, "POST", "/flow_runs/filter", {"flow_runs": {"name": {"like_": "run-"}}})
    assert {each["state"]["type"] for each in found} == {"COMPLETED"} and len(found) == NUM_RUNS * (1 + NUM_STEPS)
