"""The command `ratchet simulate`: what it prints, and what it refuses."""

import json

import pytest

from flows.cli.app import run

FEW = ["--num-prompts", "4", "--num-steps", "3"]


def test_simulate_prints_the_scenario_and_its_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    run(["simulate", *FEW, "--gpus", "4", "--trainer-gpus", "2", "--max-staleness", "1", "--recovery.engine-s", "3", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["scenario"]["trainer_gpus"] == 2 and found["scenario"]["recovery"]["engine_s"] == 3
    assert found["forecast"]["num_samples"] == 3 * 4 * 8 and found["forecast"]["mean_staleness"] == 1


def test_simulate_prints_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    run(["simulate", *FEW])
    said = capsys.readouterr().out
    assert "8 GPUs, engine and trainer in turns; 8 replicas of 1; 3 steps" in said and "GPUs idle" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--max-staleness", "1"],
            "error: max_staleness is 1: engine and trainer work side by side only with trainer_gpus above 0\n",
        ),
        (["--gpus", "2000"], "error: gpus = '2000': Input should be less than or equal to 1024\n"),
        (["--from-run", "nothing"], "has no run 'nothing'"),
    ],
)
def test_simulate_says_in_one_line_what_cannot_be(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(["simulate", *words])
    assert said in capsys.readouterr().err
