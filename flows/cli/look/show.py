"""Show a run, or one of its steps: headline figures, warnings, the best and the worst samples.

ratchet show mine                                                its latest committed step
ratchet show mine 3                                              step 3
ratchet show mine 3 --samples 8
"""

from typing import Annotated

from cyclopts import Parameter

Step = Annotated[int | None, Parameter(help="Number of a committed step; left out, the latest.", show_default=False)]
Samples = Annotated[int, Parameter(help="Number of samples to show.")]


def show(run: str, step: Step = None, /, *, samples: Samples = 4) -> None:
    if samples < 0:
        raise ValueError(f"--samples {samples} is no number of samples: give 0 or more")
    from flows.cli.terminal import console
    from infra.runs import lineage, run_state
    from infra.runs.accounting import unused

    run_state.check_exists(run)
    steps = lineage.committed_steps(run)
    if not steps:
        raise ValueError(
            f"run {run!r} has no committed step yet: `ratchet status` shows what is at work, `ratchet logs` lists all logs"
        )
    if step is not None and step not in steps:
        raise ValueError(f"run {run!r} has no committed step {step}; it has {', '.join(map(str, steps))}")
    state = run_state.state_of(run)
    best = "" if state.best_score is None else f"; best evaluation {state.best_score:.3f} of adapter {state.best_version}"
    console.print(f"run {run}: {state.num_committed} of {state.num_steps} steps, {state.state}{best}", markup=False)
    if line := unused.of_run(run).line:
        console.print(f"unused: {line}", markup=False, soft_wrap=True)
    print_step(run, steps[-1] if step is None else step, samples)


def print_step(run: str, step: int, num_samples: int) -> None:
    from flows.cli.endings import print_figures, print_forecast
    from flows.cli.terminal import console, indented
    from infra.reporting.shown_samples import best_and_worst_rows

    print_figures(run, step)
    print_forecast(run, step)
    for row in best_and_worst_rows(run, step, num_samples):
        console.print(f"\nreward {row['reward']:.4g}, advantage {row['advantage']:.4g}", markup=False)
        console.print(f"  {indented(row['prompt'], 2)}", markup=False, soft_wrap=True)
        for heading, text in row["turns"] or [("", row["completion"])]:
            if heading:
                console.print(f"  {heading}:", markup=False)
            console.print(f"  > {indented(text, 4)}", markup=False, soft_wrap=True)
        if row["judge"]:
            console.print(f"  judge: {row['judge']}", markup=False)
