"""The notebook of compare-engines runs from its first cell to its last over an output folder."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from infra.comparison.config import ComparisonConfig
from infra.comparison.measurement.measures import EngineStart, StepMeasures
from infra.comparison.measurement.memory import PhaseMemory
from infra.comparison.report import Results
from infra.comparison.results import write_output
from infra.engines.request_timing import RequestTiming
from infra.settings import CHECKOUT

NOTEBOOK = CHECKOUT / "notebooks/compare_engines.ipynb"


def measured(backend: str, step: int) -> StepMeasures:
    return StepMeasures.model_validate(
        {
            "backend": backend,
            "round": 0,
            "step": step,
            "requests": [RequestTiming(0.1, 1.0 + step, 10)],
            "rollout_s": 1.0 + step,
            "memory": {"inference": PhaseMemory(mean_gib=1, peak_gib=2)},
            "trace": [(0.0, 1.0, "inference"), (1.0, 2.0, "inference")],
        }
    )


def test_the_notebook_shows_report_charts_and_says_when_an_engine_is_a_twin(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = EngineStart(
        backend="vllm",
        round=0,
        start_s=1,
        version="a scripted twin",
        flags=(),
        colocation="offload",
        reason="-",
        log_path="/log",
        memory_before_gib=0,
        kv_pool_tokens=1,
    )
    config = ComparisonConfig(num_steps=2, rounds=1, output=str(tmp_path / "out"))
    starts = (start, start.model_copy(update={"backend": "sglang", "version": "0.5.18"}))
    steps = tuple(measured(backend, step) for backend in ("vllm", "sglang") for step in range(2))
    write_output(Results(config, "d", starts, steps))
    monkeypatch.setenv("RATCHET_COMPARISON_OUTPUT", str(tmp_path / "out"))
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is committed without outputs"
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(CHECKOUT)}}).execute()
    shown = "".join(str(output.get("data")) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    assert "A scripted twin stands in" in shown
    assert shown.count("image/png") == 3
