"""What a run's page in MLflow says at first sight: a description with figures, warnings and links, and a table of samples over the steps.

Both are made again from the files on disk with each delivery.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infra.config import RunConfig
from infra.eval_records import Evaluation
from infra.records import StepReport
from infra.reporting import headline_metrics
from infra.reporting.run_page import all_triggered
from infra.reporting.shown_samples import best_and_worst_rows
from infra.reporting.step_page import OTHER_PROGRAMS
from infra.runs import evaluations
from infra.runs.history import Figures
from infra.runs.manifest import changes_at
from infra.store.files import read_json
from infra.store.layout import PREFECT_PAGE, RunFolder, StepFolder
from infra.store.samples import WHOLE_REWARD
from infra.tracking import model_registry

if TYPE_CHECKING:
    from mlflow import MlflowClient as MlflowClient

SAMPLES = "samples.json"
EVALUATIONS = "evaluations.json"
MAX_SAMPLED_STEPS = 50
"""Most steps in the table of samples; of a longer run they are spread evenly, with the first and the last one."""
MAX_NOTE = 8000
"""Letters of a tag's value, as limited by MLflow."""


def bring(client: "MlflowClient", run: str, mlflow_run: str, links: Mapping[str, str]) -> None:
    """Write description, links and samples.

    links: Text -> address, of other pages in MLflow.
    """
    from mlflow.entities import RunTag

    pages = prefect_pages(run)
    tags = {f"ratchet.prefect.{flow}": url for flow, url in pages.items()}
    prefect = {f"{flow} in Prefect": url for flow, url in sorted(pages.items())}
    tags["mlflow.note.content"] = description(run, {**links, **prefect})[:MAX_NOTE]
    tables = {name: table for name, table in {SAMPLES: samples_table(run), EVALUATIONS: evaluations_table(run)}.items() if table}
    for name, table in tables.items():
        client.log_text(mlflow_run, json.dumps(table), name)
    if tables:
        tags["mlflow.loggedArtifacts"] = json.dumps([{"path": name, "type": "table"} for name in tables])
    client.log_batch(mlflow_run, tags=[RunTag(name, value) for name, value in tags.items()])


def prefect_pages(run: str) -> dict[str, str]:
    """Return the addresses of the run's pages in Prefect, by flow; of each flow the latest one."""
    files = RunFolder.of(run)
    folders = [files.path, *(step.path for step in _committed(run)[-1:]), files.summary.path]
    pages: dict[str, str] = {}
    for folder in folders:
        if (path := folder / PREFECT_PAGE).exists():
            pages |= read_json(path)
    return pages


def part_names(run: str) -> list[str]:
    """Return the parts of the reward in the latest committed step."""
    return headline_metrics.part_names(read_json(_committed(run)[-1].report)["metrics"]) if _committed(run) else []


def description(run: str, links: Mapping[str, str]) -> str:
    """Describe a run in Markdown."""
    steps = {report.step: report for report in (StepReport.model_validate(read_json(step.report)) for step in _committed(run))}
    figures = {step: report.metrics for step, report in steps.items()}
    config = model_registry.config_of(run)
    evaluated = evaluations.of_run(run, config.eval_config)
    unreached = evaluations.unreached_threshold(config.evaluation, evaluated)
    warnings = "; ".join(filter(None, (_warnings(run, figures), unreached))) or "none"
    parts = [  # MLflow shows the first lines, and the others on request
        "  \n".join((f"**{state(run, config, len(steps))}**{_now(figures, evaluated)}", f"**Warnings**: {warnings}")),
        ", ".join(f"[{text}]({url})" for text, url in links.items()),
        _table(figures, config),
        _ingredients(config),
        f"**Adapters**: {model_registry.addresses(run)}.",
        "**Look at**: *Model metrics* for the curves, and under *Artifacts* `samples.json` (what the model wrote, step by step), "
        "`evaluations.json` (each adapter on each set), "
        "`summary/report.md` (after the end) and `steps/` (a report of each).",
    ]
    return "\n\n".join(part for part in parts if part)


def state(run: str, config: RunConfig, num_steps: int) -> str:
    """Say how far a run is."""
    report = RunFolder.of(run).report
    ended = read_json(report) if report.exists() else None
    if ended and ended["num_steps"] == num_steps:
        return f"{num_steps} of {config.num_steps} steps, ended: {ended['stopped']}"
    return f"{num_steps} of {config.num_steps} steps so far"


def samples_table(run: str) -> dict[str, list[Any]] | None:
    """Return the best and worst samples of the steps, in the format of `mlflow.log_table`; None if there are none."""
    count = model_registry.config_of(run).tracking.num_samples_shown
    rows = [
        (int(step.path.name), row)
        for step in _spread(_committed(run), MAX_SAMPLED_STEPS)
        if step.assembled.exists()
        for row in best_and_worst_rows(run, int(step.path.name), count)
    ]
    if not rows:
        return None
    parts = [of if isinstance(of := row["parts"], dict) else {} for _, row in rows]
    names = sorted({name for of in parts for name in of} - {WHOLE_REWARD})
    data = [
        [step, row["prompt"], row["completion"], *map(_rounded, (row["reward"], *map(of.get, names), row["advantage"]))]
        for (step, row), of in zip(rows, parts, strict=True)
    ]
    return {"columns": ["step", "prompt", "completion", "reward", *names, "advantage"], "data": data}


def evaluations_table(run: str) -> dict[str, list[Any]] | None:
    """Return all evaluations of the run's adapters, of each set and configuration, in the format of `mlflow.log_table`; None if there are none."""
    made = evaluations.of_run(run)
    if not made:
        return None
    figures = list(dict.fromkeys(name for each in made for name in each.figures))
    about = ["set", "adapter", "evaluation", "questions", "trained on too", "may be the best"]
    data = [
        [
            *(
                each.set_name or "held-out",
                each.step,
                each.eval_digest[:8],
                each.num_prompts,
                each.num_overlapping,
                each.is_eligible,
            ),
            *(_rounded(each.figures.get(name)) for name in figures),
        ]
        for each in sorted(made, key=lambda each: (each.set_name, each.eval_digest, each.step))
    ]
    return {"columns": [*about, *figures], "data": data}


def _rounded(number: object) -> object:
    return round(number, 4) if isinstance(number, float) else number


def _committed(run: str) -> list[StepFolder]:
    folders = [StepFolder(path) for path in sorted(RunFolder.of(run).steps.glob("[0-9]*"))]
    return [folder for folder in folders if folder.manifest.exists()]


def _spread(steps: list[StepFolder], count: int) -> list[StepFolder]:
    if len(steps) <= count:
        return steps
    return [steps[round(number * (len(steps) - 1) / (count - 1))] for number in range(count)]


def _now(steps: dict[int, Figures], evaluated: Sequence[Evaluation]) -> str:
    """Return the latest figures in words."""
    rewards = [figures["reward/mean"] for figures in steps.values() if "reward/mean" in figures]
    scores = [each.pass_at_1 for each in evaluated]
    named = {"mean reward": rewards, "held-out pass@1": scores}
    return "".join(f", {name} {values[-1]:.3f} (at first {values[0]:.3f})" for name, values in named.items() if values)


def _table(steps: dict[int, Figures], config: RunConfig) -> str:
    """Rewards, their parts and held-out figures: at first, at last, at best."""
    of = list(steps.values())
    rows = []
    if of:
        names = {"mean reward": "reward/mean"}
        names |= {f"mean of part {part}": f"{headline_metrics.PARTS}{part}/mean" for part in headline_metrics.part_names(of[-1])}
        for label, name in names.items():
            values = {step: figures[name] for step, figures in steps.items() if name in figures}
            rows.append(_row(label, values, "step"))
    evaluated = evaluations.of_run(config.name, config.eval_config)
    if evaluated:
        metric = evaluations.best_metric(config.evaluation, evaluated)
        for name in dict.fromkeys((f"{evaluated[0].prefix}pass_at_1", metric)):
            label = "held-out " + name.removeprefix("eval/").replace("pass_at_", "pass@").replace("_", " ")
            values = {each.step: each.metrics[name] for each in evaluated if name in each.metrics}
            is_lowest = name == metric and config.evaluation.best_is == "lowest"
            rows.append(_row(label, values, "adapter", min if is_lowest else max))
    return "\n".join(["| | first | last | best |", "|--|--|--|--|", *rows]) if rows else ""


def _row(label: str, values: Mapping[int, float], counted: str, best_of: Callable[..., int] = max) -> str:
    first, last = min(values), max(values)
    best = best_of(values, key=lambda number: values[number])
    cells = [f"{values[number]:.3f} ({counted} {number})" for number in (first, last, best)]
    return f"| {label} | {' | '.join(cells)} |"


def _ingredients(config: RunConfig) -> str:
    trainer = config.trainer
    named = {
        "Model": f"{config.model}, LoRA of rank {trainer.lora.rank}",
        "Data": config.data.source,
        "Reward": config.reward.title,
        "Algorithm": f"{config.batch.advantage} + {trainer.loss.kind}, learning rate {trainer.learning_rate:g}",
        "Step": f"{config.data.num_prompts} prompts with {config.sampling.group_size} samples each",
    }
    return "  \n".join(f"**{name}**: {value}" for name, value in named.items())


def _warnings(run: str, steps: dict[int, Figures]) -> str:
    times: dict[str, list[int]] = {}
    for step, _ in changes_at(run, steps):
        if step not in times.setdefault(OTHER_PROGRAMS, []):
            times[OTHER_PROGRAMS].append(step)
    for step, warning in all_triggered(steps):
        times.setdefault(warning.alarm.name, []).append(step)
    return "; ".join(f"{name} ({_times(found)})" for name, found in times.items())


def _times(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, the last one {steps[-1]}"
