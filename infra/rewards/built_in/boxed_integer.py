r"""The reward for AIME: the last \boxed{} of a completion is the answer as a whole number, so that 33 is 033."""

import re

from infra.rewards.built_in.base import BuiltIn, shown
from infra.rewards.built_in.math_verl import boxed, in_box
from infra.rewards.signatures import Fields

INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


class BoxedInteger(BuiltIn):
    r"""1 if the last \boxed{} is a whole number and equals the answer. Blanks, thousands' commas and leading zeros do not count."""

    def __call__(self, *, completion: str, answer: str, row: Fields) -> float:
        truth, found = _integer(answer), _integer(boxed(completion) or "")
        self.check_row(answer, row)
        return float(found is not None and found == truth)

    def check_row(self, answer: str, row: Fields) -> None:
        if _integer(answer) is None:
            raise ValueError(f"the row's answer {shown(answer)} is no whole number: boxed_integer needs one, such as 033")

    def own_completion(self, answer: str, row: Fields) -> str:
        return in_box(answer)


def _integer(text: str) -> int | None:
    plain = text.strip().strip("$").replace("{,}", "").replace("\\,", "").replace(",", "").replace("\\!", "")
    return int(plain) if INTEGER.fullmatch(plain) else None
