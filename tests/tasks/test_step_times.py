"""How long a step took, and how much of it was none of its work."""

from pathlib import Path

import pytest

from infra.records import File, TrainBatch
from infra.store.files import write_json
from infra.store.layout import step_folder_of
from infra.telemetry.timings import folder_of
from tasks.commit_step import covered, times_of

BATCH = TrainBatch(
    run="r",
    step=0,
    adapter_version=0,
    adapter_sha256="base",
    file=File(path="x", sha256="0", num_bytes=1),
    num_sequences=1,
    num_tokens=1,
    num_loss_tokens=1,
)


def note(verb: str, began_at: float, seconds: float) -> None:
    write_json(folder_of("r", 0) / f"{verb}.json", {"began_at": began_at, "seconds": seconds})


def test_a_step_takes_the_time_from_its_start_to_its_commit(workspace: Path) -> None:
    """Release runs beside score and assemble: its time counts once, and what is no work is seen."""
    write_json(step_folder_of("r", 0) / "began.json", {"at": 1000.0})
    note("roll_out", 1001.0, 10.0)
    note("score", 1011.0, 2.0)
    note("release", 1011.0, 4.0)
    note("train", 1016.0, 3.0)
    found = times_of(BATCH, 1020.0)
    assert found == {"time/step_s": pytest.approx(20.0), "time/overhead_s": pytest.approx(3.0)}


def test_a_rollout_that_began_before_its_step_counts_from_the_step_before_on(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(step_folder_of("r", 0) / "began.json", {"at": 990.0})
    monkeypatch.setattr("tasks.commit_step._committed_before", lambda batch: 1000.0)
    note("roll_out", 990.0, 15.0)
    assert times_of(BATCH, 1010.0) == {"time/step_s": pytest.approx(10.0), "time/overhead_s": pytest.approx(5.0)}


@pytest.mark.parametrize(
    ("intervals", "seconds"), [([], 0), ([(0, 4), (2, 6)], 6), ([(0, 9), (2, 3)], 9), ([(-5, 1), (8, 20)], 3), ([(11, 12)], 0)]
)
def test_time_that_several_pieces_of_work_share_counts_once(intervals: list[tuple[float, float]], seconds: float) -> None:
    assert covered(intervals, 0, 10) == seconds
