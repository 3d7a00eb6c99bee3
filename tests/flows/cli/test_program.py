"""The program as a whole: every command has help and examples, starts fast, and nothing of `flows` is run by -m."""

import os
import re
import resource
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from shared import RATCHET

import flows.cli
from flows.cli.app import refuse_module, run
from flows.cli.program import COMMANDS, declared, page_of, program
from infra.settings import CHECKOUT

HEAVY = {"prefect", "transformers", "torch", "mlflow", "pydantic", "pydantic_settings", "infra.settings", "numpy"}
GENEROUS_CPU_S = 0.8
"""A start takes 0.2 to 0.4 s of CPU time; one that imports Prefect takes 1.3 s and more."""


def test_help_is_there_at_once_and_imports_nothing_heavy() -> None:
    words = "import atexit, sys; atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)))\n" + RATCHET[-1]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", words, "--help"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert not set(done.stderr.split()) & HEAVY
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < GENEROUS_CPU_S
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE), name
    assert "2 wrong input" in done.stdout and "130, 143 or 129" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_has_help_with_three_or_four_examples(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    run([name, option])
    text = capsys.readouterr().out
    about, examples = page_of(COMMANDS[name][1])
    assert about.splitlines()[0] in text and "Exit codes: 0 success" in text
    assert "--empty-" not in text and "--no-" not in text, (
        "cyclopts adds an --empty-NAME or --no-NAME to an option unless told not to"
    )
    assert 3 <= len(examples.splitlines()) <= 4
    for line in examples.splitlines():
        assert f"ratchet {name}" in line and line in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_words_of_every_example_are_taken(name: str) -> None:
    _, examples = page_of(COMMANDS[name][1])
    for line in examples.splitlines():
        command = re.split(r"\s{4,}| && | \| | > |\)", line[line.index(f"ratchet {name}") :])[0]
        app = program()
        app.parse_args(declared(app, shlex.split(command)[1:]), exit_on_error=False, print_error=False)


def test_every_file_of_a_command_is_in_the_table_and_no_folder_is_full() -> None:
    root = Path(flows.cli.__file__).parent
    found = {f"{path.parent.name}.{path.stem}" for path in root.glob("*/*.py") if path.stem not in ("__init__", "servers")}
    assert found == {module for _, module in COMMANDS.values()}
    for folder in (root, *(path for path in root.iterdir() if path.is_dir() and path.name != "__pycache__")):
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 12


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        ("flows.run", "ratchet run"),
        ("flows.compare_engines", "ratchet compare-engines"),
        ("flows.cli.work.drop", "ratchet drop"),
        ("flows.step", "ratchet step"),
        ("flows.presets", "ratchet presets"),
        ("flows.cli.app", "ratchet --help"),
        ("flows", "ratchet --help"),
    ],
)
def test_no_module_of_flows_is_run_by_m(module: str, instead: str) -> None:
    done = subprocess.run([sys.executable, "-m", module], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith(f"error: {module} is not run by -m: `{instead}` is the command") and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize("path", sorted(CHECKOUT.glob("flows/**/*.py")), ids=lambda path: path.stem)
def test_every_module_of_flows_is_refused_however_it_is_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__")
    for words in (["-m", name], [f"-m{name}"], ["-X", "importtime", "-Bm", name, "--help"], ["-Ximporttime", "-m", name]):
        with pytest.raises(SystemExit) as caught:
            refuse_module(["python", *words])
        said = capsys.readouterr()
        assert (caught.value.code, said.out) == (2, "")
        assert said.err.startswith(f"error: {name} is not run by -m: `ratchet ") and said.err.count("\n") == 1


def test_a_module_of_another_package_that_imports_flows_is_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("import flows\n")
    (tmp_path / "mine/tool.py").write_text("print('here')\n")
    words = [sys.executable, "-m", "mine.tool", "-m", "flows.run"]
    environment = os.environ | {"PYTHONPATH": f"{CHECKOUT}:{tmp_path}"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "here\n", "")


def test_the_script_is_installed_with_the_package_and_is_this_program() -> None:
    scripts = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"ratchet": "flows.cli.app:main"}
    assert RATCHET[-1] == "from flows.cli.app import main; main()"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_fields(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(["completion", shell])
    text = capsys.readouterr().out
    for word in ("compare-engines", "doctor", "--trainer.learning_rate", "--adapter"):
        assert word in text, word
    if shell == "bash":
        (tmp_path / "ratchet").write_text(text)
        subprocess.run(["bash", "-n", str(tmp_path / "ratchet")], check=True)


def test_bash_completes_a_command_and_a_field(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(["completion", "bash"])
    (tmp_path / "ratchet").write_text(capsys.readouterr().out)
    for words, expected in (
        (["ratchet", "comp"], "compare-engines"),
        (["ratchet", "run", "--trainer.learn"], "--trainer.learning_rate"),
    ):
        script = f"""
            source {tmp_path}/ratchet
            COMP_WORDS=({" ".join(words)}) COMP_CWORD={len(words) - 1} COMP_LINE="{" ".join(words)}" COMP_POINT={len(" ".join(words))}
            $(complete -p ratchet | sed -E 's/.*-F ([^ ]+).*/\\1/') ratchet "{words[-1]}" "{words[-2]}"
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        assert expected in [line.strip() for line in done.stdout.splitlines()], done.stdout + done.stderr
