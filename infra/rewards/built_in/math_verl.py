r"""The reward for MATH: the last \boxed{} of a completion equals the answer after both are written alike, to the bit as verl has it.

Source of the rule: verl-project/verl, verl/utils/reward_score/math_reward.py at 1dda039 (Apache-2.0), which has it from hendrycks/math,
modeling/math_equivalence.py at 08e65fc (MIT). A percent sign counts only in verl's, unless it is escaped.
"""

from infra.rewards.built_in.base import BuiltIn, shown
from infra.rewards.signatures import Fields

BOXED = "\\boxed"
BEFORE_UNITS = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)
AFTER_UNITS = (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0."))
UNITS = "\\text{ "


class MathVerl(BuiltIn):
    r"""1 if the last \boxed{} is the answer; of an answer that is a solution, its last \boxed{} is meant."""

    def __call__(self, *, completion: str, answer: str, row: Fields) -> float:
        truth = truth_of(answer)
        check_truth(truth)
        return score(completion, truth)

    def check_row(self, answer: str, row: Fields) -> None:
        check_truth(truth_of(answer))

    def own_completion(self, answer: str, row: Fields) -> str:
        return in_box(truth_of(answer))


def score(completion: str, truth: str) -> float:
    found = boxed(completion)
    return float(found is not None and is_equal(found, truth))


def in_box(truth: str) -> str:
    return f"{BOXED}{{{truth}}}"


def check_truth(truth: str) -> None:
    """Raises ValueError for a truth that is empty or that no box can hold."""
    if not truth.strip() or not score(in_box(truth), truth):
        raise ValueError(
            f"the row's answer {shown(truth)} is not right in its own \\boxed{{}}: give LaTeX with braces in pairs, not empty"
        )


def truth_of(answer: str) -> str:
    """Raises ValueError for an answer with a box that does not end."""
    if BOXED not in answer:
        return answer
    if (found := boxed(answer)) is None:
        raise ValueError(f"the row's answer {shown(answer)} has a \\boxed without its braces: correct it")
    return found


def boxed(text: str) -> str | None:
    r"""Return what stands in the last \boxed{}, or after the last `\boxed ` up to a dollar sign; None if there is none."""
    if f"{BOXED} " in text:
        return text.split(f"{BOXED} ")[-1].split("$")[0]
    start = text.rfind(BOXED)
    if start < 0 or not text.startswith(f"{BOXED}{{", start):
        return None
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "}" and depth == 0:
            return text[start + len(BOXED) + 1 : place]
    return None


def is_equal(first: str, second: str) -> bool:
    try:
        return normalized(first) == normalized(second)
    except ValueError:
        return first == second


def normalized(text: str) -> str:
    """Write an answer as all equal ones are written. Raises ValueError for one that has no such form."""
    text = _replaced(_without_units(_replaced(text, BEFORE_UNITS)), AFTER_UNITS)
    if not text:
        return text
    text = f"0{text}" if text.startswith(".") else text
    sides = text.split("=")
    text = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text
    text = _with_fractions(_with_roots(text).replace(" ", ""))
    return "\\frac{1}{2}" if text == "0.5" else _as_fraction(text)


def _replaced(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for before, after in pairs:
        text = text.replace(before, after)
    return text


def _without_units(text: str) -> str:
    if text.count(UNITS) > 1:
        raise ValueError("several texts")
    return text.split(UNITS)[0]


def _with_roots(text: str) -> str:
    r"""Write \sqrt3 as \sqrt{3}."""
    head, *rest = text.split("\\sqrt")
    if not all(rest):
        raise ValueError("a root of nothing")
    return head + "".join(f"\\sqrt{each}" if each[0] == "{" else f"\\sqrt{{{each[0]}}}{each[1:]}" for each in rest)


def _with_fractions(text: str) -> str:
    r"""Write \frac12 and \frac1{2} as \frac{1}{2}."""
    head, *rest = text.split("\\frac")
    for each in rest:
        if not each:
            raise ValueError("a fraction of nothing")
        if each[0] != "{" and len(each) < 2:
            return text
        head += "\\frac" + (each if each[0] == "{" else f"{{{each[0]}}}{_denominator(each[1:])}")
    return head


def _denominator(text: str) -> str:
    return text if text[0] == "{" else f"{{{text[0]}}}{text[1:]}"


def _as_fraction(text: str) -> str:
    r"""Write 1/2 as \frac{1}{2}, of whole numbers only."""
    parts = text.split("/")
    try:
        above, below = map(int, parts)
    except ValueError:
        return text
    return f"\\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text
