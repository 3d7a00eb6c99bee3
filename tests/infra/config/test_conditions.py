from typing import Any

import pytest

from infra.config import DataConfig
from infra.config.tools.conditions import check_columns, condition_of

ROW = {"level": 3, "lang": "en", "extra": {"split": "train", "ok": True}, "none": None, "year": "2024", "seen": "true"}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("level >= 3", True),
        ("level>3", False),
        ("level != 3", False),
        ("level in 1,3", True),
        ("lang == en", True),
        ('lang == "en"', True),
        ("lang in de, en", True),
        ("lang in de,fr", False),
        ("extra.split == train", True),
        ("extra.ok == true", True),
        ("extra.missing == 1", False),
        ("extra.missing != 1", True),
        ("none != null", False),
        ("level == 3.0", True),
        ("year == 2024", True),
        ("year != 2024", False),
        ('year == "2024"', True),
        ("year != 2025", True),
        ("year in 2023, 2024", True),
        ("seen != true", False),
    ],
)
def test_a_condition_holds_for_a_row_or_not(text: str, holds: bool) -> None:
    assert condition_of(text).holds(ROW) is holds


@pytest.mark.parametrize("text", ["level", "level =", "level = 3", ">= 3", "level >=", ""])
def test_what_is_no_condition_is_refused_with_the_configuration(text: str) -> None:
    with pytest.raises(ValueError, match="is no condition: write COLUMN, one of == != < <= > >= in, and a value"):
        DataConfig(filter=(text,))


@pytest.mark.parametrize(("text", "shown"), [("lang > 3", '"en" with 3'), ("level < high", '3 with "high"')])
def test_values_that_cannot_be_compared_are_named(text: str, shown: str) -> None:
    with pytest.raises(ValueError, match=f"data.filter {text!r} cannot compare {shown}"):
        condition_of(text).holds(ROW)


def test_a_column_that_is_not_there_is_named() -> None:
    names: list[Any] = list(ROW)
    check_columns([condition_of("extra.any == 1")], names)
    with pytest.raises(
        ValueError, match=r"data\.filter .levle > 1.: there is no column 'levle'; there are level, lang, extra, none"
    ):
        check_columns([condition_of("levle > 1")], names)
