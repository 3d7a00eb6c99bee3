"""Rewards for GSM8K answers: two that equal verl's exactly, for comparisons with published results, and a more robust one.

Source of the verl pair: verl-project/verl, verl/utils/reward_score/gsm8k.py at 1dda039.
"""

import re
from fractions import Fraction

TAIL_CHARACTERS = 300
"""verl searches only the end of a completion."""
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
MARKED = re.compile(r"####\s*((?:(?!####)[^\n])*)")
SAYS_SOMETHING = re.compile(r"\w")
_DECIMAL = r"(?:(?:\d{1,3}(?:[ ]\d{3})+(?!\d)|\d[\d,]*)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+(?!\w))?"
NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}])[-+])?
    (?:
        (?<!/)(?P<above>{_DECIMAL})[ ]?/[ ]?(?P<below>{_DECIMAL})(?![\d/])
        | (?P<whole>\d+)[ ](?P<mixed_above>\d+)/(?P<mixed_below>\d+)(?![\d/])
        | (?:(?P<tex_whole>\d+)[ ]?)?\\[dt]?frac\{{[ ]*(?P<tex_above>[-+]?{_DECIMAL})[ ]*\}}\{{[ ]*(?P<tex_below>{_DECIMAL})[ ]*\}}
        | (?P<plain>{_DECIMAL})
    )
    """,
    re.VERBOSE,
)
PARTS_OF_FRACTIONS = (("", "above", "below"), ("whole", "mixed_above", "mixed_below"), ("tex_whole", "tex_above", "tex_below"))
PLAIN = {0x2212: "-", **dict.fromkeys((0x00A0, 0x2007, 0x2009, 0x202F), " ")}
LATEX = (("{,}", ","), ("\\!", ""), ("\\,", " "), ("\\ ", " "), ("\\$", ""), ("$", ""))
"""How LaTeX writes thousands (`1{,}000`, `1,\\!000`, `1\\,000`) and dollars."""
MAX_DIGITS = 400
"""Longest number, and its largest exponent. A longer one is not an answer and would take long to compare."""


def ground_truth(answer: str) -> str:
    """Return the final answer of a GSM8K solution: the text after `#### `, without commas. A bare answer is returned unchanged."""
    return answer.rsplit("#### ", 1)[-1].strip().replace(",", "")


def extract_strict(completion: str) -> str | None:
    """Return the last number after `#### ` near the end; None if there is none."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", completion[-TAIL_CHARACTERS:])
    return found[-1].replace(",", "").replace("$", "") if found else None


def extract_flexible(completion: str) -> str | None:
    """Return the last run of digits, dots and commas near the end that is more than a dot; the first run if all are dots."""
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

    The final answer is the first number after the last `####` that is followed by text, else in the last non-empty `\\boxed{}`,
    else the last number in the text. The true one is the text after the last `####` of the answer, or all of it: a number and nothing else.
    Numbers may have a sign (`-` or U+2212, not directly after a digit or letter), dollar signs, thousands separated by commas or blanks (in
    LaTeX also `1{,}000`, `1\\,000`), decimals, a trailing full stop or an exponent (`1e3`). They may be fractions (`1/2`, `1 1/2`,
    `\\frac{1}{2}`). They are compared exactly.
    """
    found, truth = final_number(completion), _whole_number(answer.rsplit("####", 1)[-1])
    return float(found is not None and found == truth)


def final_number(completion: str) -> Fraction | None:
    """Return a completion's final number, by the rule of `numeric`. None if there is none, or one too large to be an answer."""
    text = _plain(completion)
    for pattern in (MARKED, BOXED):
        if marked := [found for found in pattern.findall(text) if SAYS_SOMETHING.search(found)]:
            first = NUMBER.search(marked[-1])
            return _value(first) if first else None
    numbers = list(NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def _whole_number(text: str) -> Fraction | None:
    found = NUMBER.fullmatch(_plain(text).strip())
    return _value(found) if found else None


def _plain(text: str) -> str:
    """Normalize minus signs, blanks and LaTeX's ways to write them and thousands, and remove dollar signs."""
    text = text.translate(PLAIN)
    for written, meant in LATEX:
        text = text.replace(written, meant)
    return text


def _value(found: re.Match[str]) -> Fraction | None:
    texts = {name: text for name, text in found.groupdict().items() if text is not None and name != "sign"}
    parts = {name: number for name, text in texts.items() if (number := _decimal(text)) is not None}
    if len(parts) < len(texts):
        return None
    value = parts.get("plain", Fraction(0))
    for whole, above, below in PARTS_OF_FRACTIONS:
        if below in parts:
            if not parts[below]:
                return None
            value = parts.get(whole, Fraction(0)) + parts[above] / parts[below]
    return -value if found["sign"] == "-" else value


def _decimal(text: str) -> Fraction | None:
    digits = text.replace(",", "").replace(" ", "")
    exponent = re.search(r"[eE](.*)", digits)
    if len(digits) > MAX_DIGITS or (exponent and abs(int(exponent[1])) > MAX_DIGITS):
        return None
    return Fraction(digits)
