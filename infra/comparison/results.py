"""Read the results of a comparison so far from the workspace, and make the output folder from them."""

import shutil
from pathlib import Path

from infra import engines
from infra.comparison import charts, report
from infra.comparison.config import Block, ComparisonConfig, blocks_of
from infra.comparison.measurement.measures import EngineStart, StepMeasures
from infra.comparison.paths import block_folder, output_folder, state_folder, step_path
from infra.comparison.report import Results
from infra.store.files import read_json, write, write_json

START = "start.json"


def read_start(folder: Path) -> EngineStart | None:
    return EngineStart.model_validate(read_json(folder / START)) if (folder / START).exists() else None


def read_step(path: Path) -> StepMeasures | None:
    return StepMeasures.model_validate(read_json(path)) if path.exists() else None


def read_results(config: ComparisonConfig, digest: str) -> Results:
    starts, steps = [], []
    for block in blocks_of(config):
        starts += [start for start in [read_start(block_folder(digest, block))] if start]
        steps += [step for n in range(config.num_steps) if (step := read_step(step_path(digest, block, n)))]
    return Results(config, digest, tuple(starts), tuple(steps))


def results_in(output: Path) -> Results:
    """Read the results of an output folder, as written by write_output: for notebooks."""
    about = read_json(output / "benchmark_combined.json")
    config = ComparisonConfig.model_validate(about["config"])
    each = [read_json(output / f"{backend}_metrics.json") for backend in config.backends]
    starts = [EngineStart.model_validate(start) for found in each for start in found["starts"]]
    steps = [
        StepMeasures.model_validate({name: value for name, value in step.items() if name != "figures"})
        for found in each
        for step in found["steps"]
    ]
    return Results(config, about["digest"], tuple(starts), tuple(steps))


def write_output(results: Results) -> list[Path]:
    """Write all files for people, with charts if matplotlib is installed."""
    folder = output_folder(results.config)
    made = [
        write(folder / "benchmark_report.txt", report.text(results).encode()),
        write(folder / "benchmark_report.md", report.markdown(results).encode()),
        write_json(folder / "benchmark_combined.json", report.combined(results)),
        *(write_json(folder / f"{b}_metrics.json", report.metrics_of(results, b)) for b in results.config.backends),
    ]
    for log in sorted(state_folder(results.digest).glob("blocks/*/*.log")):
        target = folder / "logs" / f"{log.parent.name}-{log.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        made.append(Path(shutil.copyfile(log, target)))
    if charts.is_available():
        made += charts.write(results, folder / "charts")
    return made


def keep_log(digest: str, block: Block) -> None:
    """Copy the running server's log to the block's figures."""
    path = engines.log_path()
    if path is not None and path.exists():
        target = block_folder(digest, block) / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
