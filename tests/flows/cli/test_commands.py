"""Commands on a run that was really made: two steps with a scripted engine and the real trainer, evaluated and exported."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL
from shared import FIRST_PORT, RATCHET, becomes, sample

from flows.cli.app import run
from flows.cli.services import status
from flows.run import rl_run
from infra.config import RunConfig
from infra.engines.journal import Journal
from infra.engines.scripted import ScriptedEngine
from infra.processes import gpu_programs
from infra.runs import lineage, run_state
from infra.settings import CHECKOUT, settings
from infra.store.files import read_json
from infra.store.layout import StepFolder, run_folder
from infra.store.samples import read_samples
from infra.trainers import resident

NAME = "made"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def made(scripted: RunConfig, prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunConfig]:
    """The run's configuration; its workspace is this module's."""
    folder = tmp_path_factory.mktemp("commands")
    config = scripted.but(name=NAME, num_steps=2, evaluation=scripted.evaluation.but(every=2, num_prompts=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_WORKSPACE", str(folder))
        patch.setenv("PREFECT_API_URL", PREFECT_API_URL.value() or "")
        patch.setenv("COLUMNS", "200")
        patch.setenv("RATCHET_MLFLOW_PORT", str(FIRST_PORT + 290))
        settings.cache_clear()
        rl_run(config)
        yield config
        ScriptedEngine.stop_in(folder)
        resident.stop_recorded()
        settings.cache_clear()


def ratchet(*words: str, input: str = "", rc: int = 0) -> str:
    """Run the program in a child; gives what it wrote."""
    done = subprocess.run(
        [*RATCHET, *words],
        cwd=CHECKOUT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        input=input,
        timeout=300,
        check=False,
    )
    assert done.returncode == rc, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    run(words)
    return capsys.readouterr().out


def test_runs_lists_steps_reward_evaluation_and_state_each_run_in_a_line(
    made: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    reward = read_json(run_folder(NAME) / "steps/000001/report.json")["metrics"]["reward/mean"]
    (row,) = [line for line in said(capsys, "runs").splitlines() if NAME in line]
    assert "2/2" in row and f"{reward:.4g}" in row and "(adapter " in row and "finished" in row
    (found,) = json.loads(said(capsys, "runs", "--json"))
    assert found["last_reward"] == reward and found["num_committed"] == 2


def test_an_unreadable_run_is_said_and_hides_no_other(made: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    broken = run_folder("broken")
    broken.mkdir()
    (broken / "config.json").write_text("{")
    try:
        text = said(capsys, "runs")
        assert NAME in text and "run broken cannot be read: " in text
    finally:
        (broken / "config.json").unlink()
        broken.rmdir()


def test_show_has_headline_figures_warnings_and_samples(made: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "show", NAME, "--samples", "2")
    assert f"run {NAME}: 2 of 2 steps, finished; best evaluation" in text
    assert "step 1" in text and "groups that teach nothing" in text and "engine vs trainer" in text
    assert "warnings" in text and text.count(", advantage ") == 2
    assert "step 0" in said(capsys, "show", NAME, "0") and "unused" not in text
    waiting = StepFolder.at(NAME, 2)
    with Journal(waiting.journal, {}) as journal:
        journal.add(sample(7))
    try:
        assert "unused: 1 samples were not trained on, of 1 prompts nothing: 1 wait in steps" in said(capsys, "show", NAME)
    finally:
        shutil.rmtree(waiting.path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "mad"], "has no run 'mad'; the nearest is made"),
        (["show", NAME, "7"], "run 'made' has no committed step 7; it has 0, 1"),
        (["logs", "mad"], "there is no log of 'mad'; the nearest is made"),
        (["logs", NAME, "--step", "7"], "run 'made' has no trainer log of step 7 yet; `ratchet logs` lists the other logs"),
        (["du", "x"], "has no run 'x'"),
        (["stop", NAME], "run 'made' is not at work: there is nothing to stop"),
        (["config", "trainer.learning_rat"], "field 'trainer.learning_rat' does not exist; the nearest is trainer.learning_rate"),
        (["presets", "nothing"], "no preset has 'nothing' in its name"),
    ],
)
def test_what_is_not_there_is_one_line(
    made: RunConfig, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(words)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count("\n") == 1


def test_logs_shows_the_end_of_a_step_s_trainer_log(made: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (run_folder(NAME) / "steps/000001/train/trainer.log").read_text().splitlines()
    assert said(capsys, "logs", NAME, "-n", "3").splitlines() == whole[-3:]
    assert "delivery" in said(capsys, "logs")


def test_du_sums_the_parts(made: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    from infra.store import disk_usage

    files = [path for path in run_folder(NAME).rglob("*") if path.is_file()]
    assert disk_usage.num_bytes(run_folder(NAME)) == sum(path.stat().st_size for path in files)
    text = said(capsys, "du", NAME)
    assert all(name in text for name in ("steps", "adapters", "evaluations", "all"))
    assert f"  {NAME}" in said(capsys, "du")


def test_data_shows_prompts_as_they_are_used(made: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    first = [json.loads(line) for line in (run_folder(NAME) / "steps/000000/prompts.jsonl").read_text().splitlines()]
    text = said(capsys, "data", "--config", str(run_folder(NAME) / "config.json"), "--rows", "2")
    assert text.count("\n  prompt ") == 2 and all(row["question"] in text for row in first[:2])
    assert f"tokens    {len(first[0]['prompt_tokens'])}\n" in text
    assert text.count("\n  reward    1 for this answer\n") == 2
    assert "gsm8k_numeric; 2 of 2 answers above get the 1 that counts as right" in text
    assert "4096 rows" in text and "held out    4 questions, 0 of them are trained on too" in text


def test_data_shows_what_a_reward_of_ones_own_gives_the_answers(
    workspace: Path, random_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(200)]
    Path("my.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("mine.py").write_text(
        "def half(*, question, completion, answer):\n    return 0.5\ndef fails(*, question, completion, answer):\n    return {}['x']\n"
    )
    words = ["data", "--model", str(random_tiny), "--data.source", "my.jsonl", "--rows", "3"]
    text = said(capsys, *words, "--reward.name", "mine.py:half")
    assert text.count("\n  reward    0.5 for this answer\n") == 3
    assert "0 of 3 answers above get the 1 that counts as right: does it expect answers in another form?" in text
    with pytest.raises(SystemExit, match="2"):
        run([*words, "--reward.name", "mine.py:fails"])
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and f"raised KeyError: 'x' at {tmp_path}/mine.py:4, for question" in shown.err
        and shown.err.count("\n") == 1
    )


def test_export_writes_a_peft_folder_and_replaces_nothing_else(
    made: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"adapter 1 of run {NAME}: {tmp_path / 'out/adapter'}" in ratchet(
        "export", NAME, "--adapter", "1", "--to", str(tmp_path / "out")
    )
    made_here = tmp_path / "out/adapter/adapter_model.safetensors"
    assert made_here.read_bytes() == (run_folder(NAME) / "adapters/000001/adapter_model.safetensors").read_bytes()
    (tmp_path / "mine/adapter").mkdir(parents=True)
    assert "is there and no export of ours" in ratchet("export", NAME, "--to", str(tmp_path / "mine"), "--adapter", "1", rc=2)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        run(["export", NAME, "--to", str(tmp_path / "file/out"), "--adapter", "1"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path / 'file/out'} cannot be made: Not a directory; name another folder"
    assert "has the adapter versions best, latest, and 0" in ratchet("export", NAME, "--adapter", "9", rc=2)
    assert "is the base model" in ratchet("export", NAME, "--adapter", "0", rc=2)


def test_chat_answers_each_line(made: RunConfig) -> None:
    text = ratchet("chat", NAME, "--adapter", "latest", input="What is 2 + 3?\n\nWhat is 4 + 4?\n")
    answers = text.partition("Ctrl-D ends\n")[2].splitlines()
    assert f"adapter 2 of run {NAME}" in text and len(answers) == 2


def test_evaluate_asks_a_run_s_own_questions(made: RunConfig) -> None:
    before = len(list((run_folder(NAME) / "evaluations").iterdir()))
    text = ratchet("evaluate", NAME, "--adapter", "1")
    assert 0 < text.index(f"adapter 1 of run {NAME}, 4 questions") < text.index("eval/pass_at_1"), "what it is of comes first"
    assert len(list((run_folder(NAME) / "evaluations").iterdir())) == before + 1


def test_upload_brings_what_is_missing_and_says_when_there_is_nothing(made: RunConfig) -> None:
    assert "in MLflow at sqlite://" in ratchet("upload") or "MLflow has everything" in ratchet("upload")
    assert "MLflow has everything" in ratchet("upload")
    assert "--to sqlite:///x needs the name of a run" in ratchet("upload", "--to", "sqlite:///x", rc=2)


def test_status_says_what_runs_each_program_in_a_line(
    made: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    address = "http://127.0.0.1:12345/api"
    monkeypatch.setattr(status, "rows", lambda: [("prefect", "pid 1", address, "/log"), ("engine", "not running", "", "")])
    text = said(capsys, "status")
    assert text.splitlines()[0] == f"workspace {settings().workspace}" and "GPUs are held by nothing" in text
    assert f"prefect   pid 1         {address}   /log\n" in text and "engine    not running\n" in text


def test_a_run_that_is_asked_to_stop_ends_after_its_step_and_goes_on_later(
    made: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "run",
        "--config",
        str(run_folder(NAME) / "config.json"),
        "--name",
        "long",
        "--num_steps",
        "50",
        "--evaluation.every=0",
    ]
    with (settings().workspace / "long.log").open("w") as log:
        child = subprocess.Popen([*RATCHET, *words], cwd=CHECKOUT, stdout=log, stderr=log, start_new_session=True)
    try:
        assert becomes((run_folder("long") / "steps/000000/manifest.json").exists, within_s=240)
        assert run_state.state_of("long").state == "at work"
        assert "is at work, run long of workspace" in ratchet("rm", "long", "--yes", rc=2)
        assert "stops after the step that it is making" in said(capsys, "stop", "long")
        assert child.wait(240) == 0, (settings().workspace / "long.log").read_text()[-3000:]
    finally:
        child.kill()
    committed = len(lineage.committed_steps("long"))
    assert 1 <= committed < 10 and run_state.state_of("long").state == "stopped"
    assert read_json(run_folder("long") / "report.json")["stopped"] == "asked to stop"
    config = run_state.config_of("long").but(num_steps=committed + 1)
    assert rl_run(config).num_steps == committed + 1


def test_a_run_is_stopped_at_once(made: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "run",
        "--config",
        str(run_folder(NAME) / "config.json"),
        "--name",
        "cut",
        "--num_steps",
        "50",
        "--evaluation.every=0",
    ]
    with (settings().workspace / "cut.log").open("w") as log:
        child = subprocess.Popen([*RATCHET, *words], cwd=CHECKOUT, stdout=log, stderr=log, start_new_session=True)
    try:
        assert becomes(
            lambda: run_state.config_of("cut") is not None if (run_folder("cut") / "config.json").exists() else False, 240
        )
        assert becomes(lambda: run_state.owner_at_work("cut") is not None, within_s=240)
        assert "run cut has stopped" in said(capsys, "stop", "cut", "--now")
        assert child.wait(60) == 130, (settings().workspace / "cut.log").read_text()[-3000:]
    finally:
        child.kill()
    assert (settings().workspace / "cut.log").read_text().splitlines()[-1].startswith("interrupted: run cut has stopped")


def test_drop_and_rm_remove_what_they_name(
    made: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ratchet("replay", NAME, "0", "--name", "copy", "--from", "train")
    assert "1 of its steps" not in ratchet("runs")
    assert "needs an answer, and stdin is no terminal" in ratchet("rm", "copy", rc=2)
    assert run_folder("copy").exists()
    monkeypatch.setattr(gpu_programs, "end_leftovers", lambda: pytest.fail("ended programs before the step was looked for"))
    with pytest.raises(SystemExit):
        run(["drop", "copy", "--from", "9"])
    assert "run 'copy' has no step 9 that could be dropped; its steps are 0" in capsys.readouterr().err
    text = ratchet("drop", "copy", "--from", "0")
    assert "run copy goes on with step 0" in text and not (run_folder("copy") / "steps/000000").exists()
    assert "removed run copy; what MLflow has of it stays" in ratchet("rm", "copy", "--yes")
    assert not run_folder("copy").exists() and not (settings().workspace / run_state.REMOVED_RUNS).exists()


def test_simulate_takes_the_lengths_of_a_runs_samples(made: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "1", "--num-prompts", str(made.data.num_prompts), "--group-size", str(made.sampling.group_size)]
    found = json.loads(said(capsys, "simulate", "--from-run", NAME, *words, "--num-steps", "2", "--json"))["forecast"]
    steps = [read_samples(StepFolder.at(NAME, step).samples) for step in range(2)]
    num_tokens = sum(len(sample.output_tokens) for samples in steps for sample in samples)
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(num_tokens), "steps 1 and 2 take those of 1 and 0"
