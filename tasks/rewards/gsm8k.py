"""Rewards for GSM8K answers: two that are verl's to the bit, for comparisons with published results, and a sensible one.

Source of the verl pair: verl-project/verl, verl/utils/reward_score/gsm8k.py at 1dda039.
"""

import re
from decimal import Decimal, InvalidOperation

TAIL_CHARACTERS = 300
"""verl searches only the end of a completion."""
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
MARKED = re.compile(r"####\s*((?:(?!####)[^\n])*)")
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")


def ground_truth(answer: str) -> str:
    """The final answer of a GSM8K solution: what stands behind `#### `, without commas; a bare answer stays as it is."""
    return answer.rsplit("#### ", 1)[-1].strip().replace(",", "")


def extract_strict(completion: str) -> str | None:
    """The last number behind `#### ` near the end; None where there is none."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", completion[-TAIL_CHARACTERS:])
    return found[-1].replace(",", "").replace("$", "") if found else None


def extract_flexible(completion: str) -> str | None:
    """The last run of digits, dots and commas near the end that is more than a dot; the first run if all are dots."""
    found: list[str] = re.findall(r"(\-?[0-9\.\,]+)", completion[-TAIL_CHARACTERS:])
    numbers = [run for run in found if run != "."]
    return numbers[-1] if numbers else next(iter(found), None)


def verl_strict(*, question: str, completion: str, answer: str) -> float:
    """1 if the strict extraction is, as a string, the answer."""
    return float(extract_strict(completion) == ground_truth(answer))


def verl_flexible(*, question: str, completion: str, answer: str) -> float:
    """1 if the flexible extraction is, as a string, the answer."""
    return float(extract_flexible(completion) == ground_truth(answer))


def numeric(*, question: str, completion: str, answer: str) -> float:
    """1 if the final answer equals the true one as a number.

    The final answer is the first number behind the last `####`, else in the last `\\boxed{}`, else the last in the text. Dollar signs,
    commas, a trailing full stop and a trailing `.0` do not matter.
    """
    found, truth = final_number(completion), _number(ground_truth(answer))
    return float(found is not None and found == truth)


def final_number(completion: str) -> Decimal | None:
    for pattern in (MARKED, BOXED):
        if marked := pattern.findall(completion):
            return _first_number(marked[-1])
    numbers = NUMBER.findall(completion)
    return _number(numbers[-1]) if numbers else None


def _first_number(text: str) -> Decimal | None:
    found = NUMBER.search(text.replace("$", ""))
    return _number(found.group()) if found else None


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace("$", "").replace(",", "").strip().rstrip("."))
    except InvalidOperation:
        return None
