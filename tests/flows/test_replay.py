"""Replays of a step with a trained adapter: a real trainer, a scripted engine, and a model with random weights."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL
from shared import RATCHET

from flows.replay import replay_step
from flows.step import rl_step
from infra.config import RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.records import StepReport
from infra.runs.lineage import next_step
from infra.runs.manifest import Manifest, read_manifest
from infra.runs.replay import TASKS, files_in, moved
from infra.settings import CHECKOUT, settings
from infra.store.files import path_of, read_json, write_json
from infra.store.layout import adapter_folder, run_folder
from infra.tracking import mlflow_store
from tasks.replays.compare_digests import ReplayDiffers

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900)]

RUN = "smoke"


@pytest.fixture(scope="module")
def config(scripted: RunConfig) -> RunConfig:
    return scripted.but(name=RUN)


@pytest.fixture(scope="module", autouse=True)
def workspace(config: RunConfig, prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two committed steps of one run; the second one starts from a trained adapter and an optimizer that has stepped."""
    folder = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_WORKSPACE", str(folder))
        settings.cache_clear()
        for _ in range(2):
            rl_step.with_options(result_storage=settings().results)(config)
        forget_the_engine(folder)
        yield folder
    forget_the_engine(folder)
    settings.cache_clear()


@pytest.fixture
def other_machine(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A workspace with what docs/replay.md says is to be copied, and nothing else."""
    step, adapter = f"runs/{RUN}/steps/000001", f"runs/{RUN}/adapters/000001"
    for name in (step, adapter):
        shutil.copytree(workspace / name, tmp_path / name)
    monkeypatch.setenv("RATCHET_WORKSPACE", str(tmp_path))
    settings.cache_clear()
    yield tmp_path
    forget_the_engine(tmp_path)
    monkeypatch.undo()
    settings.cache_clear()


def forget_the_engine(workspace: Path) -> None:
    """End it, and remove the trace that every start of an engine leaves."""
    ScriptedEngine.stop_in(workspace)
    shutil.rmtree(workspace / "golden", ignore_errors=True)


def replay(name: str, from_task: str, *overrides: str, step: int = 1, run: str = RUN, **options: Any) -> StepReport:
    """In this test's workspace; the flow's own result storage was fixed when it was imported."""
    flow = replay_step.with_options(result_storage=settings().results)
    made = flow(run, step, name, from_task, list(overrides), **options)
    assert isinstance(made, StepReport)
    return made


def manifest_of(run: str, step: int = 1) -> Manifest:
    return read_manifest(run_folder(run) / f"steps/{step:06d}")


def table_of(run: str) -> dict[str, bool]:
    """Whether each product is equal."""
    return {row["product"]: row["equal"] for row in read_json(run_folder(run) / "steps/000001/replay.json")["digests"]}


OFTEN = ("draw_prompts", "train")
"""The first and the last; `./infra/test full` begins at each task."""


@pytest.mark.parametrize("from_task", [task if task in OFTEN else pytest.param(task, marks=pytest.mark.full) for task in TASKS])
def test_a_replay_from_any_task_gives_the_same_digests_and_needs_the_engine_for_rollouts_only(
    from_task: str, workspace: Path
) -> None:
    name = f"same-{from_task}"
    made = replay(name, from_task)
    assert made.adapter.sha256 == manifest_of(RUN).adapter_out.sha256
    table = table_of(name)
    assert all(table.values())
    assert {"adapter in", "prompts", "samples", "scored", "batch", "adapter out"} <= table.keys()
    assert {f"{moment} {way}" for moment in ("exp_avg", "exp_avg_sq") for way in ("in", "out")} <= table.keys()
    assert (workspace / "golden").exists() == (from_task in ("draw_prompts", "roll_out"))
    kept = {path.stem for path in (run_folder(name) / "steps/000001/measures").iterdir()}
    verbs = {"draw_prompts": "draw", "roll_out": "roll_out", "score": "score", "assemble": "assemble", "train": "train"}
    assert kept & set(verbs.values()) == {verbs[task] for task in TASKS[TASKS.index(from_task) :]}
    forget_the_engine(workspace)


def test_the_manifests_of_two_identical_steps_differ_in_time_and_names_only(workspace: Path) -> None:
    replay("twin", "draw_prompts")
    forget_the_engine(workspace)
    first, second = manifest_of(RUN), manifest_of("twin")
    assert second.replayed_from is not None
    assert (second.replayed_from.run, second.replayed_from.step, second.replayed_from.from_task) == (RUN, 1, "draw_prompts")
    as_the_first = {"run": RUN, "config": first.config, "committed_at": first.committed_at, "replayed_from": None}
    for name in ("adapter_in", "prompts", "rollouts", "scored", "batch", "adapter_out"):
        as_the_first[name] = moved(getattr(second, name), RUN)
    assert second.model_copy(update=as_the_first) == first
    assert second.config.but(name=RUN) == first.config


def test_the_new_run_stands_alone_and_goes_on(workspace: Path, config: RunConfig) -> None:
    replay("alone", "train", "trainer.learning_rate=1e-4")
    assert next_step("alone") == 2
    manifest = manifest_of("alone")
    receipts = [getattr(manifest, name) for name in ("adapter_in", "prompts", "rollouts", "scored", "batch", "adapter_out")]
    assert all(file.path.startswith("runs/alone/") and path_of(file).stat().st_nlink == 1 for file in files_in(*receipts))
    (workspace / "runs" / RUN).rename(workspace / "aside")
    try:
        went_on = rl_step.with_options(result_storage=settings().results)(manifest.config)
    finally:
        (workspace / "aside").rename(workspace / "runs" / RUN)
        forget_the_engine(workspace)
    assert (went_on.step, went_on.adapter.version, went_on.adapter.num_optimizer_steps) == (2, 3, 3)
    assert manifest_of("alone", 2).adapter_in == manifest.adapter_out
    assert manifest_of("alone", 2).replayed_from is None
    jobs = [read_json(workspace / f"runs/alone/steps/{step:06d}/train/job.json") for step in (1, 2)]
    assert [job["trainer"]["sleep_weights"] for job in jobs] == ["host", "host"], "settled: in a replay, and in a step"
    mlflow_run = mlflow_store.deliver("alone")
    assert mlflow_run
    history = MlflowClient(mlflow_store.uri(), mlflow_store.uri()).get_metric_history(mlflow_run, "train/loss")
    assert [row.step for row in history] == [1, 2]


def test_it_can_be_replayed_on_another_machine_with_the_model_in_another_place(
    other_machine: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = shutil.copytree(model, tmp_path_factory.mktemp("elsewhere") / "model")
    replay("there", "train", f"model={elsewhere}")
    assert all(table_of("there").values())
    assert not (other_machine / "golden").exists(), "an engine was started"
    named = [path for path in other_machine.glob("runs/there/**/*.json") if str(model) in path.read_text()]
    assert not named, "the old machine's place of the model is in the new run"


def test_what_changed_in_code_and_versions_is_said_and_a_difference_is_then_allowed(other_machine: Path) -> None:
    path = other_machine / f"runs/{RUN}/steps/000001/manifest.json"
    old = read_json(path)
    old["versions"]["torch"], old["sources"]["tasks/train.py"], old["locks"]["main.txt"] = "1.0", "0" * 64, "0" * 64
    old["adapter_out"]["weights"]["sha256"] = "0" * 64
    write_json(path, old)
    replay("later", "train")
    source = manifest_of("later").replayed_from
    assert source is not None
    assert source.differences[:2] == ("sources: tasks/train.py", "locks: main.txt")
    assert re.fullmatch(r"versions: torch 1\.0 -> .+", source.differences[2])
    assert [name for name, equal in table_of("later").items() if not equal] == ["adapter out"]


def test_a_replay_that_differs_is_not_committed_unless_it_is_allowed_and_then_goes_on(other_machine: Path) -> None:
    path = other_machine / f"runs/{RUN}/steps/000001/manifest.json"
    old = read_json(path)
    old["adapter_out"]["weights"]["sha256"] = "0" * 64
    write_json(path, old)
    with pytest.raises(
        ReplayDiffers, match=r"nothing was changed, but these are not what they were: adapter out; see .*replay\.json"
    ):
        replay("differs", "train")
    assert not (run_folder("differs") / "steps/000001/manifest.json").exists()
    with pytest.raises(ValueError, match=f"begins with a replay of step 1 of run '{RUN}' that is not committed yet"):
        rl_step.with_options(result_storage=settings().results)(manifest_of(RUN).config.but(name="differs"))
    trained = os.stat(run_folder("differs") / "steps/000001/train/trainer.log").st_mtime_ns
    replay("differs", "train", allow_difference=True)
    assert os.stat(run_folder("differs") / "steps/000001/train/trainer.log").st_mtime_ns == trained, "trained again"
    assert manifest_of("differs").replayed_from is not None


def first_column(table_head: str, text: str) -> list[str]:
    """The cells of a Markdown table whose head begins so; the table may stand in a page or in a command's output."""
    lines = text[text.index(f"| {table_head} |") :].splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [row.split("|")[1].strip() for row in rows][2:]


def test_the_example_of_the_docs_does_what_it_says(other_machine: Path) -> None:
    text = (CHECKOUT / "docs/replay.md").read_text()
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith(f"ratchet replay {RUN} ")]
    assert len(commands) >= 2
    url = PREFECT_API_URL.value()
    assert url
    names = []
    for command in commands:
        environment = os.environ | {"PREFECT_API_URL": url, "PYTHONPATH": str(CHECKOUT)}
        done = subprocess.run(
            [*RATCHET, *command[1:], "-v"],  # the table
            env=environment,
            cwd=other_machine,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert first_column("product", done.stdout) == first_column("product", text)
        names.append(command[command.index("--name") + 1])
    made = [manifest_of(name) for name in names]
    assert len({manifest.batch.file.sha256 for manifest in made}) == 1
    assert len({manifest.adapter_out.sha256 for manifest in made}) == len(names)
    assert not (other_machine / "golden").exists(), "an engine was started"
    figures = {cell.split("`")[1] for cell in first_column("metric", text)}
    for name in (RUN, *names):
        report = StepReport.model_validate(read_json(run_folder(name) / "steps/000001/report.json"))
        assert figures <= report.metrics.keys(), figures - report.metrics.keys()


def test_help_names_every_option() -> None:
    done = subprocess.run(
        [*RATCHET, "replay", "--help"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for word in ("--name", "--from", "--trainer.learning_rate", "--allow-difference", *TASKS):
        assert word in done.stdout


def test_bad_input_of_the_command_is_said_before_a_server_is_started(other_machine: Path) -> None:
    command = [*RATCHET, "replay", RUN, "7", "--name", "x"]
    # a server of Prefect's own for the command would lie there
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    home = other_machine / "prefect-home"
    done = subprocess.run(
        command,
        cwd=CHECKOUT,
        env=environment | {"PREFECT_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "7" in done.stderr, done.stderr
    assert not list(home.glob("*.db")), "a server was started"


def test_adapters_of_the_new_run_are_numbered_as_the_old_ones() -> None:
    assert adapter_folder("same-train", 1).exists() and adapter_folder("same-train", 2).exists()
