"""Tables of recorded runs, from a real MLflow store in a file."""

from pathlib import Path

import pandas as pd
import pytest

from infra.config import RunConfig
from infra.tracking import mlflow_store, tables
from infra.tracking.tables import RecordedRun


@pytest.fixture
def runs(workspace: Path) -> list[str]:
    """Two seeds of one learning rate, one of another, and a run of another sweep."""
    client = mlflow_store.store_client()
    (workspace / "mlflow").mkdir(exist_ok=True)
    experiment = client.create_experiment("ratchet")
    made = {"a0": ("1e-4", "0"), "a1": ("1e-4", "1"), "b0": ("3e-4", "0"), "other": ("3e-4", "1")}
    for name, (rate, seed) in made.items():
        sweep = "elsewhere" if name == "other" else "rates"
        run = client.create_run(experiment, run_name=name, tags={"ratchet.sweep": sweep}).info.run_id
        for field, value in {
            "trainer.learning_rate": rate,
            "seed": seed,
            "data.source": "arithmetic",
            "tracking.sweep": sweep,
        }.items():
            client.log_param(run, field, value)
        for step in range(2):
            client.log_metric(run, "reward/mean", round(float(rate) * 1e4) + int(seed) + step, step=step, timestamp=step)
    return list(made)


def test_runs_are_found_by_name_and_by_tag(runs: list[str]) -> None:
    assert [run.name for run in tables.recorded_runs()] == runs
    assert [run.name for run in tables.recorded_runs(names=["b0", "a0"])] == ["a0", "b0"]
    assert [run.name for run in tables.recorded_runs(tags={"ratchet.sweep": "rates"})] == ["a0", "a1", "b0"]


def test_all_runs_are_found_however_many_one_answer_has(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RUNS_PER_PAGE", 3)
    assert [run.name for run in tables.recorded_runs()] == runs


def test_runs_of_one_name_are_told_apart(runs: list[str]) -> None:
    client = mlflow_store.store_client()
    experiment = client.get_experiment_by_name("ratchet")
    assert experiment is not None
    twin = client.create_run(experiment.experiment_id, run_name="a0").info.run_id
    client.log_metric(twin, "reward/mean", 9.0, step=0)
    found = tables.recorded_runs(names=["a0", "b0"])
    assert [run.name for run in found][1:] == ["b0", f"a0 ({twin[:8]})"] and found[0].name == f"a0 ({found[0].id[:8]})"
    assert set(tables.metrics_of(found, ["reward/mean"])["run"]) == {run.name for run in found}


def test_an_unknown_experiment_or_run_is_refused_with_the_known_ones(runs: list[str]) -> None:
    with pytest.raises(ValueError, match=r"no experiment 'mine'; it has .*ratchet"):
        tables.recorded_runs("mine")
    with pytest.raises(ValueError, match="has no run c0; it has a0, a1, b0, other"):
        tables.recorded_runs(names=["a0", "c0"])


def test_the_configuration_difference_has_differing_fields_alone(runs: list[str]) -> None:
    table = tables.config_diff(tables.recorded_runs())
    assert list(table.index) == ["seed", "trainer.learning_rate"]
    assert list(table.loc["trainer.learning_rate"]) == ["1e-4", "1e-4", "3e-4", "3e-4"]
    assert tables.config_diff(tables.recorded_runs(names=["a0"])).empty


def test_bands_are_over_the_seeds_of_a_variant(runs: list[str]) -> None:
    metrics = tables.metrics_of(tables.recorded_runs(tags={"ratchet.sweep": "rates"}), ["reward/mean", "never/measured"])
    bands = tables.bands(metrics).to_dict("records")
    assert bands == [
        {"variant": "learning_rate 1e-4", "step": 0, "mean": 1.5, "low": 1.0, "high": 2.0, "num_runs": 2},
        {"variant": "learning_rate 1e-4", "step": 1, "mean": 2.5, "low": 2.0, "high": 3.0, "num_runs": 2},
        {"variant": "learning_rate 3e-4", "step": 0, "mean": 3.0, "low": 3.0, "high": 3.0, "num_runs": 1},
        {"variant": "learning_rate 3e-4", "step": 1, "mean": 4.0, "low": 4.0, "high": 4.0, "num_runs": 1},
    ]
    averages = tables.averages(metrics, ["reward/mean", "never/measured"])
    assert averages["reward/mean"].to_dict() == {"learning_rate 1e-4": 2.0, "learning_rate 3e-4": 3.5}


def test_a_step_that_was_made_again_has_its_new_value_alone(runs: list[str]) -> None:
    """Both are in MLflow. Bands left such steps out, and averages were over both."""
    (run,) = tables.recorded_runs(names=["a0"])
    mlflow_store.store_client().log_metric(run.id, "reward/mean", 7.0, step=0, timestamp=5)
    metrics = tables.metrics_of([run], ["reward/mean"])
    assert metrics[["step", "value"]].to_numpy().tolist() == [[0, 7.0], [1, 2.0]]
    assert tables.bands(metrics)["mean"].tolist() == [7.0, 2.0]


def test_a_mean_is_drawn_where_all_runs_of_a_variant_have_a_value() -> None:
    rows = [
        {"run": run, "variant": "v", "step": step, "value": 1.0} for run, steps in (("a", 3), ("b", 1)) for step in range(steps)
    ]
    assert tables.bands(pd.DataFrame(rows))["step"].tolist() == [0]


def test_rewards_of_different_functions_have_panels_of_their_own_and_missing_metrics_none() -> None:
    rows = [{"reward": reward, "metric": name} for reward in ("a", "b") for name in ("reward/mean", "train/loss")]
    curves = {"reward/mean": "step", "eval/pass_at_1": "adapter version", "train/loss": "step"}
    assert [panel.title for panel in tables.panels(pd.DataFrame(rows), curves)] == [
        "reward/mean, a",
        "reward/mean, b",
        "train/loss",
    ]


def test_runs_of_one_configuration_are_one_variant() -> None:
    params = {"seed": "0", "data.source": "arithmetic"}
    runs = [RecordedRun(str(seed), f"r{seed}", params | {"seed": str(seed)}, {}) for seed in range(3)]
    assert tables.variants_of(runs) == {"r0": "all", "r1": "all", "r2": "all"}


def test_runs_that_differ_in_many_fields_are_named_by_themselves() -> None:
    about = {"a": "0", "b": "0", "c": "0", "d": "0"}
    others = [RecordedRun(str(seed), f"other-{seed}", dict.fromkeys(about, "1") | {"seed": str(seed)}, {}) for seed in range(3)]
    runs = [RecordedRun("first", "first", about | {"seed": "0"}, {}), *others]
    names = tables.variants_of(runs)
    assert names == {"first": "first"} | {run.name: "other-0, other-1 and 1 more" for run in others}


def test_the_newest_variants_are_those_that_were_begun_last() -> None:
    rates = ["1e-5", "1e-4", "1e-5", "1e-3"]
    runs = [RecordedRun(str(k), f"r{k}", {"trainer.learning_rate": rate, "seed": str(k)}, {}) for k, rate in enumerate(rates)]
    assert [run.name for run in tables.newest_variants(runs, 2)] == ["r0", "r2", "r3"]
    assert tables.newest_variants(runs, 9) == runs


def test_fields_that_tell_no_variants_apart_are_fields() -> None:
    from infra.config.tools.overrides import flattened

    assert set(tables.NOT_COMPARED) <= flattened(RunConfig().model_dump()).keys()


def test_a_step_that_is_not_there_is_said(workspace: Path) -> None:
    with pytest.raises(ValueError, match="step 3 of run 'r' is not committed in workspace"):
        tables.samples_of("r", 3)
