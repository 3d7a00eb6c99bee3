"""How an experiment opens in MLflow: as model training, with the curves of rewards first.

MLflow 3.17 shows an experiment as an application for traces unless its address says `workflowType=machine_learning` or the browser's
switch *Model training* was set once. Tags decide it in other versions only. Charts are sorted by name unless the address names a view,
which is a tag of the experiment; a view of ours is named in the addresses that we print. The page of a single run knows no views.
"""

import json
from collections.abc import Iterable
from typing import Any

from infra.reporting.headline_metrics import PARTS

KIND = {"mlflow.experimentKind": "custom_model_development"}
VIEW = "ratchet"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
SHOWN, FOLDED = ("eval", "train", "rollout"), ("mismatch", "time", "gpu_idle", "memory", "Model metrics", "System metrics")
"""Sections of charts after those of the reward, in order: their metrics begin with these names."""
FIRST_CHARTS = ("reward/mean", "eval/pass_at_1", "eval/mean_reward", "train/loss")
"""The first charts of their sections."""
COLUMNS = (
    *("metrics.`reward/mean`", "metrics.`eval/pass_at_1`"),
    *("params.`model`", "params.`data.source`", "params.`reward.name`", "tags.`ratchet.algorithm`", "tags.`ratchet.sweep`"),
)
"""Columns of the table of runs behind those that MLflow always shows."""
MODEL_TRAINING = "workflowType=machine_learning"


def runs_url(mlflow_url: str, experiment: str) -> str:
    """Return the address of an experiment's runs as a table."""
    return f"{mlflow_url}/#/experiments/{experiment}/runs?{MODEL_TRAINING}&viewStateShareKey={VIEW}"


def curves_url(mlflow_url: str, experiment: str) -> str:
    """Return the address of an experiment's curves, all runs in one chart for each metric."""
    return f"{runs_url(mlflow_url, experiment)}&compareRunsMode=CHART"


def run_url(mlflow_url: str, experiment: str, mlflow_run: str) -> str:
    """Return the address of a run's page."""
    return f"{mlflow_url}/#/experiments/{experiment}/runs/{mlflow_run}?{MODEL_TRAINING}"


def view(parts: Iterable[str], before: str | None = None) -> str:
    """Return the content of the tag VIEW_TAG.

    parts: Names of the parts of rewards.
    before: The tag as it is. The parts that it shows are kept: they belong to other runs.
    """
    known = {section["name"] for section in _sections_in(before) if section["name"].startswith(PARTS)}
    of_parts = sorted(known | {f"{PARTS}{part}" for part in parts})
    shown = ["reward", *of_parts, *SHOWN]
    state = {
        "compareRunSections": [
            {"uuid": _id_of(name), "name": name, "display": name in shown, "isReordered": True, "deleted": False}
            for name in (*shown, *FOLDED)
        ],
        "compareRunCharts": [_line_chart(metric) for metric in FIRST_CHARTS],
        "isAccordionReordered": True,
        "selectedColumns": COLUMNS,
    }
    return json.dumps(state)


def _sections_in(tag: str | None) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(tag or "{}").get("compareRunSections", [])
    except ValueError:
        return []
    return found


def _id_of(section: str) -> str:
    return f"{VIEW}-{section}"


def _line_chart(metric: str) -> dict[str, object]:
    """Return a chart as MLflow's page stores it."""
    section, _, _ = metric.rpartition("/")
    return {
        "type": "LINE",
        "uuid": _id_of(metric),
        "metricSectionId": _id_of(section),
        "metricKey": metric,
        "displayName": metric,
        "isGenerated": True,
        "deleted": False,
        "runsCountToCompare": 10,
        "lineSmoothness": 0,
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
