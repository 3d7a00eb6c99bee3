"""A table of runs by their staleness: `python tests/benches/staleness_table.py RUN_FOLDER...`, of the workspace in RATCHET_WORKSPACE."""

import statistics
import sys
from pathlib import Path

from infra.config import RunConfig
from infra.eval_records import Evaluation
from infra.runs.evaluations import of_run
from infra.store.files import read_json
from infra.store.layout import RunFolder

AGE, AHEAD, APART = "rollout/age", "rollout/steps_ahead", "mismatch/mean_abs_logprob_diff"


def row_of(folder: Path) -> str:
    """Return one run: the pass@1 of its evaluations, and means over its steps; the first step starts the programs and is left out."""
    steps = [read_json(path)["metrics"] for path in sorted(folder.glob("steps/*/report.json"))]
    config = RunConfig.model_validate(read_json(RunFolder.of(folder.name).config))
    made = of_run(folder.name, config.eval_config)
    greedy, sampled = (" ".join(f"{value:.3f}" for value in curve) for curve in zip(*map(pass_at_1, made), strict=True))
    age, ahead, apart = (statistics.fmean(step.get(name, 0.0) for step in steps[1:]) for name in (AGE, AHEAD, APART))
    staleness = config.trainer.loss.correction.max_staleness
    return f"| {staleness} | {greedy} | {sampled} | {seconds_of(folder):.1f} | {age:.1f} | {ahead:.1f} | {apart:.4f} |"


def pass_at_1(made: Evaluation) -> tuple[float, float]:
    """Return the share of greedy and of sampled answers that pass."""
    return made.pass_at_1, made.pass_at_k["1"]


def seconds_of(folder: Path) -> float:
    """Return the mean seconds of a step, from the first commit to the last, without the evaluations in between."""
    manifests = sorted(folder.glob("steps/*/manifest.json"))
    first, last = (read_json(path)["committed_at"] for path in (manifests[0], manifests[-1]))
    found = [read_json(path) for path in folder.glob("evaluations/*/evaluation.json")]
    evaluated = sum(each["seconds"] for each in found if first < each["at"] < last)
    return float(last - first - evaluated) / (len(manifests) - 1)


def main() -> None:
    print("| n | greedy pass@1 at each evaluation | sampled | seconds of a step | age | steps ahead | nats from the sampler |")
    print("|--:|--|--:|--:|--:|--:|--:|")
    for folder in sys.argv[1:]:
        print(row_of(Path(folder)))


if __name__ == "__main__":
    main()
