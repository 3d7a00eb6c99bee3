"""What preflight finds, and what it tells people to do."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared import FIRST_PORT

from infra.comparison import preflight
from infra.comparison.config import ComparisonConfig
from infra.comparison.paths import machine_for
from infra.engines.server import server_process
from infra.engines.server.server_process import ServerState
from infra.machine import devices, nvml, ports
from infra.machine.nvml import Holding, Reading
from infra.models import base_model
from infra.processes import children
from infra.settings import settings

pytestmark = pytest.mark.usefixtures("workspace")


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """Of an environment with the right vLLM in it."""
    (tmp_path / "env/lib/python3.12/site-packages/vllm-0.26.0.dist-info").mkdir(parents=True)
    python = tmp_path / "env/bin/python"
    python.parent.mkdir()
    python.touch()
    return python


@pytest.fixture
def config(interpreter: Path, model_folder: Path, tmp_path: Path) -> ComparisonConfig:
    return ComparisonConfig(
        model=str(model_folder),
        backends="vllm",  # type: ignore[arg-type]
        vllm_python=str(interpreter),
        output=str(tmp_path / "out"),
        max_input_tokens=64,
        max_output_tokens=8,
        vllm_port=ports.free_port(FIRST_PORT + 1700),
    )


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


def test_nothing_is_wrong_where_all_is_there(config: ComparisonConfig) -> None:
    assert preflight.problems(config) == []


def test_a_missing_environment_is_named_with_the_command_that_makes_it(config: ComparisonConfig) -> None:
    with pytest.raises(
        ValueError, match=r"vLLM's interpreter /nowhere/python does not exist: run python3 infra/setup/bootstrap.py --vllm"
    ):
        preflight.check(config.but(vllm_python="/nowhere/python"))
    with pytest.raises(ValueError, match=r"SGLang's interpreter .* does not exist: run \./infra/quickstart"):
        preflight.check(config.but(backends="sglang", sglang_python="/nowhere/python"))


def test_a_wrong_version_is_named_with_the_right_one(config: ComparisonConfig, interpreter: Path) -> None:
    found = next(interpreter.parent.parent.glob("lib/*/site-packages/vllm-*"))
    found.rename(found.with_name("vllm-0.19.1.dist-info"))
    with pytest.raises(ValueError, match=r"vLLM 0\.19\.1 lies in .*, the locks say 0\.26\.0: run"):
        preflight.check(config)


@pytest.mark.parametrize(("backend", "name", "wrong"), [("vllm", "vLLM", "0.19.1"), ("sglang", "SGLang", "0.4.0")])
def test_a_wrong_version_on_the_python_path_is_found_before_the_right_one_in_the_environment(
    config: ComparisonConfig,
    interpreter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    name: str,
    wrong: str,
) -> None:
    (tmp_path / f"elsewhere/{backend}-{wrong}.dist-info").mkdir(parents=True)
    monkeypatch.setenv(f"RATCHET_{backend.upper()}_PYTHONPATH", str(tmp_path / "elsewhere"))
    settings.cache_clear()
    asked = config.but(backends=backend, sglang_python=str(interpreter))
    with pytest.raises(
        ValueError, match=rf"{name} {wrong} lies in .*/elsewhere, .*: change RATCHET_{backend.upper()}_PYTHONPATH"
    ):
        preflight.check(asked)


def test_a_port_in_use_is_named_with_its_pid(config: ComparisonConfig, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(ValueError, match=rf"port {port} is used by pid {os.getpid()} .*--vllm-port"):
        preflight.check(config.but(vllm_port=port))


def test_a_stale_server_of_ours_is_no_hindrance(
    config: ComparisonConfig, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, me = listener.getsockname()[1], children.ref_of(os.getpid(), "mark")
    state = ServerState(kind="vllm", process=me, url="http://x", identity="i", log_path=Path("/log"), launch=1)
    server_process.remember(state)
    monkeypatch.setattr(children, "members", lambda program: [children.find(me)] if program == "mark" else [])
    assert preflight.problems(config.but(vllm_port=port)) == []


def test_a_missing_megatron_is_found_before_a_training_comparison(
    config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_TRAINER_PYTHON", "/bin/false")
    settings.cache_clear()
    assert preflight.problems(config) == []
    with pytest.raises(ValueError, match=r"megatron-core is not in /bin/false: run \./infra/quickstart"):
        preflight.check(config.but(mode="training"))


def test_gpu_memory_of_others_is_named_with_its_holder(config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "processor", lambda: "NVIDIA H200")
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(devices, "gpu_memory_total_bytes", lambda: 2**37)
    holdings = (Holding(0, os.getpid(), 20 * 2**30), Holding(0, 1, 100 * 2**20))
    monkeypatch.setattr(nvml, "read", lambda: Reading(holdings=holdings))
    found = preflight.problems(config)
    assert len(found) == 1
    assert f"GPU memory is held by pid {os.getpid()}" in found[0] and "20.0 GiB" in found[0] and "pid 1 " not in found[0]


def test_a_model_that_does_not_fit_is_found(config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="GiB of memory are needed for engine and training"):
        preflight.check(config.but(train_gib=1e6))
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(devices, "processor", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(devices, "gpu_memory_total_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"the weights of .* take .* GiB, --gpu-memory-utilization 0.85"):
        preflight.check(config)


def test_an_output_that_is_a_file_is_found(config: ComparisonConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is no folder"):
        preflight.check(config.but(output=str(tmp_path / "file")))


def test_all_problems_are_said_at_once(config: ComparisonConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError) as caught:
        preflight.check(config.but(output=str(tmp_path / "file"), vllm_python="/nowhere"))
    assert str(caught.value).count("\n* ") == 2


def test_options_of_one_engine_are_settings_of_its_machine_alone(config: ComparisonConfig) -> None:
    before, environment = settings(), dict(os.environ)
    machine = machine_for(config, "vllm")
    assert (machine.engine_port, str(machine.vllm_python)) == (config.vllm_port, config.vllm_python)
    assert {name for name, value in machine if value != getattr(before, name)} == {"engine_port", "vllm_python"}
    assert settings() is before and dict(os.environ) == environment
    assert base_model.locate(config.model) and sys.executable
