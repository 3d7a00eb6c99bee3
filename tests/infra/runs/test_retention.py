from pathlib import Path

import pytest

from infra.config import RetentionConfig
from infra.records import File
from infra.runs import retention
from infra.store.files import Removed, path_of, record_of, verified, write
from infra.store.layout import adapter_folder

WEIGHTS, CANARY = "adapter_model.safetensors", "state/canary.json"
FIRST, SECOND = "state/exp_avg.safetensors", "state/exp_avg_sq.safetensors"


@pytest.fixture
def adapters(workspace: Path) -> dict[int, dict[str, File]]:
    """Ten versions."""
    return {
        version: {
            name: record_of(write(adapter_folder("r", version) / name, b"%d" % version))
            for name in (WEIGHTS, FIRST, SECOND, CANARY)
        }
        for version in range(1, 11)
    }


def apply(delivered: range = range(1, 11), **config: object) -> list[int]:
    return retention.apply(RetentionConfig.model_validate(config), "r", latest=10, best=[4], delivered=delivered)


def have(name: str) -> list[int]:
    return [version for version in range(1, 11) if (adapter_folder("r", version) / name).exists()]


def test_nothing_is_removed_by_default(adapters: dict[int, dict[str, File]]) -> None:
    assert apply() == []
    assert have(FIRST) == have(SECOND) == list(range(1, 11))


def test_the_last_the_best_and_each_mth_stay_whole(adapters: dict[int, dict[str, File]]) -> None:
    assert apply(keep_last=2, keep_every=3) == [1, 2, 5, 7, 8]
    assert have(FIRST) == have(SECOND) == [3, 4, 6, 9, 10]
    assert have(WEIGHTS) == have(CANARY) == list(range(1, 11))
    assert apply(keep_last=2, keep_every=3) == []


@pytest.mark.parametrize("gone", [FIRST, SECOND])
def test_a_removal_that_broke_off_between_the_two_moments_is_finished(gone: str, adapters: dict[int, dict[str, File]]) -> None:
    path_of(adapters[1][gone]).unlink()
    assert 1 in apply(keep_last=1, keep_best=False)
    assert have(FIRST) == have(SECOND) == [10]


def test_the_one_file_of_an_earlier_version_is_removed_too(adapters: dict[int, dict[str, File]]) -> None:
    write(adapter_folder("r", 1) / "state/optimizer.safetensors", b"both")
    apply(keep_last=1, keep_best=False)
    assert have("state/optimizer.safetensors") == []


def test_nothing_of_the_others_stays_where_that_is_asked_for(adapters: dict[int, dict[str, File]]) -> None:
    apply(keep_last=1, keep_best=False, of_others="nothing")
    assert have(WEIGHTS) == have(FIRST) == have(SECOND) == have(CANARY) == [10]


def test_an_adapter_that_the_record_has_not_got_yet_keeps_its_weights(adapters: dict[int, dict[str, File]]) -> None:
    apply(delivered=range(1, 3), keep_last=1, keep_best=False, of_others="nothing")
    assert have(WEIGHTS) == [*range(3, 11)]
    assert have(FIRST) == have(SECOND) == [10]
    apply(keep_last=1, keep_best=False, of_others="nothing")
    assert have(WEIGHTS) == [10]


def test_whoever_needs_what_was_removed_is_told_so(adapters: dict[int, dict[str, File]]) -> None:
    apply(keep_last=1, keep_best=False)
    with pytest.raises(Removed, match="was removed by the run's retention"):
        verified(adapters[1][FIRST])
    with pytest.raises(Removed, match="was removed by the run's retention"):
        verified(adapters[1][SECOND])
    verified(adapters[1][WEIGHTS])
    apply(keep_last=1, keep_best=False, of_others="nothing")
    for name in (WEIGHTS, FIRST, SECOND, CANARY):
        with pytest.raises(Removed, match="000001"):
            verified(adapters[1][name])
