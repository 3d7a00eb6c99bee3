"""What a step shows: report.md and timeline.svg in its folder. The same goes to the page of its Prefect run, and to MLflow."""

import logging
import re
import textwrap
from collections.abc import Sequence

from infra.config import RunConfig
from infra.machine import devices
from infra.records import StepRecord, StepReport
from infra.reporting import headline_metrics, step_warnings, svg, timeline
from infra.reporting.shown_samples import best_and_worst_rows
from infra.reporting.step_warnings import Triggered
from infra.runs import history
from infra.runs.history import Figures, LastEvaluation
from infra.store.files import read_json, write, write_json
from infra.store.layout import StepFolder
from infra.store.samples import WHOLE_REWARD
from infra.telemetry import system_metrics
from infra.telemetry.timings import measures_of

log = logging.getLogger(__name__)

PASS_AT_1 = "eval/pass_at_1"
OTHER_PROGRAMS = "not what the step before ran with"
MARKUP = re.compile(r"[\\`*_\[\]<>|~]")
MAX_LETTERS, WIDTH = 300, 44
"""Letters and line width of a question or an answer in a table. Prefect's pages do not wrap lines in tables."""


def shown_samples(record: StepRecord, count: int) -> list[dict[str, object]]:
    """Rows of the table of samples."""
    return best_and_worst_rows(record.run, record.step, count)


def figures_table(now: Figures, before: Figures | None, evaluated: Figures | None) -> str:
    """before: of the step before; evaluated: of the step that made the adapter of the last evaluation."""
    rows = [
        f"| {each.label} | **{headline_metrics.value(each, now)}** | {headline_metrics.change(each, before, now)} | "
        f"{headline_metrics.change(each, evaluated, now)} |"
        for each in headline_metrics.known(now)
    ]
    return "\n".join(["| | this step | vs the step before | vs the last evaluation |", "|--|--:|--:|--:|", *rows])


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


def samples_table(rows: list[dict[str, object]]) -> str:
    """A row for each sample, with a column for each named part of the reward."""
    parts_of_rows = [parts if isinstance(parts := row.get("parts"), dict) else {} for row in rows]
    names = sorted({name for parts in parts_of_rows for name in parts})
    shown = [] if names == [WHOLE_REWARD] else names
    lines = []
    for row, parts in zip(rows, parts_of_rows, strict=True):
        if isinstance(row["reward"], float) and isinstance(row["advantage"], float):
            values = [f"{parts[name]:.3g}" if name in parts else "-" for name in shown]
            cells = [
                f"{row['reward']:.3g}",
                *values,
                f"{row['advantage']:+.3g}",
                cell(str(row["prompt"])),
                cell(str(row["completion"])),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    titles = ["reward", *map(cell, shown), "advantage", "question", "answer"]
    return "\n".join([f"| {' | '.join(titles)} |", f"|--:|{'--:|' * len(shown)}--:|--|--|", *lines])


def cell(words: str) -> str:
    """Text that a model wrote, as it stands, in a cell of a Markdown table."""
    short = words if len(words) <= MAX_LETTERS else f"{words[:MAX_LETTERS]} ..."
    lines = [part for line in short.splitlines() for part in textwrap.wrap(line, WIDTH)]
    return "<br>".join(MARKUP.sub(r"\\\g<0>", line) for line in lines)


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
    everything = "\n".join(f"| {name} | {value:.6g} |" for name, value in sorted(made.metrics.items()))
    # The adapter that was evaluated last was made by the step before its number; the base model by none.
    evaluated = history.figures_at(made.run, last.version - 1) if last else None
    return f"""# {made.run}, step {made.step}

{figures_table(made.metrics, before, evaluated)}

{evaluation_line(last)}

## Warnings

{warnings_of(found, changes)}

## Time line

![time line of step {made.step}]({picture})

Colocation **{colocation.colocation}**: {colocation.reason}

## Best and worst samples

{samples_table(samples)}

## All figures

Adapter version **{made.adapter.version}**, SHA-256 `{made.adapter.sha256}`

| figure | value |
|--|--:|
{everything}
"""


def timeline_of(made: StepRecord) -> str:
    """As SVG."""
    folder = StepFolder.of(made)
    began, result = read_json(folder.began)["at"], read_json(folder.train.result)
    spans = timeline.spans_of(began, measures_of(made.run, made.step), result.get("began_at", {}), result["seconds"])
    return timeline.picture(f"{made.run}, step {made.step}", spans, system_metrics.rows(), began)


def write_page(
    made: StepReport, config: RunConfig, colocation: devices.Plan, prefect_page: dict[str, str], changes: Sequence[str] = ()
) -> str:
    """Write the files of a step that is about to be committed, and return its report for Prefect's page, with the picture in it.

    prefect_page: Name of the flow -> address of this flow run's page.
    changes: As in `warnings_of`.
    """
    folder, picture = StepFolder.of(made), timeline_of(made)
    last = history.last_evaluation(made.run, config.eval_config, upto=made.step)
    found = triggered_in(made, last)
    for each in found:
        log.warning("step %d, %s; %s", made.step, each, each.alarm.advice)
    for change in changes:
        log.warning("step %d, %s: %s", made.step, OTHER_PROGRAMS, change)
    write_json(folder.system_metrics, system_metrics.rows())
    write_json(folder.prefect_page, prefect_page)
    write(folder.timeline, picture.encode())

    def report(url: str) -> str:
        return markdown_of(
            made,
            before=history.figures_at(made.run, made.step - 1),
            last=last,
            found=found,
            changes=changes,
            samples=shown_samples(made, config.tracking.num_samples_shown),
            colocation=colocation,
            picture=url,
        )

    write(folder.page, report(folder.timeline.name).encode())
    return report(svg.data_uri(picture))


def triggered_in(made: StepReport, last: LastEvaluation | None) -> list[Triggered]:
    before = history.history_before(made.run, made.step)
    if last is None:
        return step_warnings.triggered(made.metrics, before)
    with_first = before._replace(first=[*before.first, {PASS_AT_1: last.first}])
    return step_warnings.triggered(made.metrics | {PASS_AT_1: last.pass_at_1}, with_first)
