"""What a step shows: report.md and timeline.svg in its folder. The same goes to the page of its Prefect run, and to MLflow."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from infra.config import RunConfig
from infra.machine import devices
from infra.records import StepRecord, StepReport
from infra.reporting import brief_lines, headline_metrics, step_warnings, svg, timeline
from infra.reporting.forecasts import forecast_table
from infra.reporting.headline_metrics import PASS_AT_1
from infra.reporting.sample_text import cell, samples_section
from infra.reporting.shown_samples import best_and_worst_rows
from infra.reporting.step_warnings import Triggered
from infra.runs import history
from infra.runs.history import Figures, LastEvaluation
from infra.store.files import read_json, write, write_json
from infra.store.layout import StepFolder
from infra.telemetry import system_metrics
from infra.telemetry.timings import measures_of

log = logging.getLogger(__name__)

OTHER_PROGRAMS = "not what the step before ran with"


def shown_samples(record: StepRecord, count: int) -> list[dict[str, object]]:
    """Rows of the table of samples."""
    return best_and_worst_rows(record.run, record.step, count)


def figures_table(figures: Figures, before: Figures | None, evaluated: Figures | None, last: LastEvaluation | None) -> str:
    """before: of the step before; evaluated: of the step that made the adapter of the last evaluation."""
    now, before = headline_metrics.with_evaluation(figures, last), headline_metrics.with_evaluation_before(before, last)
    rows = [
        f"| {each.label} | **{headline_metrics.value(each, now)}** | {headline_metrics.change(each, before, now)} | "
        f"{headline_metrics.change(each, evaluated, now)} | {headline_metrics.details(each, now)} |"
        for each in headline_metrics.known(now)
    ]
    return "\n".join(["| | this step | vs the step before | vs the last evaluation | |", "|--|--:|--:|--:|--|", *rows])


def evaluation_line(last: LastEvaluation | None) -> str:
    if last is None:
        return "No evaluation yet."
    change = "" if last.before is None else f", {100 * (last.pass_at_1 - last.before):+.1f} points since the one before"
    return f"Last evaluation: adapter version {last.version}, pass@1 **{100 * last.pass_at_1:.1f}%**{change}."


def warnings_of(found: list[Triggered], changes: Sequence[str]) -> str:
    """changes: Lines of what ran otherwise than in the step before."""
    lines = [f"* {OTHER_PROGRAMS}: {cell(change)}" for change in changes]
    return "\n".join([*lines, *([""] if lines else []), warning_rules_table(found)])


def warning_rules_table(found: list[Triggered]) -> str:
    if not found:
        return f"Nothing: none of {len(step_warnings.WARNING_RULES)} signs (docs/runs.md lists them)."
    rows = [
        f"| **{alarm.name}** | `{alarm.figure}` {value:.3g}<br>{step_warnings.said(alarm)}: {bound:.3g} | {cell(alarm.advice)} |"
        for alarm, value, bound in found
    ]
    return "\n".join(["| warning | what was seen | what may help |", "|--|--|--|", *rows])


def all_figures(figures: Figures) -> str:
    """A table for each group of figures."""
    parts = []
    for group, of_group in headline_metrics.grouped(figures).items():
        rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in of_group.items())
        parts.append(f"### {group}\n\n| figure | value |\n|--|--:|\n{rows}")
    return "\n\n".join(parts)


def markdown_of(
    made: StepReport,
    *,
    before: Figures | None,
    last: LastEvaluation | None,
    found: list[Triggered],
    changes: Sequence[str],
    samples: list[dict[str, object]],
    colocation: devices.Plan,
    picture: str,
) -> str:
    """picture: the URL of the time line."""
    # The adapter that was evaluated last was made by the step before its number; the base model by none.
    evaluated = history.figures_at(made.run, last.version - 1) if last else None
    return f"""# {made.run}, step {made.step}

{figures_table(made.metrics, before, evaluated, last)}

{evaluation_line(last)}

## Warnings

{warnings_of(found, changes)}

## Time line

![time line of step {made.step}]({picture})

Colocation **{colocation.colocation}**: {colocation.reason}

Micro-batches of {colocation.microbatches}
{f"{chr(10)}Turns with the judge: {colocation.judge}{chr(10)}" if colocation.judge else ""}\
{forecast_table.section(made.run, made.step, made.metrics)}
## Best and worst samples

{samples_section(samples)}

## All figures

Adapter version **{made.adapter.version}**, SHA-256 `{made.adapter.sha256}`

{all_figures(made.metrics)}
"""


def timeline_of(made: StepRecord) -> str:
    """As SVG."""
    folder = StepFolder.of(made)
    began, result = read_json(folder.began)["at"], read_json(folder.train.result)
    spans = timeline.spans_of(began, measures_of(made.run, made.step), result.get("began_at", {}), result["seconds"])
    return timeline.picture(f"{made.run}, step {made.step}", spans, system_metrics.rows(), began)


class StepPage(NamedTuple):
    """What is shown of a step outside its folder."""

    report: str
    """For Prefect's page, with the picture in it."""
    line: str
    """For the log."""


def write_page(
    made: StepReport, config: RunConfig, colocation: devices.Plan, prefect_page: dict[str, str], changes: Sequence[str] = ()
) -> StepPage:
    """Write the files of a step that is about to be committed, and return what is shown of it elsewhere.

    prefect_page: Name of the flow -> address of this flow run's page.
    changes: As in `warnings_of`.
    """
    folder, picture = StepFolder.of(made), timeline_of(made)
    last = history.last_evaluation(made.run, config.eval_config, upto=made.step)
    found, before = triggered_at(made.run, made.step, made.metrics, last), history.figures_at(made.run, made.step - 1)
    log_warnings(made, found, before, history.last_evaluation(made.run, config.eval_config, upto=made.step - 1))
    for change in changes:
        log.warning("step %d, %s: %s", made.step, OTHER_PROGRAMS, change)
    write_json(folder.system_metrics, system_metrics.rows())
    write_json(folder.prefect_page, prefect_page)
    write(folder.timeline, picture.encode())

    def report(url: str) -> str:
        return markdown_of(
            made,
            before=before,
            last=last,
            found=found,
            changes=changes,
            samples=shown_samples(made, config.tracking.num_samples_shown),
            colocation=colocation,
            picture=url,
        )

    write(folder.page, report(folder.timeline.name).encode())
    num_warnings = len(found) + len(changes)
    line = brief_lines.step_line(made, config.num_steps, before=before, last=last, num_warnings=num_warnings)
    return StepPage(report(svg.data_uri(picture)), line)


def log_warnings(made: StepReport, found: list[Triggered], before: Figures | None, last: LastEvaluation | None) -> None:
    """Log what a step warns of: a warning that the step before raised too is a detail.

    before: Figures of the step before; last: the evaluation that it knew.
    """
    earlier = triggered_at(made.run, made.step - 1, before, last) if before else []
    known = {each.alarm.name for each in earlier}
    for each in found:
        level = logging.INFO if each.alarm.name in known else logging.WARNING
        log.log(level, "step %d, %s; %s", made.step, each, each.alarm.advice)


def triggered_at(run: str, step: int, figures: Figures, last: LastEvaluation | None) -> list[Triggered]:
    """Return the warnings of a step.

    last: The last evaluation that the step knows.
    """
    before = history.history_before(run, step)
    if last is None:
        return step_warnings.triggered(figures, before)
    with_first = before._replace(first=[*before.first, {PASS_AT_1: last.first}])
    return step_warnings.triggered(figures | {PASS_AT_1: last.pass_at_1}, with_first)
