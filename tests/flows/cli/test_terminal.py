"""Which log lines a command prints, and in which form."""

import json
import logging
import signal
from collections.abc import Iterator

import pytest

from flows.cli import interrupts, terminal
from flows.cli.app import run
from flows.cli.program import program


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    chosen = terminal._chosen
    yield
    terminal.choose(verbose=True, quiet=False, log_json=False)
    terminal._chosen = chosen


LINES = [
    ("infra.progress.brief", logging.INFO, "step 0/2"),
    ("infra.engines.server.server_engine", logging.INFO, "the engine is awake"),
    ("infra.trainers.log_parser", logging.DEBUG, "trainer: build 1.2 s"),
    ("infra.trainers.log_parser", logging.WARNING, "trainer: WARNING: slow"),
    ("prefect.flow_runs", logging.INFO, "Finished in state Completed()"),
    ("prefect.flow_runs", logging.ERROR, "Finished in state Failed()"),
]


def printed(
    capsys: pytest.CaptureFixture[str], *, verbose: bool = False, quiet: bool = False, log_json: bool = False
) -> list[str]:
    terminal.choose(verbose=verbose, quiet=quiet, log_json=log_json)
    terminal.log_to_terminal()
    for name, level, message in LINES:
        logger = logging.getLogger(name)
        logger.handle(logger.makeRecord(name, level, "f", 1, message, (), None))
    terminal.console.print("the result")
    return capsys.readouterr().out.splitlines()


def test_without_an_option_a_step_a_warning_and_an_error_are_printed_with_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    *lines, result = printed(capsys)
    assert all(line[2] == line[5] == ":" and line[8] == " " for line in lines) and result == "the result"
    assert [line[9:] for line in lines] == [
        "step 0/2",
        "warning: trainer: WARNING: slow",
        "error: Finished in state Failed()",
    ]


def test_after_a_ctrl_c_prefects_lines_are_left_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_come", signal.SIGINT)
    assert [line[9:] for line in printed(capsys)[:-1]] == ["step 0/2", "warning: trainer: WARNING: slow"]


def test_a_text_is_folded_behind_blanks_and_no_word_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.console, "_width", 20)
    assert terminal.folded("see docs/results/learning-gpu.md for it", 4).splitlines() == [
        "    see",
        "    docs/results/learning-gpu.md",
        "    for it",
    ]
    assert terminal.indented("a\nb", 2) == "a\n  b"


def test_verbose_adds_details_and_quiet_leaves_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line[9:] for line in printed(capsys, verbose=True)[:2]] == ["step 0/2", "the engine is awake"]
    assert [line[9:16] for line in printed(capsys, quiet=True)[:-1]] == ["warning", "error: "]


def test_json_has_an_object_on_each_line_the_result_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = [json.loads(line) for line in printed(capsys, log_json=True)]
    assert all(list(line) == ["time", "level", "logger", "message"] for line in found)
    assert [line["level"] for line in found] == ["info", "warning", "error", "info"]
    assert (found[-1]["logger"], found[-1]["message"]) == ("ratchet", "the result")


def test_an_error_has_its_traceback_in_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.choose(verbose=False, quiet=False, log_json=True)
    terminal.log_to_terminal()
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("infra.x").exception("it failed")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["message"].startswith("it failed\nTraceback") and json.loads(line)["message"].endswith(
        "ValueError: wrong"
    )


def test_verbose_and_quiet_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["run", "-v", "-q"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: --verbose and --quiet exclude each other: give one of them\n"


@pytest.mark.parametrize("command", ["run", "step", "sweep", "evaluate", "replay", "quickstart", "compare-engines"])
def test_each_command_that_makes_flow_runs_has_the_options(command: str) -> None:
    names = {name for argument in program()[command].assemble_argument_collection() for name in argument.names}
    assert {"-v", "--verbose", "-q", "--quiet", "--log-json"} <= names
