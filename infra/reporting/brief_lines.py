"""Lines of a step, an evaluation and a difference of two adapters in a terminal and on Prefect's pages."""

from collections.abc import Sequence

from infra.eval_records import Difference, Evaluation, Interval
from infra.records import StepReport
from infra.runs.history import Figures, LastEvaluation

OF_DIFFERENCE = ("set", "figure", "difference", "95% interval", "questions")
"""Titles of the cells of a row of difference_rows."""


def step_line(
    made: StepReport, num_steps: int, *, before: Figures | None = None, last: LastEvaluation | None = None, num_warnings: int = 0
) -> str:
    """Return `step 7/20  reward 0.58 (+0.04)  ...`; a figure that was not measured is left out. Steps count from 0, as their folders do.

    before: Figures of the step before.
    last: The last evaluation so far.
    num_warnings: Number of warnings that this step raised.
    """
    now = made.metrics
    reward = _signed("reward", now.get("reward/mean"), before.get("reward/mean") if before else None)
    # `ratchet quickstart` and the deployment rl-step go on past a run's planned steps.
    of_planned = f"/{num_steps}" if made.step < num_steps else ""
    parts = [f"step {made.step}{of_planned}", reward, f"pass@1 {last.pass_at_1:.2f}" if last else ""]
    seconds = {"": "time/step_s", "rollout ": "time/roll_out_s", "train ": "time/train_s"}
    parts += [f"{label}{now[name]:.1f} s" for label, name in seconds.items() if name in now]
    parts += [f"tokens {now['rollout/output_tokens']:,.0f}"] if "rollout/output_tokens" in now else []
    parts += [f"warnings {num_warnings}"] if num_warnings else []
    return "  ".join(part for part in parts if part)


def evaluation_line(made: Evaluation, before: Evaluation | None, seconds: float) -> str:
    """Return `eval of adapter 10  pass@1 0.61 (+0.05)  ...`.

    before: The evaluation before it, with the same questions.
    """
    of_set = f" on {made.set_name}" if made.set_name else ""
    parts = [f"eval of adapter {made.step}{of_set}", _signed("pass@1", made.pass_at_1, before.pass_at_1 if before else None)]
    parts += [f"pass@{k} {value:.2f}" for k, value in made.pass_at_k.items() if k != "1"]
    parts += [f"mean@{made.num_samples} {made.mean_at_n.mean:.2f}"] if made.mean_at_n else []
    parts += [] if made.mean_reward is None else [f"reward {made.mean_reward:.2f}"]
    parts += [f"{seconds:.1f} s", f"questions {made.num_prompts}"]
    return "  ".join(parts)


def _signed(label: str, now: float | None, before: float | None) -> str:
    if now is None:
        return ""
    return f"{label} {now:.2f}" + ("" if before is None else f" ({now - before:+.2f})")


def difference_rows(differences: Sequence[Difference]) -> list[tuple[str, ...]]:
    """Return a row of cells for each figure."""
    return [
        (each.set_name or "held-out", name, *_cells(found))
        for each in differences
        for name, found in (("mean reward", each.reward), ("share that passes", each.passed))
    ]


def _cells(found: Interval | None) -> tuple[str, str, str]:
    if found is None:
        return "-", "fewer than two questions have judged answers of both", "-"
    return f"{found.mean:+.4f}", f"{found.low:+.4f} to {found.high:+.4f}", str(found.num_questions)
