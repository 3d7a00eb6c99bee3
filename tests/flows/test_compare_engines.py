"""The whole comparison against scripted servers of both engines: files, a failed check, a replaced engine, going on after a stop."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL
from shared import FIRST_PORT, write_interpreter

import flows.compare_engines
import tasks.comparisons.measure_step
from flows.compare_engines import compare_engines
from infra.comparison import charts, delivery
from infra.comparison.config import ComparisonConfig
from infra.comparison.measurement import measuring
from infra.comparison.results import read_step, results_in
from infra.engines.server import server_process
from infra.machine import ports
from infra.models import base_model
from infra.settings import CHECKOUT, settings
from infra.trainers import resident

SERVERS = Path(__file__).parents[1] / "infra/engines"
FILES = {"benchmark_report.txt", "benchmark_report.md", "benchmark_combined.json", "vllm_metrics.json", "sglang_metrics.json"}

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def config(model: Path, workspace: Path) -> Iterator[ComparisonConfig]:
    """Both engines are scripted; what stands in the workspace's file `fault` is wrong with vLLM's."""
    programs = {}
    for kind, fault in (("vllm", f"RATCHET_TEST_FAULT={workspace / 'fault'}"), ("sglang", "-u RATCHET_TEST_FAULT")):
        script = SERVERS / f"scripted_{kind}_server.py"
        program = f"env {fault} {sys.executable} {script}"
        programs[kind] = write_interpreter(workspace / f"python-of-{kind}", program, {"scripted": "1"})
    yield ComparisonConfig(
        model=str(model),
        max_input_tokens=96,
        max_output_tokens=6,
        num_rollouts=3,
        concurrency=2,
        num_steps=2,
        rounds=1,
        num_quality=2,
        train_s=0.1,
        train_gib=0.01,
        output=str(workspace / "out"),
        vllm_python=str(programs["vllm"]),
        sglang_python=str(programs["sglang"]),
        vllm_port=ports.free_port(FIRST_PORT + 1500),
        sglang_port=ports.free_port(FIRST_PORT + 1600),
    )
    server_process.stop_recorded()
    resident.stop_recorded()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes longer than all the rest: a program that imports torch, charts, MLflow."""
    monkeypatch.setattr(charts, "is_available", lambda: False)
    monkeypatch.setattr(delivery, "deliver", lambda results, files: None)
    monkeypatch.setattr(tasks.comparisons.measure_step.memory_holder, "hold", lambda config, log_path: log_path.touch())


def set_fault(fault: str) -> None:
    (settings().workspace / "fault").write_text(fault)


def combined(config: ComparisonConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(config.output) / "benchmark_combined.json").read_text())
    return found


def medians(config: ComparisonConfig, name: str) -> dict[str, Any]:
    row = next(row for row in combined(config)["metrics"] if row["name"] == name)
    return {backend: found and found["median"] for backend, found in row["engines"].items()}


def test_every_file_is_written_and_mlflow_has_a_run_for_each_engine_under_one(config: ComparisonConfig, workspace: Path) -> None:
    compare_engines(config)
    output = Path(config.output)
    assert {path.name for path in output.iterdir() if path.is_file()} == FILES
    assert {path.name for path in (output / "charts").iterdir()} == {"bars.png", "lines.png", "memory.png"}
    assert {path.name[:9] for path in (output / "logs").glob("*-vllm-*") if "training" not in path.name} == {"00-vllm-v"}
    assert "scripted twin" in next((output / "logs").glob("00-vllm-vllm-*")).read_text()
    results = results_in(output)
    assert [(step.backend, step.step, step.is_sound) for step in results.steps] == [
        (backend, n, True) for backend in ("vllm", "sglang") for n in range(2)
    ]
    assert {request.num_tokens for step in results.steps for request in step.requests} == {6}
    for one, other in zip(results.of("vllm"), results.of("sglang"), strict=True):
        assert one.adapter_sha256 == other.adapter_sha256, "the same adapters"
        assert one.probe == other.probe, "the same prompts"
    assert results.steps[1].quality and results.steps[1].quality.num_samples == 2
    assert results.steps[0].memory.keys() == {"inference", "after_release", "training"}
    assert medians(config, "kv_pool_tokens") == {"vllm": 4096, "sglang": 65536}
    assert server_process.recorded() is None, "no engine is left"
    panels = [panel for panel in charts.lines(results).axes if panel.lines]
    assert panels and all(max(max(line.get_ydata()) for line in panel.lines) < 0.97 * panel.get_ylim()[1] for panel in panels)
    _check_mlflow(workspace)


def _check_mlflow(workspace: Path) -> None:
    """The parent has a child for each engine, and there is nothing else."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{workspace}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("ratchet-engines")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(str(run.info.run_name).split()[0] for run in children) == ["sglang", "vllm"]
    assert all("median/tokens_per_s" in run.data.metrics and "engine/step_s" in run.data.metrics for run in children)
    assert {artifact.path for artifact in client.list_artifacts(parent.info.run_id)} >= {"benchmark_report.md", "charts"}


def test_a_delivery_that_died_in_the_middle_leaves_nothing_behind(config: ComparisonConfig, workspace: Path) -> None:
    compare_engines(config)
    (state,) = (workspace / "comparisons").iterdir()
    (state / delivery.DELIVERED).unlink()  # it ended just before this was written
    compare_engines(config)
    _check_mlflow(workspace)


@pytest.mark.usefixtures("bare")
def test_an_engine_that_answers_garbage_gets_no_speed_and_the_other_is_measured(
    config: ComparisonConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    set_fault("garbage after 4")  # of the warm-up's 2 and the first step's 3 samples
    compare_engines(config)
    assert medians(config, "tokens_per_s")["vllm"] is None
    assert medians(config, "tokens_per_s")["sglang"] > 0
    assert any("vllm has no speed" in warning for warning in combined(config)["warnings"])
    assert "00-vllm: 0 of 2 steps are sound" in caplog.text and "00-sglang: 2 of 2 steps are sound" in caplog.text


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("fault", ["dies after 4", "hangs after 4", "does not wake"])
def test_an_engine_that_fails_is_replaced_and_that_is_an_error_in_its_account(
    config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    set_fault(fault)
    start, starts = measuring.ensure_started, []

    def mended(*arguments: Any) -> Any:
        starts.append(arguments)
        set_fault("")
        return start(*arguments)

    monkeypatch.setattr(measuring, "ensure_started", mended)
    compare_engines(config.but(backends="vllm", request_timeout_s=2))
    first, second = results_in(Path(config.output)).steps
    assert len(starts) == 1
    assert (first.is_sound, len(first.errors), first.lost_s > 0) == (True, 1, True)
    assert (second.is_sound, second.errors) == (True, ())
    assert medians(config, "errors") == {"vllm": 0.5}


class Power:
    """Is gone after so many steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, int]] = []
        self.num_steps = 99
        self.measured_step = tasks.comparisons.measure_step.measured_step
        monkeypatch.setattr(tasks.comparisons.measure_step, "measured_step", self.measure)

    def measure(self, *arguments: Any) -> Any:
        block, step = arguments[2:4]
        if len(self.made) == self.num_steps:
            raise RuntimeError("the power is gone")
        self.made.append((block.backend, step))
        return self.measured_step(*arguments)


@pytest.mark.usefixtures("bare")
def test_an_interrupted_comparison_goes_on_at_the_engine_and_step_where_it_stopped(
    config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    power = Power(monkeypatch)
    power.num_steps = 3
    with pytest.raises(RuntimeError, match="the power is gone"):
        compare_engines(config)
    assert server_process.recorded() is not None, "the engine is left for the next process"
    left = server_process.recorded()
    power.num_steps = 99
    compare_engines(config)
    assert power.made == [("vllm", 0), ("vllm", 1), ("sglang", 0), ("sglang", 1)]
    starts = results_in(Path(config.output)).starts
    assert [(start.backend, start.num_starts) for start in starts] == [("vllm", 1), ("sglang", 1)], "it was adopted"
    assert left is not None and starts[1].log_path == str(left.log_path)


@pytest.mark.usefixtures("bare")
def test_a_block_is_ended_and_kept_where_the_power_was_gone_before_its_end(
    config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = config.but(backends="sglang")

    def power_cut(*_: object) -> None:
        raise RuntimeError("the power is gone")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the power is gone"):
        patch.setattr(flows.compare_engines, "end_engine", power_cut)
        compare_engines(one)
    assert server_process.recorded() is not None
    compare_engines(one)
    assert server_process.recorded() is None, "an engine is left"
    assert list(Path(config.output).glob("blocks/*/00-sglang/start.json")), "the block is not kept"


@pytest.mark.usefixtures("bare")
def test_a_finished_block_outlives_its_workspace(
    config: ComparisonConfig, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    power = Power(monkeypatch)
    power.num_steps = 3
    with pytest.raises(RuntimeError, match="the power is gone"):
        compare_engines(config)
    server_process.stop_recorded()
    (state,) = (workspace / "comparisons").iterdir()
    first = [read_step(path) for path in sorted((state / "blocks/00-vllm/steps").iterdir())]
    shutil.rmtree(workspace / "comparisons")
    power.num_steps = 99
    compare_engines(config)
    assert power.made == [("vllm", 0), ("vllm", 1), ("sglang", 0), ("sglang", 0), ("sglang", 1)]
    results = results_in(Path(config.output))
    assert results.of("vllm") == first and all(step.is_sound for step in results.steps)
    assert any((Path(config.output) / "logs").glob("00-vllm-vllm-*"))


def test_a_start_that_takes_too_long_shows_the_end_of_the_log(config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from infra import failures

    tokenizer, running = base_model.tokenizer, []
    monkeypatch.setattr(base_model, "tokenizer", lambda folder: running.append(server_process.recorded()) or tokenizer(folder))
    set_fault("never gets ready")
    monkeypatch.setattr(failures, "FAILURES", ())  # no retries: each waits
    with pytest.raises(failures.EngineUnavailable, match="vllm was not ready after 1 s; the end of"):
        compare_engines(config.but(start_timeout_s=1))
    assert server_process.recorded() is None
    assert running == [None], "the tokenizer's library is imported before the engine's start is timed"


@pytest.mark.full  # the comparison itself is made in the tests above
def test_the_script_for_gpus_runs_the_command_to_its_end_stops_at_its_limit_and_needs_no_workspace_to_go_on(
    config: ComparisonConfig, workspace: Path, tmp_path: Path
) -> None:
    options = {
        name.replace("_", "-"): value
        for name, value in config.model_dump().items()
        if value != ComparisonConfig.model_fields[name].default
    }
    words = [word for name, value in options.items() if name not in ("output", "trainer") for word in (f"--{name}", str(value))]
    command = [sys.executable, str(CHECKOUT / "tests/gpu/compare_engines.py"), str(Path(config.output))]
    env = os.environ | {"PYTHONPATH": str(CHECKOUT), "PREFECT_API_URL": str(PREFECT_API_URL.value())}

    def said(*more: str, **other: str) -> str:
        done = subprocess.run(
            [*command, *words, *more], env=env | other, cwd=CHECKOUT, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "unfinished after 0.1 s with 0 steps: run the same again" in said("--limit-s", "0.1")
    assert said().endswith("passed\n")
    elsewhere = {
        "RATCHET_WORKSPACE": str(tmp_path / "elsewhere"),
        "RATCHET_MLFLOW_URI": f"sqlite:///{workspace}/mlflow/mlflow.db",
    }
    assert said(**elsewhere).endswith("passed\n")
    assert not list((tmp_path / "elsewhere/logs").glob("vllm-*")), "no engine was started"


@pytest.mark.end_to_end
def test_the_real_sglang_is_compared_with_the_twin_of_vllm_and_every_output_says_so(config: ComparisonConfig) -> None:
    smoke = config.but(sglang_python="auto", num_steps=1, num_rollouts=2, num_quality=1)
    compare_engines(smoke)
    output = Path(smoke.output)
    files = [path for path in output.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= FILES | {"bars.png", "lines.png", "memory.png"}
    for name in FILES:
        assert "A scripted twin stands in for an engine here" in (output / name).read_text(), name
    assert medians(smoke, "tokens_per_s")["sglang"] > 0
    assert {row["verdict"] for row in combined(smoke)["metrics"]} == {"none: a twin is no engine"}
    sglang = results_in(output).of("sglang")[0]
    assert sglang.is_sound and sglang.memory["inference"].mean_gib > 0.1
    assert "max_total_num_tokens" in next((output / "logs").glob("00-sglang-sglang-*")).read_text()
    assert "scripted twin" in next((output / "logs").glob("00-vllm-vllm-*")).read_text()


@pytest.mark.end_to_end
def test_in_mode_training_the_real_sglang_serves_what_the_real_trainer_made(config: ComparisonConfig) -> None:
    trainer = config.trainer.but(mode="persistent")
    asked = config.but(mode="training", backends="sglang", sglang_python="auto", num_rollouts=2, num_quality=0, trainer=trainer)
    compare_engines(asked)
    assert resident.recorded() is None, "the next engine would find its memory, and its start done"
    steps = results_in(Path(asked.output)).steps
    assert [step.golden for step in steps] == ["passed", "passed"], "canaries of the trainer included"
    assert len({step.trained_sha256 for step in steps}) == 2
    assert steps[1].adapter_sha256 == steps[0].trained_sha256
    assert all(step.training_s > 0 for step in steps)
