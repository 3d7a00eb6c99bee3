"""Every program that needs Megatron runs in the trainer's own interpreter, where RATCHET_TRAINER_PYTHON names one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import shared

from infra.config import ExportConfig
from infra.models import base_model
from infra.processes.children import ProgramFailed
from infra.settings import settings
from infra.store.files import write
from infra.tracking import tables
from tasks.runs.finish_run import export


def merges(workspace: Path) -> None:
    adapter = shared.written_adapter("{}")
    adapter = adapter.model_copy(update={"base": base_model.reference(adapter.base.id)})
    export(ExportConfig(what="merged"), adapter, workspace / "export")


def computes_logprobs_again(workspace: Path) -> None:
    step = workspace / "step"
    write(step / "train/job.json", b"{}")
    write(step / "batch.safetensors", b"")
    tables._trainer_logprobs(step)


@pytest.mark.parametrize(
    ("work", "program"),
    [(merges, "infra.megatron.lora.merge"), (computes_logprobs_again, "infra.megatron.program.token_logprobs")],
)
def test_it_runs_in_the_trainers_interpreter(
    work: Callable[[Path], None],
    program: str,
    workspace: Path,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(model_folder, workspace / "models/tiny")
    interpreter, called = tmp_path / "python", tmp_path / "called"
    interpreter.write_text(f'#!/bin/sh\necho "$@" > {called}\nexit 3\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv("RATCHET_TRAINER_PYTHON", str(interpreter))
    settings.cache_clear()
    with pytest.raises(ProgramFailed):
        work(workspace)
    assert called.read_text().split()[:2] == ["-m", program]
