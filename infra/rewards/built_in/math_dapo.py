r"""verl's rule for DAPO's data: what follows the last `Answer:` equals the answer after both are written alike.

Without an `Answer:`, the last \boxed{} must be the answer as it stands.

Source: verl-project/verl, verl/utils/reward_score/math_dapo.py at 1dda039 (Apache-2.0), which has the way to write them alike from Minerva's,
in EleutherAI/lm-evaluation-harness, lm_eval/tasks/hendrycks_math/utils.py.
"""

import re

TAIL_CHARACTERS, BOX_CHARACTERS = 300, 100
"""Only so much of a completion's end is read, and less of it for a box."""
ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
INVALID = "[INVALID]"
BOX = "\\boxed{"
REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet"),
    *("minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets"),
    *("multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}"),
    *("^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
REWRITTEN = (
    *((r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"), (r"(\\text\{)(.*?)(\})", r"\2"), (r"(\\textbf\{)(.*?)(\})", r"\2")),
    *((r"(\\overline\{)(.*?)(\})", r"\2"), (r"(\\boxed\{)(.*)(\})", r"\2")),
    *((r"(frac)([^{])(.)", r"frac{\2}{\3}"), (r"(sqrt)([^{])", r"sqrt{\2}")),
)


def score(completion: str, truth: str) -> float:
    """Return 1 for a right answer, and -1 for any other completion."""
    text = completion[-TAIL_CHARACTERS:]
    answers = ANSWER.findall(text)
    found = alike(answers[-1] if answers else INVALID)
    is_right = found == alike(truth)
    if found == INVALID and (box := _last_box(text[-BOX_CHARACTERS:])) is not None:
        is_right = box == truth
    return 1.0 if is_right else -1.0


def alike(answer: str) -> str:
    """Write an answer as all others that mean the same, as far as the rule goes."""
    text = answer.split("=")[-1]
    for before, after in (*REPLACED, *((word, "") for word in REMOVED)):
        text = text.replace(before, after)
    for pattern, after in REWRITTEN:
        text = re.sub(pattern, after, text)
    text = text.replace("$", "")
    plain = text.replace(",", "")
    return (plain if plain.isdigit() else text).strip()


def _last_box(text: str) -> str | None:
    start, depth = text.rfind(BOX), 0
    for place in range(start, len(text)) if start >= 0 else ():
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "}" and not depth:
            return text[start + len(BOX) : place]
    return None
