"""A table of runs by their staleness: `python tests/benches/staleness_table.py RUN_FOLDER...`, of the workspace in RATCHET_WORKSPACE."""

import statistics
import sys
from pathlib import Path

from infra.config import RunConfig
from infra.runs.evaluations import of_run
from infra.store.files import read_json
from infra.store.layout import RunFolder

SECONDS, AGE, AHEAD, FACTOR = "time/step_s", "rollout/age", "rollout/steps_ahead", "mismatch/weight_mean"


def row_of(folder: Path) -> str:
    """Return one run: greedy pass@1 of its evaluations, and the medians of its steps; the first step starts the programs and is left out."""
    steps = [read_json(path)["metrics"] for path in sorted(folder.glob("steps/*/report.json"))]
    config = RunConfig.model_validate(read_json(RunFolder.of(folder.name).config))
    curve = " ".join(f"{each.pass_at_1:.2f}" for each in of_run(folder.name, config.eval_config))
    reward = statistics.fmean(step["reward/mean"] for step in steps[-4:])
    seconds, age, ahead, factor = (
        statistics.median(step.get(name, 0.0) for step in steps[1:]) for name in (SECONDS, AGE, AHEAD, FACTOR)
    )
    staleness = config.trainer.loss.correction.max_staleness
    return f"| {staleness} | {curve} | {reward:.2f} | {seconds:.1f} | {age:g} | {ahead:g} | {factor:.3f} |"


def main() -> None:
    print(
        "| n | greedy pass@1 at each evaluation | reward, last four steps | seconds of a step | age | steps ahead | mean factor |"
    )
    print("|--:|--|--:|--:|--:|--:|--:|")
    for folder in sys.argv[1:]:
        print(row_of(Path(folder)))


if __name__ == "__main__":
    main()
