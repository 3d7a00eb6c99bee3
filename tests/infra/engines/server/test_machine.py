"""A server runs on the machine that is given with it: its interpreter, its port."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from infra import engines
from infra.config import EngineConfig
from infra.engines.server import server_process
from infra.engines.server.server_place import ServerPlace
from infra.machine import ports
from infra.records import AdapterVersion
from infra.settings import settings


@pytest.mark.usefixtures("over_scripted_server")
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_port_and_interpreter_of_a_server_can_be_given(
    engine_config: EngineConfig, scripted_adapter: Callable[[int], AdapterVersion], kind: str, workspace: Path
) -> None:
    python = workspace / "another-python"
    python.write_text((workspace / f"python-of-{kind}").read_text().replace("exec", f"touch {workspace}/was-started\nexec"))
    python.chmod(0o700)
    port = ports.free_port(settings().engine_port + 7, settings().host)
    machine = settings().model_copy(update={"engine_port": port, f"{kind}_python": python})
    engine = engines.open_engine(engine_config.but(kind=kind), scripted_adapter(0), machine=machine)
    engine.wake()
    state = server_process.recorded()
    assert state is not None and state.url.endswith(f":{port}")
    assert (workspace / "was-started").exists()
    assert engines.log_path() == state.log_path
    assert engines.stop_recorded() and not engines.stop_recorded()
    assert engines.log_path() is None


def test_a_second_replica_does_not_ask_for_the_port_of_the_first(
    engine_config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    first = ports.free_port(settings().engine_port + 8, settings().host)
    machine = settings().model_copy(update={"engine_port": first})
    with socket.create_server((settings().host, first)), ServerPlace(engine_config, machine, 1).reserved_port() as port:
        assert port > first
    assert f"port {first} is taken" not in caplog.text
