"""What a step draws from."""

import json
from pathlib import Path

import pytest

from infra.config import DataConfig, EngineConfig, EvaluationConfig, RunConfig
from infra.data import dataset
from infra.data.prompt_batch import drawn
from infra.records import RowCounts, Step
from infra.runs.lineage import adapter_at
from tasks.draw_prompts import also_decided_by

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


def test_what_became_of_the_rows_is_counted_logged_and_recorded(
    workspace: Path, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": f"What is {n}?", "answer": "#### 1", "level": n % 10} for n in range(40)]
    rows += [{"question": "What is " + "1 + " * 50 + "1?", "answer": "#### 1", "level": 1}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text(ROW.format(1) + ROW.format(2) + ROW.format("new"))
    config = RunConfig(
        name="r",
        model=str(model_folder),
        engine=EngineConfig(kind="scripted"),
        data=DataConfig(
            source=str(tmp_path / "train.jsonl"), num_prompts=2, filter=("level > 0",), too_long="drop", max_prompt_tokens=64
        ),
        evaluation=EvaluationConfig(source=str(tmp_path / "test.jsonl")),
    )
    adapter = adapter_at(config, 0)
    with caplog.at_level("INFO"):
        batch = drawn(config.training, Step(run="r", index=0, seed=0), adapter)
    assert batch.rows == RowCounts(num_rows=37, num_filtered=4, num_contaminated=2, num_too_long=1)
    assert batch.rows.metrics["data/contaminated_rows"] == 2
    assert (
        "37 rows; 4 left out by data.filter; 2 left out because an evaluation's data set has their text; 1 of more than 64 tokens (drop)"
        in caplog.text
    )
    assert drawn(config.training, Step(run="r", index=1, seed=0), adapter).rows == batch.rows


def test_a_changed_data_set_makes_another_cache_key(workspace: Path, tmp_path: Path) -> None:
    source = tmp_path / "mine.jsonl"
    keys = []
    for questions in ("ab", "ab", "ac"):
        source.write_text("".join(ROW.format(question) for question in questions))
        forget()
        keys.append(also_decided_by({"config": DataConfig(source=str(source))}))
    forget()
    assert keys[0] == keys[1] != keys[2]
