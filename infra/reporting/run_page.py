"""What a run shows: summary/report.md with its curves, on the page of its Prefect run and in MLflow."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from infra.config import EvaluationConfig, RunConfig
from infra.eval_records import Evaluation, Interval, RunReport
from infra.records import StepRecord
from infra.reporting import curves, headline_metrics, step_warnings, svg
from infra.reporting.curves import Panel
from infra.reporting.headline_metrics import PASS_AT_1
from infra.reporting.names import evaluation_name, step_name
from infra.reporting.sample_text import cell, same_questions_section, samples_section
from infra.reporting.step_page import OTHER_PROGRAMS, all_figures, shown_samples
from infra.reporting.step_warnings import Triggered
from infra.runs import evaluations, history
from infra.runs.history import Figures
from infra.runs.manifest import changes_at
from infra.store.files import path_of, read_json, write, write_json
from infra.store.layout import EvaluationFolder, RunFolder, StepFolder

PASSED, HELD_OUT_REWARD = "held-out pass@1", "held-out mean reward"
NUM_ENDS = 3
"""Steps at the beginning and at the end of which the means are compared."""
PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("mean reward", {"": "reward/mean"}),
    (PASSED, {}),
    (HELD_OUT_REWARD, {}),
    ("entropy, nats", {"": "train/entropy"}),
    ("engine against trainer, nats", {"": "mismatch/mean_abs_logprob_diff"}),
    ("gradient norm", {"": "train/grad_norm"}),
    ("shares", {"zero-std groups": "reward/frac_zero_std_groups", "truncated": "rollout/truncated_frac"}),
    ("rollout, tokens/s", {"": "rollout/tokens_per_s"}),
    ("time, s", {"step": "time/step_s", "rollout": "time/roll_out_s", "training": "time/train_s"}),
    ("memory, GiB", {"sampling": "memory/inference_gib", "training": "memory/training_gib"}),
)


def panels_of(steps: dict[int, Figures], evaluated: tuple[Evaluation, ...]) -> list[Panel]:
    made = [
        Panel(title, {label: [(step, of[name]) for step, of in steps.items() if name in of] for label, name in names.items()})
        for title, names in PANELS
    ]
    of_evaluations = {
        PASSED: [(float(each.step), each.pass_at_1) for each in evaluated],
        HELD_OUT_REWARD: [(float(each.step), each.mean_reward) for each in evaluated if each.mean_reward is not None],
    }
    panels = [Panel(each.title, {"": of_evaluations[each.title]}) if each.title in of_evaluations else each for each in made]
    return [*panels[:1], *part_panels(steps), *panels[1:]]


def part_panels(steps: dict[int, Figures]) -> list[Panel]:
    """A panel with the mean of each part of the reward."""
    parts = sorted({part for of in steps.values() for part in headline_metrics.part_names(of)})
    names = {part: f"{headline_metrics.PARTS}{part}/mean" for part in parts}
    return [
        Panel(f"mean of part {part}", {"": [(float(step), of[name]) for step, of in steps.items() if name in of]})
        for part, name in names.items()
    ]


class Ends(NamedTuple):
    """Headline figures at both ends of a run: means of a few steps, and the first and the last evaluation."""

    first: Figures
    last: Figures
    num_steps: int
    """Number of steps of each mean."""

    @property
    def titles(self) -> tuple[str, str, str, str]:
        steps_are = "step" if self.num_steps == 1 else f"{self.num_steps} steps"
        return f"first {steps_are}", f"last {steps_are}", "change", ""

    @property
    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Label, both values, their change, and the details of the last steps."""
        return [
            (
                each.label,
                headline_metrics.value(each, self.first),
                headline_metrics.value(each, self.last),
                headline_metrics.change(each, self.first, self.last),
                headline_metrics.details(each, self.last),
            )
            for each in headline_metrics.known(self.last)
        ]


def ends_of(steps: dict[int, Figures], evaluated: tuple[Evaluation, ...]) -> Ends:
    of = [headline_metrics.with_evaluation(figures, None) for figures in steps.values()]
    count = max(1, min(NUM_ENDS, len(of) // 2))
    first, last = ({PASS_AT_1: evaluated[end].pass_at_1} if evaluated else {} for end in (0, -1))
    return Ends(_means(of[:count]) | first, _means(of[-count:]) | last, count)


def ends_table(ends: Ends) -> str:
    rows = [f"| {label} | {first} | **{last}** | {change} | {details} |" for label, first, last, change, details in ends.rows]
    return "\n".join([f"| | {' | '.join(ends.titles)} |", "|--|--:|--:|--:|--|", *rows])


def reports_list(made: RunReport, steps: dict[int, Figures]) -> str:
    """A line for each step and each evaluation, with a link to its own page in Prefect."""
    of_steps = [
        f"* {_linked(step_name(made.run, step), StepFolder.at(made.run, step).prefect_page)}: reward {of['reward/mean']:.3g}"
        for step, of in steps.items()
        if "reward/mean" in of
    ]
    of_evaluations = [
        f"* {_linked(evaluation_name(made.run, each.step), EvaluationFolder(path_of(each.file).parent).prefect_page)}: "
        f"pass@1 {each.pass_at_1:.3f}{f' on {cell(each.set_name)}' if each.set_name else ''}"
        for each in (*made.evaluations, *made.others)
    ]
    return "\n".join([*of_steps, *of_evaluations]) or "None: no step was made."


def _linked(name: str, page: Path) -> str:
    """page: The file with the addresses of flow runs' pages, by flow; the last one is the innermost."""
    pages: dict[str, str] = read_json(page) if page.exists() else {}
    return f"[{cell(name)}]({list(pages.values())[-1]})" if pages else cell(name)


def _means(steps: list[Figures]) -> Figures:
    names = set.intersection(*map(set, steps)) if steps else set()
    return {name: fmean(step[name] for step in steps) for name in names}


def evaluations_table(evaluated: tuple[Evaluation, ...], config: EvaluationConfig) -> str:
    if not evaluated:
        return "None were made (evaluation.every)."
    best = f"\nThe best is chosen by `{evaluations.best_metric(config, evaluated)}`, the {config.best_is} value."
    unreached = evaluations.unreached_threshold(config, evaluated)
    warning = [f"\n**Warning**: {unreached}."] if unreached else []
    return "\n".join([*_rows_of(evaluated), best, *warning])


def other_tables(others: Sequence[Evaluation]) -> str:
    """A table for each further set."""
    names = dict.fromkeys(each.set_name for each in others)
    tables = {name: _rows_of([each for each in others if each.set_name == name]) for name in names}
    return "".join(f"\n\n### {cell(name)}\n\n" + "\n".join(rows) for name, rows in tables.items())


def _rows_of(evaluated: Sequence[Evaluation]) -> list[str]:
    """The table of one set's evaluations, by version."""
    rows = []
    for before, each in zip((None, *evaluated), evaluated, strict=False):
        change = f"{100 * (each.pass_at_1 - before.pass_at_1):+.1f} points" if before else "-"
        more = ", ".join(f"{k}: {value:.3f}" for k, value in each.pass_at_k.items()) or "-"
        more += f"; mean@{each.num_samples}: {_with_bounds(each.mean_at_n)}" if each.mean_at_n else ""
        reward = "-" if each.mean_reward is None else f"{each.mean_reward:.4g}"
        reward = _with_bounds(each.reward_interval) if each.reward_interval else reward
        length = "-" if each.mean_output_tokens is None else f"{each.mean_output_tokens:.4g}"
        rows.append(
            f"| {each.step} | **{each.pass_at_1:.3f}** | {change} | {more} | {reward} | {length} | {100 * each.truncated_frac:.1f}% | "
            f"{each.num_unjudged or '-'} |"
        )
    head = "| adapter version | pass@1 | since the one before | pass@k | mean reward (95%) | mean tokens | truncated | unjudged |"
    return [head, "|--:|--:|--:|--|--:|--:|--:|--:|", *rows]


def _with_bounds(found: Interval) -> str:
    return f"{found.mean:.4g} ({found.low:.3g} to {found.high:.3g})"


def all_triggered(steps: dict[int, Figures]) -> list[tuple[int, Triggered]]:
    """Return the warnings of every step, as in its own report."""
    of = list(steps.values())
    return [(step, each) for n, step in enumerate(steps) for each in step_warnings.triggered(of[n], history.history_in(of, n))]


def warnings_table(found: list[tuple[int, Triggered]], changes: list[tuple[int, str]]) -> str:
    """changes: Of programs; see infra.runs.manifest.changes_at."""
    lines = [f"* Step {step}, {OTHER_PROGRAMS}: {cell(change)}" for step, change in changes]
    if not found:
        return "\n".join(lines or ["None in any step."])
    by_name: dict[str, list[tuple[int, Triggered]]] = {}
    for step, each in found:
        by_name.setdefault(each.alarm.name, []).append((step, each))
    rows = [
        f"| **{name}** | {len(times)} ({', '.join(str(step) for step, _ in times[:8])}{', ...' if len(times) > 8 else ''}) | "
        f"`{times[-1][1].alarm.figure}` {times[-1][1].value:.3g}<br>{step_warnings.said(times[-1][1].alarm)} | {cell(times[-1][1].alarm.advice)} |"
        for name, times in by_name.items()
    ]
    table = ["| warning | steps | the last time | what may help |", "|--|--|--|--|", *rows]
    return "\n".join([*lines, *([""] if lines else []), *table])


def markdown_of(
    made: RunReport,
    steps: dict[int, Figures],
    samples: list[dict[str, object]],
    *,
    evaluation: EvaluationConfig,
    curves_url: str,
    timeline_url: str | None,
) -> str:
    of_last = steps[max(steps)] if steps else {}
    unused = f"\n**Unused**: {made.unused.line}.\n" if made.unused.line else ""
    last = f"## Time line of the last step\n\n![time line]({timeline_url})\n\n" if timeline_url else ""
    return f"""# {made.run}

{made.outcome}. Best adapter version **{made.best.version}**, latest **{made.latest.version}**.

SHA-256 of the best: `{made.best.sha256}`
{unused}
{ends_table(ends_of(steps, made.evaluations))}

## Evaluations

{evaluations_table(made.evaluations, evaluation)}{other_tables(made.others)}

## Curves

![curves]({curves_url})

## Warnings

{warnings_table(all_triggered(steps), changes_at(made.run, steps))}

{last}## The same questions over the evaluations

{same_questions_section(made.evaluations) or "No evaluation has answers on the disk."}

## Best and worst samples of the last step

{samples_section(samples)}

## Reports of the steps and evaluations

{reports_list(made, steps)}

## All figures of the last step

{all_figures(of_last)}
"""


def figures_of(made: RunReport) -> dict[int, Figures]:
    """Return the figures by step, in order. A run that started with a replay has none of earlier steps."""
    known = {step: history.figures_at(made.run, step) for step in range(made.latest.version)}
    return {step: figures for step, figures in known.items() if figures is not None}


def write_page(made: RunReport, config: RunConfig, prefect_page: dict[str, str]) -> str:
    """The files of the run's summary; gives its report for Prefect's page, with the pictures in it."""
    folder, steps = RunFolder.of(made.run).summary, figures_of(made)
    drawn = curves.picture(panels_of(steps, made.evaluations))
    last = StepRecord(run=made.run, step=max(steps, default=0))
    of_last = StepFolder.of(last).timeline
    samples = shown_samples(last, config.tracking.num_samples_shown) if steps else []
    write(folder.curves, drawn.encode())
    write_json(folder.prefect_page, prefect_page)
    in_step = f"../steps/{last.step:06d}/{of_last.name}" if of_last.exists() else None
    # Last: its digest says whether MLflow has it all.
    report = partial(markdown_of, made, steps, samples, evaluation=config.evaluation)
    write(folder.page, report(curves_url=folder.curves.name, timeline_url=in_step).encode())
    inline = svg.data_uri(of_last.read_text()) if of_last.exists() else None
    return report(curves_url=svg.data_uri(drawn), timeline_url=inline)
