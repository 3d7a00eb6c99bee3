"""verl's choice of a rule by the row's column `data_source`, for GSM8K, MATH and DAPO's data.

Source: verl-project/verl, verl/utils/reward_score/__init__.py at 1dda039 (Apache-2.0). Its rules for other data sets are not here.
"""

from collections.abc import Sequence
from typing import Literal

from infra.rewards.built_in import gsm8k, math_dapo, math_verl
from infra.rewards.built_in.base import BuiltIn, shown
from infra.rewards.signatures import Fields

GSM8K = ("openai/gsm8k",)
MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
DAPO = ("math_dapo", "math", "math_dapo_reasoning")
AIME = "aime"
"""Sources whose names begin with it have DAPO's rule too."""
SOURCES: Sequence[str] = (*GSM8K, *MATH, *DAPO, f"{AIME}...")


class Verl(BuiltIn):
    """The reward that verl gives without a function of one's own: 0 or 1, by DAPO's rule -1 or 1.

    The truth is `reward_model.ground_truth`, else the answer.
    """

    def __call__(self, *, completion: str, answer: str, row: Fields) -> float:
        self.check_row(answer, row)
        truth = _truth(answer, row)
        match _rule(row):
            case "gsm8k":
                return gsm8k.verl_strict(question="", completion=completion, answer=truth)
            case "dapo":
                return math_dapo.score(completion, truth)
            case _:
                return math_verl.score(completion, math_verl.truth_of(truth))

    def check_row(self, answer: str, row: Fields) -> None:
        truth, rule = _truth(answer, row), _rule(row)
        if rule == "math":
            math_verl.check_truth(math_verl.truth_of(truth))
        elif rule == "dapo" and math_dapo.score(self.own_completion(answer, row), truth) < 1:
            raise ValueError(f"the row's answer {shown(truth)} is not right after its own 'Answer: ': give one line, not empty")
        elif rule == "gsm8k" and not gsm8k.verl_strict(question="", completion=self.own_completion(answer, row), answer=truth):
            raise ValueError(f"the row's answer {shown(truth)} is not right after its own '#### ': give a number")

    def own_completion(self, answer: str, row: Fields) -> str:
        truth = _truth(answer, row)
        match _rule(row):
            case "gsm8k":
                return f"#### {gsm8k.ground_truth(truth)}"
            case "dapo":
                return f"Answer: {truth}"
            case _:
                return math_verl.in_box(math_verl.truth_of(truth))


def _rule(row: Fields) -> Literal["gsm8k", "math", "dapo"]:
    """Raises ValueError for a data set whose rule is not here."""
    found = row.get("data_source")
    if found in GSM8K:
        return "gsm8k"
    if found in MATH:
        return "math"
    if found in DAPO or (isinstance(found, str) and found.startswith(AIME)):
        return "dapo"
    raise ValueError(f"the row's column 'data_source' is {shown(found)}: verl's rules are here for {', '.join(SOURCES)}")


def _truth(answer: str, row: Fields) -> str:
    model = row.get("reward_model")
    found = model.get("ground_truth") if isinstance(model, dict) else None
    return answer if found is None else str(found)
