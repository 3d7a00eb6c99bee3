"""The one line that a step or an evaluation has in a terminal and on Prefect's log page."""

from infra.records import Evaluation, StepReport
from infra.runs.history import Figures, LastEvaluation


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
    parts = [f"eval of adapter {made.step}", _signed("pass@1", made.pass_at_1, before.pass_at_1 if before else None)]
    parts += [f"pass@{k} {value:.2f}" for k, value in made.pass_at_k.items() if k != "1"]
    parts += [] if made.mean_reward is None else [f"reward {made.mean_reward:.2f}"]
    parts += [f"{seconds:.1f} s", f"questions {made.num_prompts}"]
    return "  ".join(parts)


def _signed(label: str, now: float | None, before: float | None) -> str:
    if now is None:
        return ""
    return f"{label} {now:.2f}" + ("" if before is None else f" ({now - before:+.2f})")
