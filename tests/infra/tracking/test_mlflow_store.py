"""Delivery into a real sqlite store, and to a server that is not there."""

import json
import logging
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import shared
from mlflow import MlflowClient

from infra.config import EvaluationConfig, RunConfig
from infra.eval_records import Evaluation
from infra.records import AdapterVersion, BaseModelRef, File
from infra.runs import evaluations
from infra.settings import settings
from infra.store.files import new_id, read_json, record_of, write, write_json, write_json_lines
from infra.store.layout import adapter_folder, run_folder
from infra.store.samples import write_samples
from infra.tracking import delivery_report, mlflow_address, mlflow_store, overview

RUN = "r"

ONE_SET = EvaluationConfig()


def commit(
    step: int,
    reward: float,
    *,
    weights: bytes = b"",
    register_every: int = 1,
    evaluation: EvaluationConfig = ONE_SET,
    **parts: float,
) -> None:
    metrics = {"reward/mean": reward, "train/loss": -reward}
    metrics |= {f"reward_parts/{part}/mean": value for part, value in parts.items()}
    code = {"commit": f"{step:040d}", "code": "c" * 64, "locks": {"main.txt": "d" * 64}}
    config = RunConfig(name=RUN).but(tracking={"register_every": register_every}, evaluation=evaluation)
    shared.commit(config, step, metrics, weights=weights or b"adapter %d" % (step + 1), **code)


def registered(client: MlflowClient) -> dict[str, str]:
    """Adapter -> its aliases, but for its own name; in the order of registration."""
    model = client.get_registered_model(RUN)
    versions = sorted(client.search_model_versions(f"name = '{RUN}'"), key=lambda version: int(version.version))
    for version in versions:
        assert model.aliases[f"adapter-{version.tags['ratchet.adapter']}"] == version.version
    shown = {
        number: {alias for alias in ("best", "last") if model.aliases.get(alias) == number} for number in model.aliases.values()
    }
    return {version.tags["ratchet.adapter"]: " ".join(sorted(shown[version.version])) for version in versions}


def history(run_id: str, name: str) -> list[tuple[int, float, int]]:
    rows = MlflowClient(mlflow_store.uri(), mlflow_store.uri()).get_metric_history(run_id, name)
    return [(row.step, row.value, row.timestamp) for row in rows]


def test_steps_that_waited_are_delivered_in_order_and_once(workspace: Path) -> None:
    commit(0, 0.3)
    commit(1, 0.2)
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    (run_folder(RUN) / "steps/000001/delivered.json").unlink()  # as if we had died just before
    assert mlflow_store.deliver(RUN) == run_id
    assert history(run_id, "reward/mean") == [(0, 0.3, 1000000), (1, 0.2, 1001000)]
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    versions = client.search_model_versions(f"name = '{RUN}'")
    assert sorted(version.tags["ratchet.adapter"] for version in versions) == ["1", "2"]
    assert client.get_model_version_by_alias(RUN, "best").tags["ratchet.adapter"] == "1"
    assert len(client.get_run(run_id).inputs.dataset_inputs) == 1


def test_a_torn_note_of_a_delivery_counts_as_none_and_the_step_is_delivered_again(workspace: Path) -> None:
    commit(0, 0.3)
    commit(1, 0.2)
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None and mlflow_store.delivered_adapters(RUN) == {1, 2}
    note = run_folder(RUN) / "steps/000001/delivered.json"
    torn = note.read_bytes()[:20]
    note.write_bytes(torn)
    assert mlflow_store.delivered_adapters(RUN) == {
        1
    }  # a torn note says nothing: the adapter may not be in MLflow yet, so retention keeps it
    note.write_bytes(torn)
    assert mlflow_store.waiting(RUN) == [note.parent]
    assert mlflow_store.deliver(RUN) == run_id and not mlflow_store.waiting(RUN)
    assert history(run_id, "reward/mean") == [(0, 0.3, 1000000), (1, 0.2, 1001000)]


def test_versions_of_others_under_the_same_name_are_left_alone_and_do_not_count(workspace: Path) -> None:
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    client.create_registered_model(RUN)
    for _ in range(2):  # somebody's model, of which nothing is known here
        client.create_model_version(RUN, source="s3://elsewhere")
    new_id(run_folder(RUN))
    commit(0, 0.9)
    mlflow_store.deliver(RUN)
    assert len(client.search_model_versions(f"name = '{RUN}'")) == 3
    shutil.rmtree(run_folder(RUN))  # begun again under its old name
    new_id(run_folder(RUN))
    commit(0, 0.1)
    commit(1, 0.2)
    mlflow_store.deliver(RUN)
    assert len(client.search_model_versions(f"name = '{RUN}'")) == 5
    assert client.get_model_version_by_alias(RUN, "best").tags["ratchet.reward"] == "0.2"


def test_adapters_of_equal_weights_are_versions_of_their_own(workspace: Path) -> None:
    """Where nothing was learnt in a step."""
    shared_weights = b"the same"
    for step in range(2):
        commit(step, 0.1, weights=shared_weights)
    mlflow_store.deliver(RUN)
    versions = MlflowClient(mlflow_store.uri(), mlflow_store.uri()).search_model_versions(f"name = '{RUN}'")
    assert sorted(version.tags["ratchet.adapter"] for version in versions) == ["1", "2"]


def test_another_mlflow_run_gets_all_that_the_first_one_had(workspace: Path) -> None:
    """In another store, or because somebody deleted the first."""
    commit(0, 0.9)
    first = mlflow_store.deliver(RUN)
    assert first is not None
    MlflowClient(mlflow_store.uri(), mlflow_store.uri()).delete_run(first)
    commit(1, 0.2)
    second = mlflow_store.deliver(RUN)
    assert second not in (None, first) and mlflow_store.waiting(RUN) == []
    assert [(step, value) for step, value, _ in history(str(second), "reward/mean")] == [(0, 0.9), (1, 0.2)]
    assert best(MlflowClient(mlflow_store.uri(), mlflow_store.uri())) == "1"


def test_an_adapter_comes_back_from_the_registry_as_it_went_in(workspace: Path, tmp_path: Path) -> None:
    import mlflow

    commit(0, 0.3)
    mlflow_store.deliver(RUN)
    mlflow.set_tracking_uri(mlflow_store.uri())
    mlflow.set_registry_uri(mlflow_store.uri())
    fetched = mlflow.artifacts.download_artifacts(f"models:/{RUN}/latest", dst_path=str(tmp_path / "fetched"))
    assert (Path(fetched) / "adapter_model.safetensors").read_bytes() == b"adapter 1"


def test_a_store_that_is_away_is_a_warning_and_gets_the_step_later(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    commit(0, 0.3)
    monkeypatch.setenv("RATCHET_MLFLOW_URI", f"http://127.0.0.1:{closed}")
    settings.cache_clear()
    with caplog.at_level(logging.WARNING, "infra"):
        assert mlflow_store.deliver(RUN) is None
    assert f"http://127.0.0.1:{closed} did not take 1 steps and evaluations of run r" in caplog.text
    monkeypatch.delenv("RATCHET_MLFLOW_URI")
    settings.cache_clear()
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    assert history(run_id, "train/loss") == [(0, -0.3, 1000000)]
    assert read_json(run_folder(RUN) / "steps/000000/delivered.json")["run_id"] == run_id


def test_runs_can_be_compared_by_tags_and_flat_parameters(workspace: Path) -> None:
    commit(0, 0.3)
    commit(1, 0.3)
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    data = MlflowClient(mlflow_store.uri(), mlflow_store.uri()).get_run(run_id).data
    expected = {
        "ratchet.algorithm": "grpo + ppo",
        "ratchet.model": "tiny",
        "ratchet.engine": "sglang",
        "ratchet.lock.main": "d" * 12,
        "mlflow.source.git.commit": f"{1:040d}",
    }
    assert expected.items() <= data.tags.items()
    assert {"trainer.lora.rank": "8", "sampling.group_size": "8", "batch.overlong.penalty": "1.0"}.items() <= data.params.items()
    assert "name" not in data.params, "an axis of every comparison"


def evaluate(
    version: int, score: float, config: RunConfig | None = None, *, mean_reward: float | None = None, name: str | None = None
) -> None:
    """What an evaluation leaves behind."""
    config = config or RunConfig(name=RUN)
    eval_config = config.eval_config if name is None else config.eval_configs[name]
    weights = record_of(adapter_folder(RUN, version) / "adapter_model.safetensors") if version else None
    base = BaseModelRef(id="tiny", sha256="b")
    adapter = AdapterVersion(run=RUN, version=version, base=base, rank=8, alpha=16, target_modules=(), seed=0, weights=weights)
    made = Evaluation(
        run=RUN,
        step=version,
        set_name=eval_config.name,
        adapter_sha256=adapter.sha256,
        eval_digest=evaluations.eval_digest(eval_config),
        file=base_file(),
        num_prompts=4,
        num_overlapping=0,
        pass_at_1=score,
        pass_at_k={"4": score + 0.1},
        truncated_frac=0.0,
        mean_reward=mean_reward,
        is_binary=None if mean_reward is None else False,
    )
    folder = evaluations.folder_of(adapter, eval_config)
    evaluations.write(folder, made, eval_config=eval_config.model_dump(mode="json"), at=500.0 + version, seconds=3.0)


def base_file() -> File:
    return File(path="x", sha256="x", num_bytes=1)


def best(client: MlflowClient) -> str:
    return str(client.get_model_version_by_alias(RUN, "best").tags["ratchet.adapter"])


def test_an_evaluation_that_was_made_again_is_delivered_again(workspace: Path) -> None:
    """With another reward function, say."""
    for step in range(2):
        commit(step, 0.1)
    for version, score in ((1, 0.9), (2, 0.5)):
        evaluate(version, score)
    mlflow_store.deliver(RUN)
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    assert best(client) == "1"
    evaluate(1, 0.2)
    assert len(mlflow_store.waiting(RUN)) == 1
    mlflow_store.deliver(RUN)
    assert best(client) == "2" and mlflow_store.waiting(RUN) == []


def test_evaluations_are_delivered_once_at_the_step_of_their_adapter(workspace: Path) -> None:
    commit(0, 0.3)
    evaluate(0, 0.25)
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    evaluate(1, 0.5)
    next((run_folder(RUN) / "evaluations").glob("000000*/delivered.json")).unlink()  # as if we had died just before
    assert mlflow_store.deliver(RUN) == run_id
    assert history(run_id, "eval/pass_at_1") == [(0, 0.25, 500000), (1, 0.5, 501000)]
    assert history(run_id, "eval/pass_at_4") == [(0, 0.35, 500000), (1, 0.6, 501000)]
    inputs = MlflowClient(mlflow_store.uri(), mlflow_store.uri()).get_run(run_id).inputs.dataset_inputs
    assert sorted((each.tags[0].value, each.dataset.name) for each in inputs) == [
        ("evaluation", "arithmetic-test"),
        ("training", "arithmetic"),
    ]


def test_the_best_adapter_is_the_best_evaluated_one_and_without_evaluations_that_of_the_best_reward(workspace: Path) -> None:
    for step, reward in enumerate((0.9, 0.1, 0.2, 0.3)):
        commit(step, reward)
    mlflow_store.deliver(RUN)
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    assert best(client) == "1"
    evaluate(4, 0.5)
    mlflow_store.deliver(RUN)
    assert best(client) == "4"
    evaluate(2, 0.5)
    evaluate(3, 0.4)
    mlflow_store.deliver(RUN)
    assert best(client) == "2"
    commit(4, 1.0)
    mlflow_store.deliver(RUN)
    assert best(client) == "2"
    assert mlflow_store.delivered_adapters(RUN) == {1, 2, 3, 4, 5}


def test_the_best_adapter_has_the_highest_mean_reward_where_rewards_are_not_0_or_1(workspace: Path) -> None:
    for step in range(3):
        commit(step, 0.1)
    for version, mean_reward in ((1, 0.2), (2, 0.6), (3, 0.4)):
        evaluate(version, 0.0, mean_reward=mean_reward)
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    assert best(MlflowClient(mlflow_store.uri(), mlflow_store.uri())) == "2"
    assert [value for _, value, _ in history(run_id, "eval/mean_reward")] == [0.2, 0.6, 0.4]


def test_another_exam_makes_curves_of_its_own_and_no_best(workspace: Path) -> None:
    other = RunConfig(name=RUN, evaluation=EvaluationConfig(num_prompts=3))
    commit(0, 0.3)
    commit(1, 0.2)
    evaluate(1, 0.4)
    evaluate(2, 0.9, other)
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    assert history(run_id, "eval/pass_at_1") == [(1, 0.4, 501000)]
    assert history(run_id, f"eval_{evaluations.eval_digest(other.eval_config)[:8]}/pass_at_1") == [(2, 0.9, 502000)]
    assert best(MlflowClient(mlflow_store.uri(), mlflow_store.uri())) == "1"


def test_each_set_has_curves_of_its_own_and_a_row_for_each_adapter_in_one_table(workspace: Path) -> None:
    config = RunConfig(name=RUN, evaluation=EvaluationConfig(sets=[{"name": "a"}, {"name": "b"}]))  # type: ignore[list-item]
    commit(0, 0.3, evaluation=config.evaluation)
    evaluate(1, 0.4, config)
    evaluate(1, 0.9, config, name="b")
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    assert history(run_id, "eval/a/pass_at_1") == [(1, 0.4, 501000)]
    assert history(run_id, "eval/b/pass_at_1") == [(1, 0.9, 501000)]
    table = overview.evaluations_table(RUN)
    assert table and [row[:2] for row in table["data"]] == [["a", 1], ["b", 1]]
    assert [row[table["columns"].index("pass_at_1")] for row in table["data"]] == [0.4, 0.9]
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    assert "evaluations.json" in [each.path for each in client.list_artifacts(run_id)]


def test_the_best_value_of_a_metric_that_is_to_fall_is_the_lowest(workspace: Path) -> None:
    config = RunConfig(name=RUN, evaluation=EvaluationConfig(best_by="mean_reward", best_is="lowest"))
    for step, reward in enumerate((0.6, 0.2, 0.4)):
        commit(step, 0.3, evaluation=config.evaluation)
        evaluate(step + 1, 0.5, config, mean_reward=reward)
    assert "| held-out mean reward | 0.600 (adapter 1) | 0.400 (adapter 3) | 0.200 (adapter 2) |" in overview.description(RUN, {})


def test_system_metrics_are_rows_of_their_own_time_at_the_steps_number(workspace: Path) -> None:
    commit(0, 0.3)
    rows = [{"at": 900.0 + n, "system/cpu_utilization_percentage": float(n)} for n in range(3)]
    write_json(run_folder(RUN) / "steps/000000/machine_load.json", rows)
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    (run_folder(RUN) / "steps/000000/delivered.json").unlink()  # as if we had died just before
    mlflow_store.deliver(RUN)
    assert history(run_id, "system/cpu_utilization_percentage") == [(0, 0.0, 900000), (0, 1.0, 901000), (0, 2.0, 902000)]


def test_more_system_metrics_than_fit_into_a_request_arrive_whole(workspace: Path) -> None:
    commit(0, 0.3)
    rows = [{"at": 900.0 + n} | {f"system/gpu_{gpu}_memory_usage_megabytes": 1.0 for gpu in range(20)} for n in range(60)]
    write_json(run_folder(RUN) / "steps/000000/machine_load.json", rows)
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    assert [len(history(run_id, f"system/gpu_{gpu}_memory_usage_megabytes")) for gpu in (0, 19)] == [60, 60]


def summarise(report: str) -> None:
    folder = run_folder(RUN) / "summary"
    write_json(folder / "prefect.json", {"rl-run": "http://prefect/runs/flow-run/7"})
    write(folder / "report.md", report.encode())


def text_of(run_id: str, path: str) -> str:
    import mlflow

    mlflow.set_tracking_uri(mlflow_store.uri())
    return str(mlflow.artifacts.load_text(f"runs:/{run_id}/{path}"))


def test_a_runs_summary_is_delivered_once_and_again_when_it_is_another(workspace: Path) -> None:
    commit(0, 0.3)
    write(run_folder(RUN) / "steps/000000/report.md", b"of step 0")
    summarise("first")
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None and mlflow_store.waiting(RUN) == []
    assert text_of(run_id, "summary/report.md") == "first"
    assert text_of(run_id, "steps/000000/report.md") == "of step 0"
    summarise("second")
    assert mlflow_store.waiting(RUN) == [run_folder(RUN) / "summary"]
    assert mlflow_store.deliver(RUN) == run_id and mlflow_store.waiting(RUN) == []
    assert text_of(run_id, "summary/report.md") == "second"


def test_mlflow_leads_back_to_the_flow_runs_of_prefect(workspace: Path) -> None:
    commit(0, 0.3)
    write_json(run_folder(RUN) / "prefect.json", {"rl-run": "http://prefect/runs/flow-run/1"})
    write_json(run_folder(RUN) / "steps/000000/prefect.json", {"rl-step": "http://prefect/runs/flow-run/2"})
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    tags = MlflowClient(mlflow_store.uri(), mlflow_store.uri()).get_run(run_id).data.tags
    assert tags["ratchet.prefect.rl-run"] == "http://prefect/runs/flow-run/1"
    assert tags["ratchet.prefect.rl-step"] == "http://prefect/runs/flow-run/2"
    assert "[rl-step in Prefect](http://prefect/runs/flow-run/2)" in tags["mlflow.note.content"]


def test_adapters_are_registered_at_intervals_and_the_best_and_the_last_one(workspace: Path) -> None:
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    for step in range(5):
        commit(step, 0.1 * step, register_every=2)
    mlflow_store.deliver(RUN)
    assert registered(client) == {"2": "", "4": "best last"}
    evaluate(2, 0.3)
    evaluate(3, 0.9)
    mlflow_store.deliver(RUN)
    assert registered(client) == {"2": "", "4": "last", "3": "best"}
    summarise("ended")
    mlflow_store.deliver(RUN)
    assert registered(client) == {"2": "", "4": "", "3": "best", "5": "last"}
    about = client.get_model_version_by_alias(RUN, "best").description
    assert about == "Adapter 3 of run r, made by step 2: mean reward 0.200, held-out pass@1 0.900"
    for path in run_folder(RUN).rglob("delivered.json"):
        path.unlink()
    mlflow_store.deliver(RUN)
    assert registered(client) == {"2": "", "4": "", "3": "best", "5": "last"}, "delivered again"


def test_adapters_are_registered_as_the_run_is_configured_now(workspace: Path) -> None:
    """What is shown and how adapters are evaluated may change in a run."""
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    commit(0, 0.9, register_every=0)
    begun = read_json(run_folder(RUN) / "config.json")
    other = EvaluationConfig(num_prompts=7)
    commit(1, 0.1, register_every=1, evaluation=other)
    write_json(run_folder(RUN) / "config.json", begun)
    mlflow_store.deliver(RUN)
    assert registered(client) == {"1": "best", "2": "last"}
    evaluate(2, 0.8, RunConfig(name=RUN).but(evaluation=other))
    mlflow_store.deliver(RUN)
    assert registered(client) == {"1": "", "2": "best last"}


def test_adapters_of_dropped_steps_are_neither_the_best_nor_the_last(workspace: Path) -> None:
    """Their files in MLflow become those of the steps that are made again."""
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    for step, reward in enumerate((0.1, 0.9, 0.2, 0.3)):
        commit(step, reward)
    mlflow_store.deliver(RUN)
    assert registered(client) == {"1": "", "2": "best", "3": "", "4": "last"}
    for step in (1, 2, 3):
        shutil.rmtree(run_folder(RUN) / f"steps/{step:06d}")
        shutil.rmtree(adapter_folder(RUN, step + 1))
    commit(1, 0.2, weights=b"another", register_every=10)
    mlflow_store.deliver(RUN)
    assert "adapter-2" not in client.get_registered_model(RUN).aliases
    aliased = {name: client.get_model_version_by_alias(RUN, name) for name in ("best", "last")}
    assert {name: of.tags["ratchet.adapter"] for name, of in aliased.items()} == {"best": "1", "last": "1"}
    commit(2, 0.2)
    mlflow_store.deliver(RUN)
    last = client.get_model_version_by_alias(RUN, "last")
    assert (last.tags["ratchet.adapter"], int(last.version)) == ("3", 3), "the same weights once more are the same version"


def test_without_intervals_only_the_best_and_the_last_adapter_are_registered_at_the_end(workspace: Path) -> None:
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    for step, reward in enumerate((0.1, 0.9, 0.2)):
        commit(step, reward, register_every=0)
    mlflow_store.deliver(RUN)
    assert not client.search_model_versions(f"name = '{RUN}'")
    summarise("ended")
    mlflow_store.deliver(RUN)
    assert registered(client) == {"2": "best", "3": "last"}


def test_an_adapter_that_the_store_does_not_have_is_not_registered(workspace: Path) -> None:
    """Retention has removed it, and then the run moved to another store."""
    commit(0, 0.3)
    commit(1, 0.2)
    shutil.rmtree(adapter_folder(RUN, 1))
    mlflow_store.deliver(RUN)
    assert registered(MlflowClient(mlflow_store.uri(), mlflow_store.uri())) == {"2": "best last"}


def test_adapters_that_a_store_did_not_get_stay_on_the_disk_when_the_run_has_moved_there(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention removes what is delivered; the store before may be gone."""
    monkeypatch.chdir(tmp_path)  # MLflow puts artifacts of such a store there
    commit(0, 0.3)
    mlflow_store.deliver(RUN)
    assert mlflow_store.delivered_adapters(RUN) == {1}
    mlflow_address.write(RUN, f"sqlite:///{tmp_path}/other.db")
    assert mlflow_store.delivered_adapters(RUN) == set()
    assert mlflow_store.deliver(RUN) and mlflow_store.delivered_adapters(RUN) == {1}


def test_the_description_says_how_the_run_does_and_is_kept_up_to_date(workspace: Path) -> None:
    commit(0, 0.25, correct=0.2)
    evaluate(0, 0.3)
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    first = client.get_run(run_id).data.tags["mlflow.note.content"]
    assert "**1 of 20 steps so far**" in first and "**Warnings**: none" in first
    assert "| held-out pass@1 | 0.300 (adapter 0) | 0.300 (adapter 0) | 0.300 (adapter 0) |" in first
    assert "**Model**: tiny, LoRA of rank 8" in first and "**Algorithm**: grpo + ppo, learning rate" in first
    commit(1, 0.5, correct=0.4)
    commit(2, 0.45, correct=0.35)
    write_json(run_folder(RUN) / "report.json", {"num_steps": 3, "stopped": "no progress"})
    mlflow_store.deliver(RUN)
    last = client.get_run(run_id).data.tags["mlflow.note.content"]
    headline = "**3 of 20 steps, ended: no progress**, mean reward 0.450 (at first 0.250), held-out pass@1 0.300 (at first 0.300)"
    assert last.startswith(headline)
    assert "| mean reward | 0.250 (step 0) | 0.450 (step 2) | 0.500 (step 1) |" in last
    assert "| mean of part correct | 0.200 (step 0) | 0.350 (step 2) | 0.400 (step 1) |" in last


def test_a_warning_of_a_step_is_in_the_description(workspace: Path) -> None:
    commit(0, 0.3)
    shared.commit(RunConfig(name=RUN), 1, {"reward/mean": 0.3, "rollout/truncated_frac": 0.9})
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    note = MlflowClient(mlflow_store.uri(), mlflow_store.uri()).get_run(run_id).data.tags["mlflow.note.content"]
    assert "**Warnings**: many truncated (step 1)" in note


def test_samples_of_all_steps_are_one_table_with_the_parts_of_the_reward(workspace: Path) -> None:
    import mlflow

    for step in range(2):
        commit(step, 0.5)
        folder = run_folder(RUN) / f"steps/{step:06d}"
        write_json_lines(folder / "prompts.jsonl", [{"prompt_id": 0, "question": f"{step} + 1?"}])
        right = replace(shared.sample(), text="#### 1", reward=1.5, reward_parts={"right": 1.0, "short": 0.5}, advantage=1.0)
        wrong = replace(right, sample_index=1, text="**2**", reward=0.0, reward_parts={"right": 0.0}, advantage=-1.0)
        write_samples(folder / "assembled.parquet", [right, wrong])
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    mlflow.set_tracking_uri(mlflow_store.uri())
    mlflow.set_experiment("ratchet")  # where load_table looks
    table = mlflow.load_table("samples.json", run_ids=[run_id])
    assert list(table.columns) == ["step", "prompt", "completion", "reward", "right", "short", "advantage"]
    assert table["step"].tolist() == [0, 0, 1, 1] and table["completion"].tolist() == ["#### 1", "**2**"] * 2
    assert table["right"].tolist() == [1.0, 0.0] * 2 and table["prompt"].tolist() == ["0 + 1?"] * 2 + ["1 + 1?"] * 2
    (run_folder(RUN) / "steps/000001/delivered.json").unlink()  # as if we had died just before
    mlflow_store.deliver(RUN)
    assert len(mlflow.load_table("samples.json", run_ids=[run_id])) == 4


def test_an_experiment_opens_as_model_training_with_the_curves_of_rewards_first(workspace: Path) -> None:
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    commit(0, 0.3, right=0.2)
    mlflow_store.deliver(RUN)

    def sections() -> list[str]:
        experiment = client.get_experiment_by_name("ratchet")
        assert experiment is not None and experiment.tags["mlflow.experimentKind"] == "custom_model_development"
        view = json.loads(experiment.tags["mlflow.sharedViewState.ratchet"])
        return [section["name"] for section in view["compareRunSections"]]

    assert sections()[:4] == ["reward", "reward_parts/right", "eval", "train"]
    commit(1, 0.3, short=0.2)
    mlflow_store.deliver(RUN)
    assert sections()[:5] == ["reward", "reward_parts/right", "reward_parts/short", "eval", "train"]


def test_a_run_in_mlflow_lasts_from_its_first_file_to_its_last_one(workspace: Path) -> None:
    commit(0, 0.3)
    os.utime(run_folder(RUN) / "config.json", (1000.0, 1000.0))
    os.utime(run_folder(RUN) / "steps/000000/manifest.json", (1060.0, 1060.0))
    run_id = mlflow_store.deliver(RUN)
    assert run_id is not None
    about = MlflowClient(mlflow_store.uri(), mlflow_store.uri()).get_run(run_id).info
    assert (about.start_time, about.end_time) == (1_000_000, 1_060_000)


def test_the_addresses_of_a_run_lead_to_its_page_and_to_its_experiments_runs(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(0, 0.3)
    run_id = mlflow_store.deliver(RUN)
    assert mlflow_store.page_url(RUN) is None, "no server shows it"
    server = "http://127.0.0.1:1"
    monkeypatch.setattr(mlflow_store, "running_mlflow_url", lambda: server)
    assert mlflow_store.page_url(RUN) is None and mlflow_store.start_page(server) == server, "delivered elsewhere"
    write_json(run_folder(RUN) / "mlflow.json", {"uri": server, "run_id": run_id, "experiment_id": "7"})
    runs = f"{server}/#/experiments/7/runs"
    assert mlflow_store.page_url(RUN) == f"{runs}/{run_id}?workflowType=machine_learning"
    assert mlflow_store.start_page(server) == f"{runs}?workflowType=machine_learning&viewStateShareKey=ratchet"


def test_the_end_of_a_run_says_what_mlflow_has_and_what_it_lacks(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit(0, 0.3)
    evaluate(1, 0.5)
    mlflow_store.deliver(RUN)
    commit(1, 0.4)
    commit(2, 0.4)
    lacking = delivery_report.line(RUN)
    assert "MLflow has 1 step and 1 evaluation of run r; it lacks 2 steps, `ratchet upload` brings them" in lacking
    assert f"{workspace}/logs/delivery.log says why" in lacking and "`ratchet up` starts a server that shows it" in lacking
    mlflow_store.deliver(RUN)
    with caplog.at_level(logging.INFO, "infra"):
        delivery_report.log_at_end(RUN)
    assert caplog.messages[-1].startswith("MLflow has 3 steps and 1 evaluation of run r: ")
