"""The end of a step and of a run in a terminal: ten headline figures, links to its own pages, the next command."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.terminal import console

if TYPE_CHECKING:
    from infra.eval_records import RunReport
    from infra.reporting.step_warnings import Triggered

MAX_STEPS_NAMED = 8


def print_step(run: str, step: int) -> None:
    """The headline figures of a committed step, its warnings, and where to look further."""
    from infra.store.files import read_json
    from infra.store.layout import StepFolder

    folder = StepFolder.at(run, step)
    print_figures(run, step)
    adapter = read_json(folder.report)["adapter"]
    console.print(f"adapter  version {adapter['version']}, SHA-256 {adapter['weights']['sha256']}", soft_wrap=True)
    print_links(run, folder.prefect_page if folder.prefect_page.exists() else None)
    console.print(f"files    {folder.path}", markup=False, soft_wrap=True)
    console.print(f"next     {again()}   makes the next step;   ratchet show {run}   shows samples", markup=False, soft_wrap=True)
    console.print("to end   ratchet down   ends the engine and the servers")


def print_figures(run: str, step: int) -> None:
    from infra.reporting import headline_metrics, step_page
    from infra.runs import history
    from infra.runs.manifest import changes_at
    from infra.runs.run_state import config_of

    figures, config = history.figures_at(run, step) or {}, config_of(run).eval_config
    last = history.last_evaluation(run, config, upto=step)
    now = headline_metrics.with_evaluation(figures, last)
    before = headline_metrics.with_evaluation_before(history.figures_at(run, step - 1), last)
    rows = [
        (
            each.label,
            headline_metrics.value(each, now),
            headline_metrics.change(each, before, now),
            headline_metrics.details(each, now),
        )
        for each in headline_metrics.known(now)
    ]
    print_table(f"step {step} of run {run}", ("", "this step", "change", ""), rows)
    print_warnings(((step, each) for each in step_page.triggered_at(run, step, figures, last)), changes_at(run, [step]))


def print_forecast(run: str, step: int) -> None:
    """The forecast beside what the steps up to this one measured; nothing before the second step."""
    from infra.reporting.forecasts import forecast_table

    if found := forecast_table.rows_of(run, step):
        forecast, rows = found
        print_table(f"\nforecast: {forecast.sharing}; rates: {forecast.source}", forecast_table.COLUMNS, rows)


def print_report(made: "RunReport") -> None:
    """What a run came to."""
    from infra.reporting import run_page
    from infra.runs.manifest import changes_at
    from infra.store.layout import RunFolder

    steps, folder = run_page.figures_of(made), RunFolder.of(made.run)
    ends = run_page.ends_of(steps, made.evaluations)
    print_table(f"run {made.run}: {made.outcome}", ("", *ends.titles), ends.rows)
    print_warnings(run_page.all_triggered(steps), changes_at(made.run, steps))
    if made.evaluations:
        scores = ", ".join(f"{each.pass_at_1:.3f} of adapter {each.step}" for each in made.evaluations)
        console.print(f"pass@1   {scores}", soft_wrap=True)
    about = "".join(f", pass@1 {each.pass_at_1:.3f}" for each in made.evaluations if each.step == made.best.version)
    weights = "the base model" if made.best.weights is None else f"SHA-256 {made.best.sha256}"
    console.print(f"best     adapter {made.best.version}{about}, {weights}", soft_wrap=True)
    if made.unused.line:
        console.print(f"unused   {made.unused.line}", soft_wrap=True)
    print_links(made.run, folder.prefect_page)
    console.print(f"files    {folder.path}", markup=False, soft_wrap=True)
    console.print(
        f"next     ratchet show {made.run}   shows samples;   ratchet chat {made.run}   talks to the best adapter", soft_wrap=True
    )
    console.print("to end   ratchet down   ends the engine and the servers")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, each on one line however narrow the terminal is."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    console.print(title, style="bold", markup=False, soft_wrap=True)
    for row in (columns, *rows):
        line = "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print(line.rstrip(), markup=False, soft_wrap=True)


def print_warnings(found: Iterable[tuple[int, "Triggered"]], changes: Sequence[tuple[int, str]]) -> None:
    """A line for each rule that warned: in which steps, what was seen there last, and what may help.

    changes: What ran otherwise in a step than in the one before it.
    """
    from infra.reporting.step_page import OTHER_PROGRAMS

    by_name: dict[str, list[tuple[int, Triggered]]] = {}
    for step, each in found:
        by_name.setdefault(each.alarm.name, []).append((step, each))
    console.print("warnings" if by_name or changes else "warnings none")
    for step, change in changes:
        console.print(f"  step {step}: {OTHER_PROGRAMS}: {change}", markup=False, soft_wrap=True)
    for times in by_name.values():
        steps = ", ".join(str(step) for step, _ in times[:MAX_STEPS_NAMED]) + (", ..." if len(times) > MAX_STEPS_NAMED else "")
        last = times[-1][1]
        console.print(
            f"  {'step' if len(times) == 1 else 'steps'} {steps}: {last}; {last.alarm.advice}", markup=False, soft_wrap=True
        )


def print_links(run: str, prefect_page: Path | None) -> None:
    """The pages of this run, not of the servers.

    prefect_page: The file with the address of the flow run's page.
    """
    from infra.store.files import read_json
    from infra.tracking import mlflow_store
    from tasks.support.artifacts import mlflow_page

    pages = list(read_json(prefect_page).values()) if prefect_page and prefect_page.exists() else []
    if pages:
        console.print(f"Prefect  {pages[-1]}", soft_wrap=True)
    address = mlflow_page(run) or f"{mlflow_store.uri(run)}   (`ratchet up` starts its pages)"
    console.print(f"MLflow   {address}", markup=False, soft_wrap=True)


def again() -> str:
    """The command that was typed."""
    return shlex.join(["ratchet", *sys.argv[1:]])
