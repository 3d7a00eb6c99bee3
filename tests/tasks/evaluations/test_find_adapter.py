"""Which adapter an evaluation asks, and of which base model."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from shared import write_manifest

from infra.config import EngineConfig, RunConfig
from infra.runs import evaluations
from infra.runs.lineage import base_version
from infra.store.files import record_of, write, write_json
from infra.store.layout import RunFolder, adapter_folder
from tasks.evaluations.find_adapter import find_adapter


@pytest.mark.parametrize("adapter", [0, 1, None, "mine:0", "mine:latest"])
def test_a_base_model_that_has_changed_since_the_run_began_is_not_evaluated_as_its_own(
    workspace: Path, model_folder: Path, tmp_path: Path, adapter: int | str | None
) -> None:
    """Here its chat template: the same questions would be other prompts, and the figures would stand beside the earlier ones."""
    model = shutil.copytree(model_folder, tmp_path / "model")
    config = RunConfig(name="mine", model=str(model), engine=EngineConfig(kind="scripted"))
    start = base_version(config)
    weights = record_of(write(adapter_folder("mine", 1) / "adapter_model.safetensors", b"w"))
    write_manifest(config, start, start.model_copy(update={"version": 1, "weights": weights}))
    write_json(RunFolder.of("mine").config, config.model_dump(mode="json"))
    find_adapter.fn(config, adapter)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    with pytest.raises(ValueError, match=r"base model .* is not what run 'mine' was begun with: .* recorded was"):
        find_adapter.fn(config, adapter)


def test_best_and_latest_are_versions_of_the_run_whatever_questions_are_asked_now(
    workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(name="mine", model=str(model_folder), engine=EngineConfig(kind="scripted"))
    start = base_version(config)
    weights = record_of(write(adapter_folder("mine", 1) / "adapter_model.safetensors", b"w"))
    write_manifest(config, start, start.model_copy(update={"version": 1, "weights": weights}))
    write_json(RunFolder.of("mine").config, config.model_dump(mode="json"))
    monkeypatch.setattr(evaluations, "of_run", lambda run, asked: [0] if asked == config.eval_config else [])
    monkeypatch.setattr(evaluations, "best_of", lambda by, found: SimpleNamespace(step=found[0]) if found else None)
    others = config.but(evaluation=config.evaluation.but(num_samples=2, pass_at_k=(1, 2)))
    assert others.eval_config != config.eval_config
    assert [find_adapter.fn(others, name).version for name in ("best", "latest")] == [0, 1]
