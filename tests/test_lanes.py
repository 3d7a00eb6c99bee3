"""The list of slow test files, and the order in which workers take files."""

from pathlib import Path

from lanes import SLOW_FILES, spread

HERE = Path(__file__).parent


def test_each_slow_file_is_there_once_in_order() -> None:
    assert list(SLOW_FILES) == sorted(set(SLOW_FILES))
    assert [name for name in SLOW_FILES if not (HERE / name).exists()] == []


def test_files_with_real_engines_come_evenly_between_the_other_slow_ones() -> None:
    real, slow = [Path("r1"), Path("r2")], [Path(f"s{n}") for n in range(1, 5)]
    assert " ".join(map(str, spread(real, slow))) == "r1 s1 s2 r2 s3 s4"
    assert spread([], slow) == slow and spread(real, []) == real
