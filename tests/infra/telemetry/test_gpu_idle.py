from pathlib import Path

import pytest

from infra.store.files import write_json
from infra.store.layout import run_folder
from infra.telemetry.gpu_idle import gpu_idle_of

Figures = dict[str, float]


@pytest.fixture
def steps(workspace: Path) -> Path:
    """Two steps: sampled from 2 to 10 and trained from 13 to 20, committed at 22; asked for again at 100, sampled from 101 to 109 and
    trained from 111 to 118."""
    folder = run_folder("r") / "steps"
    for step, began, first, last, train, committed in ((0, 1, 2, 10, 13, 22), (1, 100, 101, 109, 111, 120)):
        place = folder / f"{step:06d}"
        write_json(place / "began.json", {"at": began})
        write_json(place / "measures/roll_out.json", {"seconds": 9.0, "first_token_at": first, "last_token_at": last})
        write_json(place / "train/result.json", {"began_at": {"train": train}, "seconds": {"train": 7.0}})
        write_json(place / "manifest.json", {"committed_at": committed})
    return folder


def test_time_in_which_nobody_asked_for_a_step_is_not_counted(steps: Path) -> None:
    assert gpu_idle_of("r", 0) == {"gpu_idle/to_training_s": 3}
    assert gpu_idle_of("r", 1) == {"gpu_idle/to_training_s": 2, "gpu_idle/to_sampling_s": 3}


def test_steps_that_are_not_committed_follow_each_other_at_once(steps: Path) -> None:
    (steps / "000000/manifest.json").unlink()
    assert gpu_idle_of("r", 1)["gpu_idle/to_sampling_s"] == 81


def test_what_an_earlier_attempt_sampled_or_trained_says_nothing(steps: Path) -> None:
    write_json(steps / "000001/train/result.json", {"began_at": {"train": 90}, "seconds": {"train": 7.0}})
    assert gpu_idle_of("r", 1) == {"gpu_idle/to_sampling_s": 3}
    write_json(steps / "000001/began.json", {"at": 2e12})
    assert gpu_idle_of("r", 1) == {}


def test_without_a_server_or_a_training_there_is_nothing_to_say(steps: Path) -> None:
    (steps / "000000/train/result.json").unlink()
    assert gpu_idle_of("r", 1) == {"gpu_idle/to_training_s": 2}
    write_json(steps / "000001/measures/roll_out.json", {"seconds": 9.0, "first_token_at": 0.0, "last_token_at": 0.0})
    assert gpu_idle_of("r", 1) == {}


def test_of_episodes_only_the_end_of_the_last_turn_is_known(steps: Path) -> None:
    write_json(steps / "000001/measures/roll_out.json", {"seconds": 9.0, "last_token_at": 109})
    assert gpu_idle_of("r", 1) == {"gpu_idle/to_training_s": 2}
