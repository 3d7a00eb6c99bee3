"""What an interpreter really has, by its own word; what of it a lock does not say."""

import json
import logging
import os
import py_compile
import sys
from pathlib import Path

import pytest
from shared import write_interpreter

from infra.failures import EngineUnavailable
from infra.machine import read_versions
from infra.processes import child_environment
from infra.settings import settings
from infra.telemetry import program_versions
from infra.telemetry.program_versions import of_engine, of_trainer, pins_of, unpinned

pytestmark = pytest.mark.usefixtures("workspace")


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another environment's interpreter: this one, which finds packages in a folder of its own first."""
    monkeypatch.setenv("RATCHET_SGLANG_PYTHON", sys.executable)
    monkeypatch.setenv("RATCHET_SGLANG_PYTHONPATH", str(tmp_path / "packages"))
    settings.cache_clear()
    return tmp_path / "packages"


def install(folder: Path, package: str, version: str, *, has_metadata: bool = True) -> None:
    (folder / package).mkdir(parents=True, exist_ok=True)
    (folder / package / "__init__.py").write_text("raise ImportError('it is not to be imported')")
    if has_metadata:
        about = folder / f"{package}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def test_an_interpreter_says_what_it_would_import_and_imports_nothing(python: Path) -> None:
    install(python, "sglang", "0.5.17")
    found = of_engine("sglang")
    assert found["sglang"] == "0.5.17"
    assert {"python", "torch", "transformers"} <= found.keys()


def test_a_folder_without_metadata_is_not_taken_for_the_package_that_it_hides(python: Path) -> None:
    install(python, "torch", "", has_metadata=False)
    assert of_engine("sglang")["torch"] == f"unknown, in {python}"


def test_the_cuda_of_torch_is_read_from_its_own_file(python: Path) -> None:
    install(python, "torch", "2.11.0+cu130")
    (python / "torch/version.py").write_text(
        "from typing import Optional\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    found = of_engine("sglang")
    assert (found["torch"], found["cuda"]) == ("2.11.0+cu130", "13.0")


def test_what_is_installed_meanwhile_is_seen_and_nothing_is_asked_twice(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(python, "sglang", "0.5.17")
    assert of_engine("sglang")["sglang"] == "0.5.17"
    with monkeypatch.context() as patch:
        patch.setattr(program_versions.subprocess, "run", None)
        assert of_engine("sglang")["sglang"] == "0.5.17"
    (python / "sglang-0.5.17.dist-info").rename(python / "sglang-0.5.18.dist-info")
    about = python / "sglang-0.5.18.dist-info/METADATA"
    about.write_text(about.read_text().replace("0.5.17", "0.5.18"))
    os.utime(python, ns=(1, 1))  # on a file system with coarse times, too
    assert of_engine("sglang")["sglang"] == "0.5.18"


def test_an_interpreter_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("RATCHET_SGLANG_PYTHON", str(broken))
    settings.cache_clear()
    with pytest.raises(EngineUnavailable, match=f"{broken} cannot say which versions it has: it gave 3, no such library"):
        of_engine("sglang")


def test_a_trainer_says_before_its_job_what_its_result_says_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = of_trainer()
    assert own == read_versions.versions(read_versions.TRAINER_PACKAGES) | child_environment.switches("trainer")
    other = write_interpreter(tmp_path / "python", sys.executable, num_words_less=0)
    monkeypatch.setenv("RATCHET_TRAINER_PYTHON", str(other))
    settings.cache_clear()
    assert of_trainer() == own


def test_switches_of_the_libraries_are_versions_of_the_programs_that_have_them(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(python, "sglang", "0.5.17")
    for name in [*child_environment.switches()]:
        monkeypatch.delenv(name)
    before, trained = of_engine("sglang"), of_trainer()
    of_both = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    of_none = {
        **dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "SGLANG_LOGGING_CONFIG_PATH", "VLLM_LOGGING_LEVEL", "TORCH_LOGS"), "x"),
        **dict.fromkeys(
            ("FLASHINFER_WORKSPACE_BASE", "MKL_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_BLOCKING_WAIT"), "x"
        ),
        "TORCHELASTIC_RUN_ID": "x",
        "CUDA_VISIBLE_DEVICES": "0",
        "VLLM_API_KEY": "hunter2",
        "HF_HUB_OFFLINE": "1",
    }
    for name, value in {**of_both, **of_none, "SGLANG_X": "2", "VLLM_X": "3", "NVTE_X": "4", "FLASHINFER_X": "5"}.items():
        monkeypatch.setenv(name, value)
    assert of_engine("sglang") == before | of_both | {"SGLANG_X": "2", "FLASHINFER_X": "5"}
    assert of_trainer() == trained | of_both | {"NVTE_X": "4"}
    assert of_engine("scripted") == {"scripted": "1"}
    assert child_environment.switches("vllm") == of_both | {"VLLM_X": "3", "FLASHINFER_X": "5"}
    assert child_environment.switches().keys() == {*of_both, "SGLANG_X", "VLLM_X", "NVTE_X", "FLASHINFER_X"}


def test_each_difference_from_the_nearest_lock_is_named_and_a_build_is_none(tmp_path: Path) -> None:
    cpu, cuda = tmp_path / "cpu.txt", tmp_path / "cuda.txt"
    cpu.write_text("# a==9\nsglang==0.5.18\ntorch==2.13.0\n")
    cuda.write_text("sglang==0.5.17\ntorch==2.11.0 --hash=x\n")
    assert pins_of([cuda]) == {"sglang": "0.5.17", "torch": "2.11.0"}
    assert unpinned({"sglang": "0.5.18", "torch": "2.13.0+cpu", "python": "3.12"}, [[cpu], [cuda]]) == ""
    assert unpinned({"sglang": "0.5.17", "torch": "2.11.1"}, [[cpu], [cuda]]) == "torch 2.11.1 (lock: 2.11.0)"


def test_a_program_that_is_not_what_its_lock_says_is_one_warning_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = write_interpreter(tmp_path / "python", "false", {"sglang": "0.4.0", "torch": "1.0"})
    monkeypatch.setenv("RATCHET_SGLANG_PYTHON", str(program))
    monkeypatch.setenv("RATCHET_TRAINER_PYTHON", str(program))
    settings.cache_clear()
    caplog.set_level(logging.WARNING, logger="infra.telemetry.program_versions")
    for _ in range(2):
        program_versions.warn_of_engine("sglang", settings())
        program_versions.warn_of_trainer()
    engine, trainer = caplog.messages
    assert engine.startswith("sglang does not run with what its lock says: sglang 0.4.0 (lock: 0.5.1")
    assert trainer.startswith("trainer does not run with what its lock says: torch 1.0 (lock: 2.")
    assert all(str(program) in line and "\n" not in line for line in caplog.messages)


def test_an_interpreter_says_whether_its_packages_are_compiled(python: Path) -> None:
    install(python, "sglang", "0.5.17")
    assert not program_versions.engine_has_bytecode("sglang", settings())
    for package in ("torch", "transformers"):
        install(python, package, "1.0")
    for each in python.glob("*/__init__.py"):
        py_compile.compile(str(each))
    assert program_versions.engine_has_bytecode("sglang", settings())
    assert program_versions.engine_has_bytecode("scripted", settings()), "it has no interpreter"


def test_the_script_prints_one_json_object(python: Path) -> None:
    install(python, "sglang", "0.5.17")
    versions, _, folders = program_versions._ask(program_versions._engine_interpreter("sglang", settings()))
    assert json.dumps(versions) and str(python) in folders
    assert str(Path(read_versions.__file__).parent) not in folders, "the script's own folder is none of the environment's"
