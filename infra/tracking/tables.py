"""Tables for comparing runs and inspecting steps: data from MLflow and the workspace, as pandas frames. Read only.

The notebooks draw from these and define nothing themselves.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import safetensors.numpy

from infra.models import base_model
from infra.processes import child_environment, children
from infra.records import Step
from infra.reporting import headline_metrics
from infra.reporting.headline_metrics import PARTS
from infra.runs.manifest import read_manifest
from infra.settings import CHECKOUT, main_python, settings
from infra.store.digests import sha256_of
from infra.store.files import only_maker, read_json, read_json_lines, write_json
from infra.store.layout import StepFolder, Workspace, step_folder
from infra.store.samples import Sample, read_samples
from infra.tracking import mlflow_store
from infra.trajectories.spans import turn_of_each

if TYPE_CHECKING:
    from infra.tracking.mlflow_store import MlflowClient

NOT_COMPARED = (
    *("name", "seed"),
    *("tracking.sweep", "tracking.experiment", "tracking.num_samples_shown", "tracking.register_every"),
)
"""Fields that do not define a variant: runs that differ only in these are repetitions of one experiment."""
MAX_FIELDS = 3
"""Most fields in a variant's name. Runs that differ in more fields are distinguished by their own names."""
TOKEN_LOGPROBS_TIMEOUT_S = 1800
RUNS_PER_PAGE = 1000
ON_SCALE_OF_REWARD = ("reward/mean", "eval/mean_reward")
"""Metrics whose values depend on the reward function's scale."""


class RecordedRun(NamedTuple):
    """A training run as recorded in MLflow."""

    id: str
    name: str
    params: dict[str, str]
    """The configuration with which it was started, flat."""
    tags: dict[str, str]


def recorded_runs(
    experiment: str = "ratchet", *, names: Sequence[str] = (), tags: Mapping[str, str] | None = None
) -> list[RecordedRun]:
    """Return the runs of an MLflow experiment, the oldest first. Runs with the same name are distinguished by their ids: "smoke (1a2b3c4d)".

    names: only these; none of them: all.
    tags: only runs with these, such as {"ratchet.sweep": "rates"}.

    Raises:
        ValueError: for an experiment or a name that does not exist; lists the existing ones.
    """
    client = mlflow_store.store_client()
    found = client.get_experiment_by_name(experiment)
    if found is None:
        known = sorted(each.name for each in client.search_experiments())
        raise ValueError(f"MLflow at {mlflow_store.uri()} has no experiment {experiment!r}; it has {', '.join(known)}")
    runs = list(_runs_in(client, found.experiment_id))
    if missing := set(names) - {run.name for run in runs}:
        raise ValueError(
            f"experiment {experiment!r} has no run {', '.join(sorted(missing))}; it has {', '.join(run.name for run in runs)}"
        )
    wanted = (tags or {}).items()
    chosen = [run for run in runs if (not names or run.name in names) and wanted <= run.tags.items()]
    times = Counter(run.name for run in chosen)
    return [run if times[run.name] == 1 else run._replace(name=f"{run.name} ({run.id[:8]})") for run in chosen]


def _runs_in(client: "MlflowClient", experiment: str) -> Iterator[RecordedRun]:
    """Yield all runs: one answer has at most a page of them."""
    token = None
    while True:
        page = client.search_runs(
            [experiment], max_results=RUNS_PER_PAGE, order_by=["attributes.start_time ASC"], page_token=token
        )
        yield from (RecordedRun(each.info.run_id, each.info.run_name, each.data.params, each.data.tags) for each in page)
        token = page.token
        if not token:
            return


def metrics_of(runs: Sequence[RecordedRun], names: Sequence[str]) -> pd.DataFrame:
    """Columns run, variant, reward (the function's name), metric, step, value; a row for each step. MLflow has also the older values of a step that
    was dropped and made again, or of an evaluation that was made again."""
    client, variants = mlflow_store.store_client(), variants_of(runs)
    about = {
        run.name: {"run": run.name, "variant": variants[run.name], "reward": run.params.get("reward.name", "")} for run in runs
    }
    rows = [
        about[run.name] | {"metric": name, "step": step, "value": value}
        for run in runs
        for name in names
        for step, value in _latest(client, run.id, name).items()
    ]
    return pd.DataFrame(rows, columns=["run", "variant", "reward", "metric", "step", "value"])


def _latest(client: "MlflowClient", run_id: str, name: str) -> dict[int, float]:
    """Return the value of each step that was recorded last, in the order of the steps."""
    rows = sorted(client.get_metric_history(run_id, name), key=lambda row: (row.step, row.timestamp))
    return {row.step: row.value for row in rows}


def part_metrics(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of the metrics with the means of the rewards' parts."""
    client = mlflow_store.store_client()
    found = {name for run in runs for name in client.get_run(run.id).data.metrics}
    return [f"{PARTS}{part}/mean" for part in headline_metrics.part_names(dict.fromkeys(found, 0.0))]


class CurvePanel(NamedTuple):
    """A panel of curves."""

    title: str
    counted: str
    """What the horizontal axis counts."""
    rows: pd.DataFrame
    """As of `metrics_of`, those of one metric."""


def panels(metrics: pd.DataFrame, curves: Mapping[str, str]) -> list[CurvePanel]:
    """Return a panel for each metric that has values, in the order of `curves`. Means of different reward functions have different scales, so
    each function has its own panel.

    curves: Metric -> what its axis counts.
    """
    found = []
    for name, counted in curves.items():
        rows = metrics[metrics["metric"] == name]
        if name in ON_SCALE_OF_REWARD and rows["reward"].nunique() > 1:
            found += [CurvePanel(f"{name}, {reward}", counted, of) for reward, of in rows.groupby("reward")]
        elif len(rows):
            found.append(CurvePanel(name, counted, rows))
    return found


def config_diff(runs: Sequence[RecordedRun]) -> pd.DataFrame:
    """A row for each field in which the runs differ, a column for each run; names are left out."""
    fields = sorted({field for run in runs for field in run.params})
    table = {run.name: [run.params.get(field, "") for field in fields] for run in runs}
    frame = pd.DataFrame(table, index=pd.Index(fields, name="field"))
    differing = frame.nunique(axis=1) > 1
    return frame[differing & ~frame.index.isin(("name", "tracking.sweep"))]


def variants_of(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Name the variant of each run: by the fields that distinguish it, or by its runs if there are more than MAX_FIELDS."""
    differing = _differing(runs)
    if differing.empty:
        return {run.name: "all" for run in runs}
    keys = {run.name: tuple(differing[run.name]) for run in runs}
    if len(differing) > MAX_FIELDS:
        return {name: _few([other for other in keys if keys[other] == key]) for name, key in keys.items()}
    fields = [_short(str(field)) for field in differing.index]
    return {name: ", ".join(f"{field} {value}" for field, value in zip(fields, key, strict=True)) for name, key in keys.items()}


def _short(field: str) -> str:
    """Return a field's last word if it can be understood alone: `learning_rate`, but `evaluation.every`."""
    word = field.rpartition(".")[2]
    return word if "_" in word else field


def newest_variants(runs: Sequence[RecordedRun], count: int) -> list[RecordedRun]:
    """Return the runs of the `count` variants that were started last. `runs` has the oldest first."""
    differing = _differing(runs)
    keys = {run.name: tuple(differing[run.name]) for run in runs}
    newest = list(dict.fromkeys(keys[run.name] for run in reversed(runs)))[:count]
    return [run for run in runs if keys[run.name] in newest]


def _differing(runs: Sequence[RecordedRun]) -> pd.DataFrame:
    found = config_diff(runs)
    return found[~found.index.isin(NOT_COMPARED)]


def _few(names: Sequence[str]) -> str:
    more = len(names) - 2
    return ", ".join(names[:2]) + (f" and {more} more" if more > 0 else "")


def bands(rows: pd.DataFrame) -> pd.DataFrame:
    """Over the runs of each variant, at the steps that all of them have: columns variant, step, mean, low, high, num_runs; low and high are
    the extremes.

    rows: As of `metrics_of`, those of one metric.
    """
    grouped = rows.groupby(["variant", "step"])["value"]
    found = grouped.agg(mean="mean", low="min", high="max", num_runs="count").reset_index()
    return found[found["num_runs"] == found["variant"].map(rows.groupby("variant")["run"].nunique())]


def averages(metrics: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """A row for each variant, a column for each metric: its mean over all steps and repetitions."""
    rows = metrics[metrics["metric"].isin(names)]
    table = rows.pivot_table(index="variant", columns="metric", values="value", aggfunc="mean")
    return table.reindex(columns=[name for name in names if name in table.columns])


def samples_of(run: str, step: int) -> pd.DataFrame:
    """A row for each sample of a committed step that was trained on: question, text, finish_reason, reward, advantage, num_output_tokens."""
    folder = _committed(run, step)
    questions = {row["prompt_id"]: row["question"] for row in read_json_lines(StepFolder(folder).prompts)}
    return pd.DataFrame(
        {
            "prompt_id": sample.prompt_id,
            "sample_index": sample.sample_index,
            "question": questions[sample.prompt_id],
            "text": sample.text,
            "finish_reason": sample.finish_reason,
            "reward": sample.reward,
            "advantage": sample.advantage,
            "num_output_tokens": sample.num_sampled_tokens,
        }
        for sample in _assembled(folder)
    )


def tokens_of(run: str, step: int) -> pd.DataFrame:
    """A row for each sampled token of a committed step, with the values of engine and trainer.

    Columns sample (position in the batch), position (in the output), token, text, engine_logprob, trainer_logprob, difference (nats,
    trainer's - engine's), advantage. The trainer computes its values once (seconds, or minutes for a large model, with the GPU
    free). They are stored next to the step.
    """
    folder = _committed(run, step)
    samples, logprobs = _assembled(folder), _trainer_logprobs(folder)
    tokenizer = base_model.tokenizer(base_model.locate(read_manifest(folder).adapter_in.base.id))
    rows, begin = [], 0
    for number, sample in enumerate(samples):
        begin += len(sample.prompt_tokens)
        tokens, engines = (np.asarray(column).tolist() for column in (sample.output_tokens, sample.output_logprobs))
        for position in np.flatnonzero(sample.is_sampled).tolist():
            token, engine = tokens[position], engines[position]
            trainer = float(logprobs[begin + position])
            about = {"sample": number, "position": position, "token": token, "text": tokenizer.decode([token])}
            figures = {"engine_logprob": engine, "trainer_logprob": trainer, "difference": trainer - engine}
            rows.append(about | figures | {"advantage": _advantage(sample, position)})
        begin += len(sample.output_tokens)
    assert begin == len(logprobs), f"{folder}: {begin} tokens in the samples, {len(logprobs)} in the batch"
    return pd.DataFrame(rows)


def _advantage(sample: Sample, position: int) -> float | None:
    """Return the advantage of an output token: its turn's, or the sample's."""
    if sample.turn_advantages is None:
        return sample.advantage
    return sample.turn_advantages[int(turn_of_each(sample.segments)[len(sample.prompt_tokens) + position])]


def _committed(run: str, step: int) -> Path:
    folder = step_folder(Step(run=run, index=step, seed=0))
    if not StepFolder(folder).manifest.exists():
        raise ValueError(f"step {step} of run {run!r} is not committed in workspace {settings().workspace}")
    return folder


def _assembled(folder: Path) -> list[Sample]:
    return read_samples(StepFolder(folder).assembled)


def _trainer_logprobs(folder: Path) -> list[float]:
    files = StepFolder(folder)
    job, batch = files.train.job, files.batch
    out, inputs_key = files.train.token_logprobs, files.train.token_logprobs_inputs
    inputs = {"job": sha256_of(job), "batch": sha256_of(batch)}
    if _is_made(inputs_key, inputs):
        return _logprobs_in(out)
    with only_maker(out):
        if not _is_made(inputs_key, inputs):
            children.run(
                [
                    str(settings().trainer_python or main_python()),
                    "-m",
                    "infra.megatron.program.token_logprobs",
                    str(job),
                    str(out),
                ],
                Workspace.here().logs / "token-logprobs.log",
                timeout_s=TOKEN_LOGPROBS_TIMEOUT_S,
                env={"OMP_NUM_THREADS": str(os.cpu_count() or 1)},
                cwd=CHECKOUT,
                inherits=child_environment.passed_on(),
            )
            write_json(inputs_key, inputs)
    return _logprobs_in(out)


def _is_made(inputs_key: Path, inputs: dict[str, str]) -> bool:
    return inputs_key.exists() and bool(read_json(inputs_key) == inputs)


def _logprobs_in(out: Path) -> list[float]:
    found: list[float] = safetensors.numpy.load_file(out)["logprobs"].tolist()
    return found
