"""What a step draws from."""

from pathlib import Path

import pytest

from infra.config import DataConfig, EngineConfig, RunConfig
from infra.data import dataset
from infra.data.prompt_batch import drawn
from infra.records import Step
from infra.runs.lineage import adapter_at

ROW = '{{"question": "What is {}?", "answer": "#### 1"}}\n'


def forget() -> None:
    """As another process sees it."""
    for cache in (dataset.loaded, dataset.part_rows, dataset.fingerprint):
        cache.cache_clear()


def test_a_data_set_that_changed_under_a_run_is_refused(workspace: Path, model_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "mine.jsonl"
    config = RunConfig(
        name="r",
        model=str(model_folder),
        engine=EngineConfig(kind="scripted"),
        data=DataConfig(source=str(source), num_prompts=2),
    )
    adapter = adapter_at(config, 0)
    source.write_text("".join(ROW.format(number) for number in range(8)))
    before = drawn(config.data, Step(run="r", index=0, seed=0), adapter).dataset_fingerprint
    source.write_text("".join(ROW.format(number) for number in range(9)))
    forget()
    message = (
        rf"mine\.jsonl' \(split 'train'\) has changed since run 'r' drew from it first: .* recorded was {before}\. Put it back"
    )
    with pytest.raises(ValueError, match=message):
        drawn(config.data, Step(run="r", index=1, seed=0), adapter)
    drawn(config.data, Step(run="another", index=0, seed=0), adapter)
    source.write_text("".join(ROW.format(number) for number in range(8)))
    forget()
    assert drawn(config.data, Step(run="r", index=1, seed=0), adapter).dataset_fingerprint == before
    forget()
