import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect.settings import temporary_settings
from shared import write_manifest

from flows import programs
from flows.arguments import parser, resolved
from flows.command_line import results_settings
from flows.presets import arithmetic, smoke
from flows.step import rl_step
from infra.config import RunConfig
from infra.config.tools.overrides import flattened
from infra.settings import CHECKOUT, settings
from infra.store.files import run_folder
from tasks.open_step import base_version, open_run


def test_dotted_options_change_the_preset() -> None:
    config, found, show = resolved(
        ["--num-steps", "3", "--trainer.learning_rate", "1e-5", "--set", "data.num-prompts=4".replace("-", "_")]
    )
    base = arithmetic()
    assert config == base.but(num_steps=3, trainer=base.trainer.but(learning_rate=1e-5), data=base.data.but(num_prompts=4))
    assert not show
    sources = {origin.field: origin.source for origin in found}
    assert {field for field, source in sources.items() if source == "command line"} == {
        "num_steps",
        "trainer.learning_rate",
        "data.num_prompts",
    }
    assert sources["name"] == "preset" and sources["seed"] == "default"


def test_a_dash_will_do_for_an_underscore_and_the_last_word_counts() -> None:
    config, _, show = resolved(
        ["--show", "--trainer.max-grad-norm", "0.5", "--sampling.group_size", "2", "--sampling.group-size", "4"]
    )
    assert (config.trainer.max_grad_norm, config.sampling.group_size, show) == (0.5, 4, True)


def test_the_help_lists_every_field_with_its_section() -> None:
    text = " ".join(parser().format_help().split())
    for field in flattened(RunConfig().model_dump()):
        assert f"--{field} VALUE" in text
    assert "The Megatron LoRA trainer: one optimizer step for each mini-batch of an RL step." in text
    assert "Prompts (= groups) per step. [int >= 1, count; default 16]" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.learning_rate", "fast"], "trainer.learning_rate = 'fast': "),
        (["--sampling.group_size", "1"], "sampling.group_size 1 with advantage 'grpo'"),
        (["--evaluation.pass_at_k", "[8]"], "evaluation.pass_at_k 8 needs as many samples or more"),
        (["--evaluation.pass_at_k", "[]"], "evaluation.num_samples 4 without pass_at_k"),
        (["--evaluation.every", "0", "--evaluation.patience", "2"], "evaluation.patience 2 needs evaluations"),
        (
            ["--evaluation.max_output_tokens", "400"],
            "data.max_prompt_tokens 128 + evaluation.max_output_tokens 400 = 528 is more than",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolved(arguments)
    assert str(caught.value).startswith(message)


def test_an_option_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        resolved(["--trainer.learning_rat", "1"])
    assert capsys.readouterr().err == (
        "error: option --trainer.learning_rat does not exist; the nearest is --trainer.learning_rate; --help lists all\n"
    )


def command(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run one of our programs to its end."""
    argv = [sys.executable, *arguments]
    return subprocess.run(argv, cwd=CHECKOUT, env=os.environ | variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments", [["--learning-rate", "1"], ["--set", "trainer.learning_rat=1"], ["--sampling.group_size", "1"]]
)
def test_a_typo_costs_no_import_of_prefect_and_is_one_line(workspace: Path, arguments: list[str]) -> None:
    done = command("-X", "importtime", "-m", "flows.run", *arguments)
    imports, others = [], []
    for line in done.stderr.splitlines():
        (imports if line.startswith("import time:") else others).append(line)
    imported = {line.rpartition("|")[2].strip() for line in imports}
    assert "infra.config" in imported and not imported & {"prefect", "transformers", "torch", "mlflow"}
    assert done.returncode and not done.stdout and len(others) == 1 and others[0].startswith("error: ")


def test_a_run_that_cannot_start_says_why_without_the_configuration_table(workspace: Path) -> None:
    done = command("-m", "flows.run", "--model", "/no/such/folder")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: model '/no/such/folder' is no folder; ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "name", "value", "message"),
    [
        ("flows.run", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is RATCHET_ENGINE_PORT,"),
        ("flows.run", "RATCHET_ENGINE_PORT", "abc", "RATCHET_ENGINE_PORT: Input should be a valid integer"),
        ("flows.run", "RATCHET_MLFLOW_URI", "http://me:hunter2@host", "RATCHET_MLFLOW_URI holds a password or a token"),
        (
            "flows.run",
            "RATCHET_WORKSPACE",
            "/proc/version",
            "workspace /proc/version cannot be used: File exists; set RATCHET_WORKSPACE to",
        ),
        ("flows.run", "RATCHET_WORKSPACE", "/proc/here", "workspace /proc/here cannot be used: No such file"),
        ("flows.run", "RATCHET_WORKSPACE", "/proc/self", "workspace /proc/self cannot be used: no permission to write there"),
        ("flows.quickstart", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is "),
        ("flows.quickstart", "RATCHET_WORKSPACE", "/proc/version", "workspace /proc/version cannot be used: File exists; "),
        ("flows.quickstart --stop", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is "),
        ("flows.sweep --over seed=0,1", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is "),
        ("flows.replay r 0 --name again", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is "),
        ("flows.compare_engines", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is "),
        ("flows.drop_steps r 0", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is "),
        ("flows.learning_curves", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is "),
        ("infra.tracking.upload", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is "),
        ("infra.tracking.upload", "RATCHET_WORKSPACE", "/proc/version", "workspace /proc/version cannot be used: File exists; "),
    ],
)
def test_a_variable_that_does_not_fit_is_one_line(program: str, name: str, value: str, message: str) -> None:
    done = command("-m", *program.split(), **{name: value})
    assert done.returncode == 1 and done.stderr.startswith(f"error: {message}"), done.stderr
    assert done.stderr.count("\n") == 1 and "hunter2" not in done.stderr + done.stdout


def test_results_of_flows_in_this_process_are_stored_in_the_workspace(workspace: Path) -> None:
    with temporary_settings(results_settings()) as prefect_settings:
        assert prefect_settings.results.local_storage_path == workspace / "results"
    assert rl_step.result_storage is None and rl_step.persist_result


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_a_port_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("RATCHET_MLFLOW_PORT", port)
    settings.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"^RATCHET_MLFLOW_PORT: Input should be (greater|less) than"):
            settings()
    finally:
        monkeypatch.undo()
        settings.cache_clear()


@pytest.mark.parametrize(
    "arguments",
    [
        ["flows.run", "--preset", "smoke"],
        ["flows.quickstart"],
        ["flows.sweep", "--preset", "smoke", "--over", "seed=0,1"],
        ["flows.compare_engines"],
        ["flows.replay", "r", "0", "--name", "again"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_wrong_address_of_prefect_is_said_before_anything_is_written(workspace: Path, arguments: list[str]) -> None:
    done = command("-m", *arguments, PREFECT_API_URL="http://127.0.0.1:9")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(
        "error: PREFECT_API_URL http://127.0.0.1:9 does not answer as Prefect's API (the address of an API is "
    )
    assert done.stderr.count("\n") == 1 and not (workspace / "runs").exists() and not (workspace / "models").exists()


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
    arguments = ["--preset", "smoke", "--engine.kind", "scripted", "--model", str(model_folder), option, value]
    begun = time.monotonic()
    done = command("-m", "flows.run", *arguments, PREFECT_API_URL="", **hub)
    assert time.monotonic() - begun < 25  # on a busy machine; the retries alone take 32 s
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {message}http://127.0.0.1:9 cannot be reached ([Errno 111] Connection refused)")
    assert done.stderr.count("\n") == 1 and not (workspace / "runs").exists()


MODULES = sorted(path.stem for path in (CHECKOUT / "flows").glob("*.py") if path.stem != "__init__")


def test_the_programs_are_the_modules_that_have_a_command() -> None:
    with_command = [name for name in MODULES if "__main__" in (CHECKOUT / f"flows/{name}.py").read_text()]
    aside = ("command_line", "compare_command")  # which flows.run and flows.compare_engines hand their options to
    assert sorted(programs.PROGRAMS) == [name for name in with_command if name not in aside]
    assert set(programs.INSTEAD) <= set(MODULES) - set(programs.PROGRAMS)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in programs.PROGRAMS])
def test_a_module_without_a_command_says_what_to_use_instead(workspace: Path, name: str) -> None:
    refused = programs.refusal([sys.executable, "-X", "importtime", "-m", f"flows.{name}", "--help"])
    assert refused is not None and refused.startswith(f"error: python -m flows.{name} is no command; use ")
    assert programs.refusal([sys.executable, f"-mflows.{name}"]) == refused


def test_the_evaluation_is_no_command_and_the_others_are() -> None:
    done = command("-m", "flows.evaluate", "--help")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "use prefect deployment run evaluate/local, or python -m flows.run" in done.stderr
    assert programs.refusal([sys.executable, "-m", "flows.drop_steps", "r", "0"]) is None
    assert programs.refusal([sys.executable, "-m", "pytest", "tests/flows"]) is None
    assert command("-m", "flows.drop_steps", "--help").returncode == 0


def test_quickstart_on_a_run_of_another_configuration_is_refused_before_servers_are_started(
    workspace: Path, model_folder: Path
) -> None:
    begun = smoke().but(name="begun", seed=7, model=str(model_folder))
    open_run(begun)
    start = base_version(begun)
    write_manifest(begun, start, start.model_copy(update={"version": 1}))
    before = sorted(run_folder("begun").rglob("*"))
    clock = time.monotonic()
    done = command("-m", "flows.quickstart", "--run", "begun", PREFECT_API_URL="")
    assert time.monotonic() - clock < 15  # 3 s on an idle machine; the servers alone take longer
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.startswith("error: run 'begun' was begun with another configuration and cannot go on with this one: ")
    assert "seed 7 -> 0" in done.stderr
    assert sorted(run_folder("begun").rglob("*")) == before
    assert not (workspace / "services").exists() and not (workspace / "models").exists()
