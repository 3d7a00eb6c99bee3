"""One syntax for fields: options, files, presets, lists; what is wrong is one line, said before anything heavy is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

import pytest
from shared import RATCHET

from flows.cli.app import run
from flows.cli.fields import MOST_USED, Chosen, _set_fields_from_here, from_here
from flows.cli.program import chosen_by
from flows.presets import arithmetic, smoke
from infra.config import RunConfig
from infra.config.tools.overrides import flattened
from infra.config.tools.schema import FieldSource
from infra.settings import CHECKOUT, settings

HEAVY = {"prefect", "transformers", "torch", "mlflow", "infra.services.servers", "sglang", "pandas"}


def resolved(*words: str) -> tuple[RunConfig, list[FieldSource]]:
    return chosen_by(["run", *words]).run("arithmetic")


def test_dotted_options_change_the_preset() -> None:
    config, found = resolved("--num-steps", "3", "--trainer.learning_rate", "1e-5", "--data.num-prompts=4")
    base = arithmetic()
    assert config == base.but(num_steps=3, trainer=base.trainer.but(learning_rate=1e-5), data=base.data.but(num_prompts=4))
    sources = {origin.field: origin.source for origin in found}
    assert {field for field, source in sources.items() if source == "command line"} == {
        "num_steps",
        "trainer.learning_rate",
        "data.num_prompts",
    }
    assert sources["name"] == "preset" and sources["seed"] == "default"


def test_a_dash_will_do_for_an_underscore_and_the_last_word_counts() -> None:
    config, _ = resolved("--trainer.max-grad-norm", "0.5", "--sampling.group_size", "2", "--sampling.group-size", "4")
    assert (config.trainer.max_grad_norm, config.sampling.group_size) == (0.5, 4)


@pytest.mark.parametrize(
    "words",
    [
        ["--engine.extra_flags=--a-flag", "--engine.extra-flags=1"],
        ["--engine.extra_flags", '["--a-flag", "1"]'],
    ],
)
def test_a_list_is_one_json_value_or_given_several_times(words: list[str]) -> None:
    assert resolved(*words)[0].engine.extra_flags == ("--a-flag", "1")


def test_numbers_in_lists_are_numbers_and_one_word_is_a_list_of_one() -> None:
    config, _ = resolved("--evaluation.pass_at_k", "1", "--evaluation.pass_at_k", "4", "--trainer.lora.target_modules", "q_proj")
    assert config.evaluation.pass_at_k == (1, 4) and config.trainer.lora.target_modules == ("q_proj",)


@pytest.mark.parametrize("words", [["--engine.deterministic", "false"], ["--engine.deterministic=false"]])
def test_a_bool_takes_a_value_and_stands_for_true_alone(words: list[str]) -> None:
    assert not resolved(*words)[0].engine.deterministic
    assert resolved("--data.allow_repeats", "--name", "x")[0].data.allow_repeats


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"num_steps": 7, "trainer": {"learning_rate": 1e-4}}'),
        ("c.yaml", "num_steps: 7\ntrainer:\n  learning_rate: 1e-4\n"),
        ("c.toml", "num_steps = 7\n[trainer]\nlearning_rate = 1e-4\n"),
    ],
)
def test_a_file_gives_fields_and_options_win_over_it(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    config, found = resolved("--config", str(tmp_path / name), "--num_steps", "8")
    assert config == RunConfig().but(num_steps=8, trainer=RunConfig().trainer.but(learning_rate=1e-4))
    sources = {origin.field: origin.source for origin in found}
    assert (sources["trainer.learning_rate"], sources["num_steps"], sources["seed"]) == ("file", "command line", "default")
    both, _ = resolved("--config", str(tmp_path / name), "--preset", "smoke")
    assert both.data == smoke().data and both.num_steps == 7


def test_the_configuration_that_a_run_wrote_is_a_file_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(smoke().model_dump(mode="json")))
    assert resolved("--config", str(tmp_path / "config.json"))[0] == smoke()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", "{", "--config FOLDER/c.json cannot be read: Expecting property name"),
        ("c.yaml", "a: [", "--config FOLDER/c.yaml cannot be read: while parsing"),
        ("c.toml", "a", "--config FOLDER/c.toml cannot be read: "),
        ("c.txt", "a", "--config FOLDER/c.txt has an unknown ending: give a .json, .yaml or .toml file"),
        ("c.yaml", "- a", "--config FOLDER/c.yaml holds no fields: "),
        (
            "c.json",
            '{"trainer": {"learning_rat": 1}}',
            "field 'trainer.learning_rat' does not exist; the nearest is trainer.learning_",
        ),
        ("c.json", '{"num_steps": "many"}', "num_steps = 'many': "),
        ("c.json", '{"data": {"1": 2}}', "field 'data.1' does not exist"),
        ("c.yaml", "data: {1: 2}", "field 'data.1' does not exist"),
        ("c.json", '{"seed": 1, "seed": 2}', "--config FOLDER/c.json cannot be read: 'seed' is given twice"),
        ("c.yaml", "trainer:\n  seed: 1\n  seed: 2\n", "--config FOLDER/c.yaml cannot be read: 'seed' is given twice"),
        ("c.yaml", "data.split: a\ndata: {split: b}", "'data.split' is given twice: give it once"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as caught:
        resolved("--config", str(tmp_path / name))
    assert str(caught.value).startswith(message.replace("FOLDER", str(tmp_path))) and "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_named_and_a_byte_order_mark_is_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"--config .*c\.yaml cannot be read: 'utf-8' codec can't decode byte 0xff"):
        resolved("--config", str(tmp_path / "c.yaml"))
    for name, text in (("c.json", '{"seed": 7}'), ("c.toml", "seed = 7"), ("c.yaml", "seed: 7")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert resolved("--config", str(tmp_path / name))[0].seed == 7


def test_what_is_said_of_a_preset_and_a_run_at_once_is_refused() -> None:
    with pytest.raises(ValueError, match="--preset smoke and an existing run"):
        Chosen("smoke", None, ()).run("arithmetic", arithmetic())


def test_the_help_lists_every_field_with_its_section_the_most_used_first(capsys: pytest.CaptureFixture[str]) -> None:
    run(["run", "-h"])
    text = " ".join(capsys.readouterr().out.split())
    for field in flattened(RunConfig().model_dump()):
        assert f"--{field} " in text
    assert "The Megatron LoRA trainer: one optimizer step for each mini-batch of an RL step." in text
    assert "Prompts (= groups) per step. [int >= 1, count; default 16]" in text
    positions = [text.index(f"--{name} ") for name in (*MOST_USED, "seed", "batch.advantage")]
    assert positions == sorted(positions) and len(MOST_USED) == 10


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
        (["--preset", "smok"], "preset 'smok' is unknown; the nearest is smoke; known are "),
    ],
)
def test_a_value_that_does_not_fit_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolved(*arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "--trainer.learning_rat", "1"],
            "option --trainer.learning_rat does not exist; the nearest is --trainer.learning_rate; `rat",
        ),
        (["run", "--name"], "--name needs a value; `ratchet run --help` shows what it takes"),
        (["run", "word"], "'word' is one word too many; "),
        (
            ["run", "trainer.learning_rate=1e-4"],
            "'trainer.learning_rate=1e-4' is one word too many; a field is an option, --trainer.learning_rate=1e-4",
        ),
        (["rum"], "command 'rum' does not exist; the nearest is "),
        (["show"], "RUN is missing; `ratchet show --help` "),
        (["show", "x", "three"], "STEP = 'three' cannot be: a whole number is needed"),
        (["replay", "x", "0"], "--name is missing; "),
        (["replay", "x", "0", "--name", "y", "--from", "trian"], "--from = 'trian' cannot be: draw_prompts or roll_out or "),
        (["run", "--show=7"], "--show = '7' cannot be: true or false is needed"),
    ],
)
def test_words_that_do_not_fit_are_one_line_with_rc_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(words)
    said = capsys.readouterr()
    assert (caught.value.code, said.out) == (2, "")
    assert said.err.startswith(f"error: {message}") and said.err.count("\n") == 1, said.err


def command(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end."""
    return subprocess.run(arguments, cwd=CHECKOUT, env=os.environ | variables, capture_output=True, text=True, check=False)


def imported_by(*words: str) -> tuple["subprocess.CompletedProcess[str]", set[str]]:
    """Run `ratchet` in a child that says at its end which modules it has imported."""
    program = (
        "import atexit, sys; atexit.register(lambda: sys.stderr.write('\\nIMPORTED ' + ' '.join(sys.modules)))\n" + RATCHET[-1]
    )
    done = command(sys.executable, "-c", program, *words)
    said, _, modules = done.stderr.partition("\nIMPORTED ")
    done.stderr = said
    return done, set(modules.split())


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--learning-rate", "1"],
        ["run", "--trainer.learning_rat=1"],
        ["run", "--sampling.group_size", "1"],
        ["quickstart", "--trainer.learning_rat=1"],
        ["evaluate", "x", "--adaptor", "1"],
        ["stats"],
    ],
)
def test_a_typo_costs_no_heavy_import_and_is_one_line(workspace: Path, words: list[str]) -> None:
    done, modules = imported_by(*words)
    assert "flows.cli.program" in modules and not modules & HEAVY
    assert done.returncode == 2 and not done.stdout and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, (
        done.stderr
    )


def test_a_run_that_cannot_start_says_why_without_the_configuration_table(workspace: Path) -> None:
    done = command(*RATCHET, "run", "--model", "/no/such/folder")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: model '/no/such/folder' is no folder; ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "name", "value", "message"),
    [
        ("run", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is RATCHET_ENGINE_PORT,"),
        ("run", "RATCHET_ENGINE_PORT", "abc", "RATCHET_ENGINE_PORT: Input should be a valid integer"),
        ("run", "RATCHET_MLFLOW_URI", "http://me:hunter2@host", "RATCHET_MLFLOW_URI holds a password or a token"),
        ("run", "RATCHET_WORKSPACE", "/proc/version", "RATCHET_WORKSPACE: /proc/version is a file: name a folder, or one that"),
        ("status", "RATCHET_WORKSPACE", "/proc/version", "RATCHET_WORKSPACE: /proc/version is a file: "),
        ("data", "RATCHET_WORKSPACE", "/proc/here", "workspace /proc/here cannot be used: No such file"),
        ("run", "RATCHET_WORKSPACE", "/proc/here", "workspace /proc/here cannot be used: No such file"),
        ("run", "RATCHET_WORKSPACE", "/proc/self", "workspace /proc/self cannot be used: no permission to write there"),
        ("runs", "RATCHET_WORKSPACE", "", "RATCHET_WORKSPACE '' names no folder: give one such as"),
        ("runs", "RATCHET_WORKSPACE", "~no-such-user/x", "RATCHET_WORKSPACE '~no-such-user/x' names no folder: "),
        (
            "runs",
            "RATCHET_STORE_URL",
            "~no-such-user/x",
            "RATCHET_STORE_URL '~no-such-user/x' is no absolute path and no address",
        ),
        ("runs", "RATCHET_LOCK_FOLDER", "", "RATCHET_LOCK_FOLDER '' names no folder: give one such as"),
        ("runs", "RATCHET_LOCK_FOLDER", "locks", "RATCHET_LOCK_FOLDER 'locks' is no absolute path, and programs in other "),
        ("quickstart", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is "),
        ("quickstart", "RATCHET_WORKSPACE", "/proc/version", "RATCHET_WORKSPACE: /proc/version is a file: "),
        ("runs", "RATCHET_ENGINE_PRT", "1", "RATCHET_ENGINE_PRT is no setting of ours; the nearest is "),
        ("upload", "RATCHET_WORKSPACE", "/proc/version", "RATCHET_WORKSPACE: /proc/version is a file: "),
    ],
)
def test_a_variable_that_does_not_fit_is_one_line(program: str, name: str, value: str, message: str) -> None:
    done = command(*RATCHET, program, **{name: value})
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}"), done.stderr
    assert done.stderr.count("\n") == 1 and "hunter2" not in done.stderr + done.stdout


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


def test_local_files_are_named_from_where_the_command_runs_and_kept_by_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "arithmetic").mkdir()
    (tmp_path / "mine.py").write_text("def score(*, question, completion, answer):\n    return 1.0\n")
    (tmp_path / "c.yaml").write_text("model: model\nreward: {name: mine.score}\ndata: {source: not_there.jsonl}\n")
    config, _ = resolved("--reward.name", "mine.py", "--data.source=my.jsonl", "--model", "model", "--evaluation.source", "a/b")
    here = str(tmp_path.resolve())
    assert (config.reward.name, config.data.source) == (f"{here}/mine.py:score", f"{tmp_path}/my.jsonl")
    assert (config.model, config.evaluation.source) == (f"{tmp_path}/model", "a/b")
    in_file, found = resolved("--config", "c.yaml")
    assert (in_file.reward.name, in_file.model) == (f"{here}/mine.py:score", f"{tmp_path}/model")
    assert in_file.data.source == f"{tmp_path}/not_there.jsonl"
    assert {origin.source for origin in found if origin.field in ("reward.name", "model", "data.source")} == {"file"}
    several, _ = resolved("--data.sources", "my.jsonl?weight=2", "--data.sources", "a/b?weight=1", "--data.template", "my.jinja")
    assert several.data.sources == (f"{tmp_path}/my.jsonl?weight=2", "a/b?weight=1")
    assert several.data.template == f"{tmp_path}/my.jinja"
    listed, _ = resolved("--data.sources", '["my.jsonl", "a/b"]', "--data.template", "raw")
    assert (listed.data.sources, listed.data.template) == ((f"{tmp_path}/my.jsonl", "a/b"), "raw")
    (tmp_path / "python3").touch()
    program, _ = resolved("--environment.command", '["python3", "mine.py", "./python3", "not_there.py"]')
    assert program.environment.command == ("python3", f"{here}/mine.py", f"{here}/python3", "not_there.py")
    kept, _ = resolved("--data.source", "arithmetic", "--model", "tiny", "--reward.name", "gsm8k_numeric")
    assert (kept.data.source, kept.model, kept.reward.name) == ("arithmetic", "tiny", "gsm8k_numeric")


@pytest.mark.parametrize("text", ["Give {completion} points. " * 200, "~100 words are best: {completion}"])
def test_a_text_that_can_be_no_path_stays_a_text(text: str) -> None:
    assert from_here("reward.judge.rubric", text) == text


def test_a_reward_file_without_its_function_is_refused_while_options_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match="2"):
        run(["run", "--reward.name", "mine.py"])
    assert capsys.readouterr().err == (
        "error: reward.name 'mine.py' names no function, and it has no function: give one, such as mine.py:score\n"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\n", "it has no class and no async function; give one, such as mine.py:Game"),
        ("class Shop:\n    pass\nasync def run(task, client): ...\n", "it has Shop, run; give one, such as mine.py:Shop"),
    ],
)
def test_an_environments_file_without_its_class_is_refused_while_options_are_read(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        run(["run", "--environment.name", "mine.py"])
    assert capsys.readouterr().err == f"error: environment.name 'mine.py' names no class or function: {problem}\n"


def test_files_of_evaluation_sets_are_named_from_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    as_text = "gsm8k?source=test.jsonl&num_prompts=3&reward=mine.py:score"
    as_object = {
        "name": "mine",
        "data": {"source": "test.jsonl", "split": "x"},
        "reward": {"name": "mine.py:score", "timeout_s": 3},
    }
    assert _set_fields_from_here({"environment": {"name": "mine.py:Game"}}) == {
        "environment": {"name": f"{tmp_path}/mine.py:Game"}
    }
    assert _set_fields_from_here({"inspect": "mine.py@sums"}) == {"inspect": f"{tmp_path}/mine.py@sums"}
    assert _set_fields_from_here({"inspect": "inspect_evals/gsm8k"}) == {"inspect": "inspect_evals/gsm8k"}
    assert (
        from_here("evaluation.sets", "sums?inspect=mine.py@sums") == f"sums?{urlencode({'inspect': f'{tmp_path}/mine.py@sums'})}"
    )
    assert _set_fields_from_here({"environment": "mine.py:Game"}) == {"environment": f"{tmp_path}/mine.py:Game"}
    for text in (as_text, json.dumps([as_text, as_object])):
        config, _ = resolved("--evaluation.sets", text)
        for found in config.eval_configs.values():
            assert (found.data.source, found.reward.name) == (f"{tmp_path}/test.jsonl", f"{tmp_path}/mine.py:score")
        assert next(iter(config.eval_configs.values())).data.num_prompts == 3
