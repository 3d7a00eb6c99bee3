"""A run delivers to the MLflow address that it began with."""

import logging
import subprocess
from pathlib import Path

import pytest
import shared
from mlflow import MlflowClient

from infra.config import RunConfig
from infra.settings import CHECKOUT, settings
from infra.store.files import new_id, write_json
from infra.store.layout import run_folder
from infra.tracking import mlflow_address, mlflow_store

RUN = "r"
DEAD = "http://127.0.0.1:9"


def given(monkeypatch: pytest.MonkeyPatch, uri: str | None) -> None:
    """A terminal with this RATCHET_MLFLOW_URI."""
    if uri is None:
        monkeypatch.delenv("RATCHET_MLFLOW_URI", raising=False)
    else:
        monkeypatch.setenv("RATCHET_MLFLOW_URI", uri)
    settings.cache_clear()


def begin(monkeypatch: pytest.MonkeyPatch, uri: str | None) -> None:
    given(monkeypatch, uri)
    new_id(run_folder(RUN))
    write_json(run_folder(RUN) / "config.json", RunConfig(name=RUN).model_dump(mode="json"))
    mlflow_address.note(RUN)


def num_runs(uri: str) -> int:
    client = MlflowClient(uri, uri)
    return len(client.search_runs([each.experiment_id for each in client.search_experiments()]))


def test_a_run_goes_to_its_own_address_whoever_delivers_and_one_command_uploads_it_elsewhere(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)  # a store without a server puts artifacts into the current folder
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    first, other = (f"sqlite:///{workspace}/{name}.db" for name in ("first", "other"))
    begin(monkeypatch, first)
    shared.commit(RunConfig(name=RUN), 0, {"reward/mean": 0.5}, weights=b"w")
    given(monkeypatch, other)
    assert mlflow_store.deliver(RUN) is not None
    assert num_runs(first) == 1 and not (workspace / "other.db").exists()
    done = subprocess.run([*shared.RATCHET, "upload", RUN, "--to", other], check=False)
    assert done.returncode == 0 and num_runs(other) == 1
    mlflow_address.check(RUN)  # from now on this is its address


def test_another_address_later_is_an_error_that_names_the_command(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(monkeypatch, "http://one:5000")
    mlflow_address.check(RUN)
    given(monkeypatch, "http://two:5000")
    with pytest.raises(ValueError, match=r"delivers to http://one:5000.*two.*ratchet upload r --to http://two:5000$"):
        mlflow_address.check(RUN)
    given(monkeypatch, None)
    with pytest.raises(ValueError, match="RATCHET_MLFLOW_URI is not set: set it to http://one:5000"):
        mlflow_address.check(RUN)


@pytest.mark.parametrize(
    ("uri", "words"),
    [(DEAD, "does not answer"), ("htp:/nowhere", "is no address of an MLflow store"), ("nonsense", "is no address")],
)
def test_an_address_that_takes_nothing_is_said_at_the_start_and_at_the_end(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, uri: str, words: str
) -> None:
    begin(monkeypatch, uri)
    shared.commit(RunConfig(name=RUN), 0, {"reward/mean": 0.5}, weights=b"w")
    with caplog.at_level(logging.WARNING):
        mlflow_address.warn_at_start(RUN)
        mlflow_address.warn_at_end(RUN, mlflow_store.waiting(RUN))
    start, end = caplog.messages
    assert words in start and "goes on" in start and "`ratchet upload" in start
    assert words in end and "not delivered of run r: steps/000000" in end and "`ratchet upload" in end


def test_an_upload_to_a_dead_address_is_one_line_and_changes_nothing(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(monkeypatch, None)
    command = [*shared.RATCHET, "upload", RUN, "--to", DEAD]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert (
        done.returncode == 2
        and done.stderr.startswith(f"error: MLflow at {DEAD} does not answer")
        and done.stderr.count("\n") == 1
    )
    assert mlflow_address.of(RUN) is None
