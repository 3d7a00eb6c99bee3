"""The start of an engine: which kernels it compiles, what each part takes, and its weights read ahead."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.config import EngineConfig
from infra.engines import open_engine
from infra.engines.interface import Engine
from infra.engines.server import server_process, starts
from infra.engines.sglang.engine import graph_sizes
from infra.processes import kernel_caches
from infra.records import AdapterVersion
from infra.store.layout import Workspace
from infra.telemetry import program_versions

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
LOG = """\
[2026-11-20 12:00:21 TP0] Init torch distributed begin.
[2026-11-20 12:00:21 TP1] Init torch distributed begin.
[2026-11-20 12:00:22 TP0] Init torch distributed ends. elapsed=0.80 s, mem usage=0.10 GB
[2026-11-20 12:00:26 TP1] Load weight end. elapsed=4.40 s, type=Qwen2ForCausalLM, avail mem=1.00 GB, mem usage=14.00 GB.
[2026-11-20 12:00:26 TP0] Load weight end. elapsed=4.20 s, type=Qwen2ForCausalLM, avail mem=1.00 GB, mem usage=14.00 GB.
[2026-11-20 12:00:40 TP0] Capture target decode CUDA graph end. elapsed=9.50 s, mem usage=1.00 GB, avail mem=1.00 GB.
[2026-11-20 12:00:43 TP0] Capture target prefill CUDA graph end. elapsed=2.50 s, mem usage=1.00 GB, avail mem=1.00 GB.
"""


def started(config: EngineConfig, adapter: AdapterVersion) -> tuple[Engine, dict[str, float]]:
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    return engine, engine.start_figures()


@pytest.mark.usefixtures("over_scripted_server")
def test_a_second_start_compiles_nothing(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "infra.engines.server.starts")
    first, figures = started(engine_config, scripted_adapter(1))
    assert figures["compiled_files"] == 1
    assert open_engine(engine_config, scripted_adapter(1)).start_figures() == {}
    first.stop()
    second, figures = started(engine_config, scripted_adapter(1))
    assert figures["compiled_files"] == 0
    told = [record for record in caplog.records if record.name == "infra.engines.server.starts"]
    assert [record.levelname for record in told] == ["INFO", "INFO"]
    assert "and compiled triton 1;" in told[0].message and "and compiled nothing;" in told[1].message
    second.stop()
    set_fault("compiles again")
    _, figures = started(engine_config, scripted_adapter(1))
    assert figures["compiled_files"] == 1
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "although it had started here before" in warning.message


@pytest.mark.usefixtures("over_scripted_server")
def test_the_parts_of_a_start_add_up(engine_config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    _, figures = started(engine_config, scripted_adapter(1))
    assert figures["load_s"] == 0.03 and figures["graphs_s"] == pytest.approx(0.04)
    assert figures["adapter_s"] > 0 and figures["checks_s"] > 0
    inside = sum(figures[name] for name in ("import_s", "load_s", "graphs_s", "rest_s"))
    assert inside == pytest.approx(figures["s"])


@pytest.mark.usefixtures("over_scripted_server")
def test_an_adopted_engine_has_no_start(engine_config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    started(engine_config, scripted_adapter(1))
    _, figures = started(engine_config, scripted_adapter(1))
    assert figures == {}


def test_each_part_of_a_start_is_read_in_the_log_of_the_first_rank() -> None:
    began_at = time.mktime(time.strptime("2026-11-20 12:00:00", "%Y-%m-%d %H:%M:%S"))
    found = starts.parts_of(LOG, began_at, 50.0)
    expected = {"s": 50.0, "import_s": 21.0, "distributed_s": 0.8, "load_s": 4.2, "graphs_s": 12.0, "rest_s": 12.0}
    assert found == pytest.approx(expected)
    assert starts.parts_of("listening\n", began_at, 5.0) == {"s": 5.0, "rest_s": 5.0}


def test_kernels_of_other_versions_or_of_another_gpu_are_never_met(workspace: Path) -> None:
    versions = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "sglang": "0.5.17"}
    folder = kernel_caches.folder_of(versions)
    assert folder.parent == Workspace.here().kernels and folder.name.startswith("NVIDIA-H200-")
    others = [kernel_caches.folder_of(versions | {name: "other"}) for name in versions]
    assert len({folder, *others}) == 5
    found = kernel_caches.variables(versions)
    assert found["TRITON_CACHE_DIR"] == str(folder / "triton") and folder.stat().st_mode & 0o077 == 0
    assert found.items() >= kernel_caches.SWITCHES.items()
    assert {Path(found[name]).parent for name in kernel_caches.VARIABLES} == {folder}


def test_bytecode_that_the_environment_lacks_is_kept_with_the_kernels(tmp_path: Path, workspace: Path) -> None:
    (tmp_path / "module.py").write_text("")
    found = kernel_caches.variables({}, has_bytecode=False)
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | found
    subprocess.run([sys.executable, "-c", "import module"], cwd=tmp_path, env=environment, check=True)
    assert list((kernel_caches.folder_of({}) / "bytecode").rglob("module.*.pyc")) and not (tmp_path / "__pycache__").exists()
    assert kernel_caches.files_in(kernel_caches.folder_of({})) == frozenset(), "it is no kernel"


@pytest.mark.usefixtures("over_scripted_server")
@pytest.mark.parametrize("has_bytecode", [True, False])
def test_an_engine_keeps_bytecode_only_where_its_packages_have_none(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, has_bytecode: bool
) -> None:
    monkeypatch.setattr(program_versions, "engine_has_bytecode", lambda kind, machine: has_bytecode)
    started(engine_config, scripted_adapter(1))
    state = server_process.recorded()
    assert state
    variables = Path(f"/proc/{state.process.pid}/environ").read_bytes().split(b"\0")
    kept = [each for each in variables if each.startswith(b"PYTHONPYCACHEPREFIX=")]
    assert [each.endswith(b"/bytecode") for each in kept] == ([] if has_bytecode else [True])


def test_locks_and_notes_are_no_kernels(workspace: Path) -> None:
    folder = kernel_caches.folder_of({})
    kernel_caches.variables({})
    for name in ("triton/a/kernel.cubin", "triton/a/tmp.pid_1_x/kernel.cubin", "tvm-ffi/b/lock.lock", "tvm-ffi/b/.ninja_log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    assert kernel_caches.files_in(folder) == {"triton/a/kernel.cubin"}


def test_every_byte_of_the_weights_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "CHUNK_BYTES", 1000)
    read: set[tuple[str, int]] = set()
    lock, preadv = threading.Lock(), starts.os.preadv

    def noted(descriptor: int, buffers: list[bytearray], begin: int) -> int:
        with lock:
            read.add((Path(f"/proc/self/fd/{descriptor}").resolve().name, begin))
        return preadv(descriptor, buffers, begin)

    monkeypatch.setattr(starts.os, "preadv", noted)
    for name, size in {"one": 4500, "two": 999}.items():
        (tmp_path / f"{name}.safetensors").write_bytes(b"x" * size)
    expected = {("one.safetensors", begin) for begin in range(0, 4500, 1000)} | {("two.safetensors", 0)}
    with starts.read_ahead(tmp_path):
        deadline = time.monotonic() + 10
        while read != expected and time.monotonic() < deadline:
            time.sleep(0.01)
    assert read == expected


def test_weights_that_do_not_fit_into_memory_are_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.safetensors").write_bytes(b"x")
    monkeypatch.setattr(starts, "MEMORY_SHARE", 0.0)
    monkeypatch.setattr(starts, "_read", lambda *arguments: pytest.fail("read"))
    with starts.read_ahead(tmp_path):
        pass


@pytest.mark.parametrize("largest", [1, 3, 8, 64, 100, 512, 1000])
def test_graphs_reach_the_largest_batch_and_pad_a_large_one_by_an_eighth(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == largest
    for batch in range(129, largest + 1):
        padded = next(size for size in sizes if size >= batch)
        assert padded - batch < max(16, batch / 8)
