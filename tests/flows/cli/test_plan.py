"""The command `ratchet plan`: what it prints, and what it refuses."""

import json
import shlex

import pytest

from flows.cli import program
from flows.cli.app import run
from infra.settings import CHECKOUT

ONE = ["plan", "--gpus", "1xH200", "--model", "qwen2.5-7b"]


def test_plan_prints_seconds_memory_reason_and_a_command_that_ratchet_takes(capsys: pytest.CaptureFixture[str]) -> None:
    run(ONE)
    said = capsys.readouterr().out
    assert "1. 29.9 s a step (estimate)" in said and "GiB a GPU: engine 115" in said and "First, because" in said
    words = shlex.split(said[said.index("ratchet run") :].replace("\\\n", " "))[1:]
    assert program.chosen_by(words).run("smoke")[0].engine.replicas == 1


def test_the_page_shows_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (CHECKOUT / "docs/how-to/plan-a-machine.md").read_text()
    run(["plan", "--gpus", "8xH100", "--model", "qwen2.5-7b"])
    said, command = capsys.readouterr().out.split("The first one:\n")
    assert said in page and command.partition("ratchet run")[2].strip() in page


def test_plan_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    run([*ONE, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["best"][0]["step_s"] == pytest.approx(29.90, abs=0.01)
    assert found["best"][0]["options"]["engine.replicas"] == "1" and "measured" in found["rates"]["source"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "8xV100", "--model", "qwen2.5-7b"], "GPU kind 'V100' is not known; known are H200, H100, A100, B200"),
        (["--gpus", "8xH100", "--model", "none"], "--model none: neither a folder nor a known shape; known are qwen2.5-0.5b"),
        (["--gpus", "1xH100", "--model", "qwen3-30b-a3b"], "1024 tokens a sample fits into 80 GiB a GPU; 2xH100 or "),
        (
            ["--gpus", "1xH100", "--model", "qwen2.5-7b", "--output-tokens", "400000"],
            "none fits on 8 GPUs of any known kind, take fewer tokens a sample or a smaller model",
        ),
        (["--gpus", "H100", "--model", "qwen2.5-7b"], "must be 1 to 8, those of one machine, such as 8xH100"),
        ([*ONE[1:], "--rank", "0"], "greater than or equal to 1"),
    ],
)
def test_plan_says_in_one_line_what_cannot_be(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(["plan", *words])
    told = capsys.readouterr().err
    assert said in told and told.startswith("error: ") and told.count("\n") == 1
