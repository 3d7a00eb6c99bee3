"""Rewards that compare the text of a completion: with the answer, or with a regular expression."""

import re

from infra.rewards.built_in.base import BuiltIn, parameter, shown
from infra.rewards.signatures import Fields


class ExactMatch(BuiltIn):
    """1 if the completion is the answer. Blanks and line ends around either do not count."""

    def __call__(self, *, completion: str, answer: str, row: Fields) -> float:
        self.check_row(answer, row)
        return float(completion.strip() == answer.strip())

    def check_row(self, answer: str, row: Fields) -> None:
        if not answer.strip():
            raise ValueError("the row's answer is empty: exact_match needs the text that is right")


class RegexMatch(BuiltIn):
    r"""1 if the regular expression is found anywhere in the completion: that of the row's column `pattern`, else the answer.

    Syntax and meaning are those of Python's re.search: `\A` and `\Z` are the ends of the completion, `(?i)` ignores case, `(?s)` lets a dot
    be a line end.
    """

    def __call__(self, *, completion: str, answer: str, row: Fields) -> float:
        return float(_compiled(answer, row).search(completion) is not None)

    def check_row(self, answer: str, row: Fields) -> None:
        _compiled(answer, row)


def _compiled(answer: str, row: Fields) -> re.Pattern[str]:
    pattern, place = parameter(row, "pattern", answer)
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"the row's {place} is {shown(pattern)}: regex_match needs a regular expression as text there")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"the row's {place} {shown(pattern)} is no regular expression of Python's re: {error}: correct it"
        ) from None
