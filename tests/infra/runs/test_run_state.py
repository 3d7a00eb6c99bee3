"""What a list of runs says of one."""

from pathlib import Path

import pytest
from shared import write_manifest

from infra.config import EngineConfig, RunConfig
from infra.runs.lineage import base_version
from infra.runs.run_state import state_of
from infra.store.files import write_json
from infra.store.layout import RunFolder


@pytest.mark.parametrize(
    ("num_steps", "has_report", "state"), [(1, False, "all steps made"), (1, True, "finished"), (2, False, "not finished")]
)
def test_a_run_whose_steps_are_all_made_says_so_before_it_has_its_report(
    workspace: Path, model_folder: Path, num_steps: int, has_report: bool, state: str
) -> None:
    config = RunConfig(name="mine", num_steps=num_steps, model=str(model_folder), engine=EngineConfig(kind="scripted"))
    write_json(RunFolder.of("mine").config, config.model_dump(mode="json"))
    assert state_of("mine").state == "no step yet"
    start = base_version(config)
    write_manifest(config, start, start.model_copy(update={"version": 1}))
    if has_report:
        write_json(RunFolder.of("mine").report, {"num_steps": 1, "stopped": "all steps made"})
    assert state_of("mine").state == state
