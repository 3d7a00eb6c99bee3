"""What cannot work is one line on stderr with exit code 2, before anything is started or written."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import temporary_settings
from shared import FIRST_PORT, RATCHET, write_manifest

from flows.cli import errors
from flows.cli.app import run
from flows.cli.program import COMMANDS
from flows.cli.session import results_settings
from flows.presets import smoke
from flows.step import rl_step
from infra.failures import NoNodeForEngine
from infra.processes.children import ProgramFailed
from infra.runs.lineage import base_version
from infra.services import servers
from infra.settings import CHECKOUT
from infra.store.files import DigestMismatch, Removed
from infra.store.layout import run_folder
from tasks.support.preflight import open_run

WORDS = {
    "sweep": ["--over", "seed=0,1"],
    "replay": ["r", "0", "--name", "again"],
    "drop": ["r", "--from", "0"],
    "export": ["r"],
    "chat": ["r"],
    "rm": ["r"],
    "show": ["r"],
    "stop": ["r"],
}
"""What a command needs at least."""
WITHOUT_SETTINGS = {
    "presets": ["presets"],
    "config": ["config"],
    "simulate": ["simulate", "--num-prompts", "4"],
    "plan": ["plan", "--gpus", "1xH200", "--model", "qwen2.5-7b"],
    "completion": ["completion", "bash"],
}
ALL_IN_ONE = """
import contextlib, io, json, sys
from flows.cli.app import run
said = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = run(words)
        except SystemExit as end:
            code = end.code
    said.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""
"""Runs commands one after the other in one process, which imports Prefect once."""


def command(workspace: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    known = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = known | {"RATCHET_WORKSPACE": str(workspace)} | environment
    return subprocess.run(
        [*RATCHET, *arguments], cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def refused(done: "subprocess.CompletedProcess[str]", beginning: str) -> None:
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stdout + done.stderr
    assert done.stderr.startswith(f"error: {beginning}"), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--preset", "smoke"],
        ["step"],
        ["quickstart"],
        ["up"],
        ["evaluate"],
        ["sweep", "--preset", "smoke", "--over", "seed=0,1"],
        ["compare-engines"],
        ["replay", "r", "0", "--name", "again"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_wrong_address_of_prefect_is_said_before_anything_is_written(workspace: Path, arguments: list[str]) -> None:
    ports = {"RATCHET_MLFLOW_PORT": str(FIRST_PORT + 270)}
    done = command(workspace, *arguments, PREFECT_API_URL="http://127.0.0.1:9", **ports)
    written = [path.name for path in workspace.iterdir() if path.name != "workspace.json"]
    servers.stop_all()  # else an MLflow that was started would outlive the test
    refused(done, "PREFECT_API_URL http://127.0.0.1:9 does not answer as Prefect's API (the address of an API is ")
    assert done.stdout == "" and written == []


def test_a_misspelt_variable_is_one_line_for_each_command(workspace: Path) -> None:
    named = [[name, *WORDS.get(name, [])] for name in COMMANDS if name not in (*WITHOUT_SETTINGS, "doctor")]
    named += [["quickstart", "--stop"], ["status", "--password"], ["sweep", "--over", "seed=0,1", "--show"]]
    argv = [sys.executable, "-c", ALL_IN_ONE, json.dumps(named)]
    environment = os.environ | {"RATCHET_ENGINE_PRT": "1"}
    done = subprocess.run(argv, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=240, check=True)
    for words, (code, out, err) in zip(named, json.loads(done.stdout), strict=True):
        assert (code, out, err.count("\n")) == (2, "", 1), (words, err)
        assert err.startswith("error: RATCHET_ENGINE_PRT is no setting of ours; the nearest is RATCHET_ENGINE_PORT,"), words
    assert not any(workspace.iterdir())


def test_a_misspelt_variable_is_a_problem_that_the_doctor_names(workspace: Path) -> None:
    done = command(workspace, "doctor", RATCHET_ENGINE_PRT="1")
    assert (done.returncode, done.stderr) == (1, "")
    assert "problem  RATCHET_ENGINE_PRT is no setting of ours; the nearest is RATCHET_ENGINE_PORT" in done.stdout


@pytest.mark.parametrize("words", WITHOUT_SETTINGS.values(), ids=WITHOUT_SETTINGS)
def test_what_needs_no_setting_works_with_a_misspelt_variable(workspace: Path, words: list[str]) -> None:
    assert command(workspace, *words, RATCHET_ENGINE_PRT="1").returncode == 0


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_a_broken_file_of_a_model_is_named_before_a_run_is_begun(workspace: Path, model_folder: Path, name: str) -> None:
    folder = workspace / "model"
    shutil.copytree(model_folder, folder)
    (folder / name).write_text("{broken")
    done = command(workspace, "run", "--preset", "smoke", "--engine.kind", "scripted", "--model", str(folder))
    refused(done, f"{folder / name} cannot be read: it is no JSON (Expecting property name")
    assert done.stdout == "" and not (workspace / "runs").exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "mcp",
            f"{sys.executable} tests/mcp_server.py --fault 'no tools'",
            "environment 'infra.environments.examples.tool_agent.run': MCP server ",
        ),
        ("mcp", "https://me:hidden@host/mcp", "environment.mcp holds an address with a user, a password or a query"),
        (
            "mcp",
            "http://127.0.0.1:9/mcp $NO_SUCH_TOKEN",
            "environment.environment or environment.mcp names 'NO_SUCH_TOKEN', which is not set",
        ),
        ("tool_timeout_s", "0", "environment.tool_timeout_s = 0: "),
        ("max_result_characters", "1", "environment.max_result_characters = 1: "),
    ],
)
def test_a_server_of_tools_that_cannot_be_used_is_named_before_a_run_is_begun(
    workspace: Path, model_folder: Path, field: str, value: str, message: str
) -> None:
    fields = ["--engine.kind", "scripted", "--model", str(model_folder), "--evaluation.every", "0"]
    fields += ["--environment.name", "infra.environments.examples.tool_agent.run", f"--environment.{field}", value]
    done = command(workspace, "run", "--preset", "smoke", *fields)
    refused(done, message)
    assert "hidden" not in done.stderr and done.stdout == "" and not (workspace / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--adapter", "7"], "run 'smoke' has the adapter versions 0 (the base model) to 0, not 7"),
        (
            ["--adapter", "/nowhere"],
            "adapter '/nowhere' is neither a version of the run, nor a folder, nor RUN:VERSION of another run",
        ),
        (["--adapter", ""], "adapter '' is neither a version of the run, nor a folder, nor RUN:VERSION of another run"),
        (
            ["--adapter", "~no-such-user/x"],
            "adapter '~no-such-user/x' is neither a version of the run, nor a folder, nor RUN:VERSION",
        ),
        (
            ["--against", "other:1"],
            "adapter 'other:1' is neither a version of the run, nor a folder, nor RUN:VERSION of another run",
        ),
    ],
)
def test_an_adapter_that_is_not_there_is_named_before_its_model_is_looked_for(
    workspace: Path, words: list[str], message: str
) -> None:
    fields = ["--preset", "smoke", "--engine.kind", "scripted", "--model", str(workspace / "no-model")]
    done = command(workspace, "evaluate", *fields, *words)
    refused(done, message)
    assert done.stdout == "" and not (workspace / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "--rows", "-1"], "--rows -1 is no number of prompts: give 0 or more"),
        (["show", "r", "--samples", "-3"], "--samples -3 is no number of samples: give 0 or more"),
        (["logs", "engine", "-n", "-5"], "--lines -5 is no number of lines: give 0 or more"),
    ],
)
def test_a_negative_number_of_what_is_shown_is_refused(workspace: Path, words: list[str], message: str) -> None:
    refused(command(workspace, *words), message)


def test_a_torn_parquet_file_is_named_before_a_run_is_begun(workspace: Path, model_folder: Path) -> None:
    path = workspace / "torn.parquet"
    path.write_bytes(b"PAR1 and no more")
    fields = ["--engine.kind", "scripted", "--model", str(model_folder), "--data.source", str(path)]
    done = command(workspace, "run", "--preset", "smoke", *fields)
    refused(done, f"data file {path} cannot be read: ")
    assert done.stdout == "" and not (workspace / "runs").exists()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "--model",
            "someone/some-model",
            "model 'someone/some-model' is no folder here, no earlier download of it is here, and the hub ",
        ),
        (
            "--data.source",
            "someone/some-data",
            "data set 'someone/some-data' is neither a local path nor to be had from the hub: the hub ",
        ),
    ],
)
def test_a_hub_that_cannot_be_reached_is_one_line_without_retries(
    workspace: Path, model_folder: Path, option: str, value: str, message: str
) -> None:
    hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(workspace / "huggingface")}
    model = [] if option == "--model" else ["--model", str(model_folder)]
    done = command(workspace, "run", "--preset", "smoke", "--engine.kind", "scripted", *model, option, value, **hub)
    refused(done, f"{message}http://127.0.0.1:9 cannot be reached ([Errno 111] Connection refused)")
    assert not (workspace / "runs").exists()


def test_quickstart_on_a_run_of_another_configuration_is_refused_before_servers_are_started(
    workspace: Path, model_folder: Path
) -> None:
    begun = smoke().but(name="begun", seed=7, model=str(model_folder))
    open_run(begun)
    start = base_version(begun)
    write_manifest(begun, start, start.model_copy(update={"version": 1}))
    before = sorted(run_folder("begun").rglob("*"))
    done = command(workspace, "quickstart", "--run", "begun")
    refused(done, "run 'begun' was begun with another configuration and cannot go on with this one: ")
    assert "seed 7 -> 0" in done.stderr
    assert sorted(run_folder("begun").rglob("*")) == before
    assert not (workspace / "services").exists() and not (workspace / "models").exists()


def test_results_of_flows_in_this_process_are_stored_in_the_workspace(workspace: Path) -> None:
    with temporary_settings(results_settings()) as prefect_settings:
        assert prefect_settings.results.local_storage_path == workspace / "results"
    assert rl_step.result_storage is None and rl_step.persist_result


@pytest.mark.parametrize(
    "words", [["-m", "flows.run"], ["-mflows.evaluate"], ["-Xutf8", "-m", "flows.step", "--help"]], ids=" ".join
)
def test_a_module_of_flows_is_not_run_by_m(workspace: Path, words: list[str]) -> None:
    done = subprocess.run([sys.executable, *words], cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False)
    refused(done, f"flows.{words[-1 if words[-1] != '--help' else -2].rpartition('.')[2]} is not run by -m: `ratchet ")


@pytest.mark.parametrize(
    "error",
    [
        NoNodeForEngine("replica 0 of the engine has no node"),
        DigestMismatch("adapter_model.safetensors has changed since it was written"),
        Removed("adapter_model.safetensors was removed by the run's retention"),
        OSError(errno.ENOSPC, "No space left on device: 1162 bytes for samples.journal"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_says_all_in_its_message_is_said_without_a_traceback(error: RuntimeError | OSError) -> None:
    assert errors.is_expected(error)
    assert not errors.is_expected(RuntimeError("a mistake of ours"))
    assert not errors.is_expected(OSError(errno.EBADF, "a mistake of ours"))


@pytest.mark.parametrize("command", [["run"], ["step"], ["sweep", "--over", "seed=0,1"]], ids=lambda words: words[0])
def test_a_server_that_does_not_start_is_said_without_a_table_before_it(
    command: list[str], workspace: Path, random_tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> str:
        raise ProgramFailed("prefect ended while starting; the end of its log:\nno room")

    monkeypatch.setattr(servers, "ensure_prefect", fails)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(SystemExit, match="1"):
        run([*command, "--preset", "smoke", "--model", str(random_tiny), "--engine.kind", "scripted"])
    shown = capsys.readouterr()
    assert shown.err == "error: prefect ended while starting; the end of its log:\nno room\n"
    assert "smoke" not in shown.out and "\u2503" not in shown.out, "a table was printed"


def test_a_store_whose_package_is_not_installed_is_refused_with_its_name(tmp_path: Path) -> None:
    def line(url: str, package: str) -> str:
        cure = f"`{sys.executable} -m pip install {package}` installs it"
        return f"store {url} needs the package {package}, which is not installed: {cure}"

    google, azure = "gs://bucket/runs", "abfs://box/runs"
    refused(
        command(tmp_path / "w", "run", "--preset", "smoke", RATCHET_STORE_URL=google),
        f"RATCHET_STORE_URL: {line(google, 'gcsfs')}",
    )
    refused(command(tmp_path / "w", "runs", "--store", azure), line(azure, "adlfs"))
    assert not list(tmp_path.rglob("steps"))


def test_a_store_that_refuses_is_one_line_and_no_wrong_input(workspace: Path) -> None:
    """No keys: the library finds none before it asks anyone."""
    keys = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true"}
    done = command(workspace, "runs", "--store", "s3://bucket/runs", **keys)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("error: s3://bucket/runs does not list its runs with these keys: NoCredentialsError: "), (
        done.stderr
    )


def test_a_run_of_a_name_that_the_store_has_is_refused_before_anything_is_started(tmp_path: Path, random_tiny: Path) -> None:
    index = tmp_path / "store/smoke/index/run.json"
    index.parent.mkdir(parents=True)
    index.write_text('{"run": "smoke", "run_id": "of another machine", "files": []}')
    url = str(tmp_path / "store")
    rows = [f'{{"question": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    for words in (["run"], ["step"]):
        words += ["--preset", "smoke", "--model", str(random_tiny), "--engine.kind", "scripted"]
        words += ["--data.source", str(tmp_path / "rows.jsonl")]  # of which a part is held out: without -v this is no line
        done = command(tmp_path / "w", *words, RATCHET_STORE_URL=url)
        refused(
            done,
            f"{url} holds a run 'smoke' that is not here: `ratchet run --from {url}/smoke` goes on with it; for a new run give",
        )
    assert not (tmp_path / "w/runs").exists()


def test_data_names_the_longest_of_all_prompts_that_are_too_long(tmp_path: Path, random_tiny: Path) -> None:
    rows = [f'{{"question": "{"1 + " * (100 + n)} 2?", "answer": "{n}"}}\n' for n in range(40)]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(rows))
    done = command(tmp_path / "w", "data", "--model", str(random_tiny), "--data.source", str(path), "--evaluation.every", "0")
    refused(done, f"40 of 40 prompts of '{path}' have more tokens than data.max_prompt_tokens 128, that of row 39 has ")


def test_data_refuses_a_model_that_a_run_would_refuse(tmp_path: Path, random_tiny: Path) -> None:
    folder = shutil.copytree(random_tiny, tmp_path / "other")
    content = json.loads((folder / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (folder / "config.json").write_text(json.dumps(content))
    refused(
        command(tmp_path / "w", "data", "--model", str(folder)), f"model folder {folder} holds GPT2LMHeadModel; supported are "
    )


def test_a_store_s_folder_that_is_not_there_is_wrong_input(workspace: Path) -> None:
    refused(
        command(workspace, "runs", "--store", f"{workspace}/nowhere"), f"store {workspace}/nowhere does not exist: give a folder"
    )


@pytest.mark.parametrize("sign", ["?", "#", "%", "\n"])
def test_a_workspace_whose_databases_would_lie_outside_it_is_refused(tmp_path: Path, sign: str) -> None:
    workspace = tmp_path / f"run{sign}1"
    refused(command(workspace, "runs"), f"RATCHET_WORKSPACE: {str(workspace)!r} holds {sign!r}: name a folder without")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "beginning"),
    [
        (["run", "--trainer.lora.start_from", "~nobody-here/x"], "trainer.lora.start_from: ~nobody-here/x is no folder"),
        (["run", "--reward.name", "~nobody-here/x.py:score"], "reward file "),
    ],
    ids=lambda words: words[-2] if isinstance(words, list) else "",
)
def test_the_folder_of_a_user_that_is_not_here_is_named(
    workspace: Path, random_tiny: Path, words: list[str], beginning: str
) -> None:
    refused(command(workspace, *words, "--model", str(random_tiny)), beginning)
