"""verl's choice of a rule by the row's column `data_source`, for GSM8K and MATH.

Source: verl-project/verl, verl/utils/reward_score/__init__.py at 1dda039 (Apache-2.0). Its rules for other data sets are not here.
"""

from collections.abc import Sequence

from infra.rewards.built_in import gsm8k, math_verl
from infra.rewards.built_in.base import BuiltIn, shown
from infra.rewards.signatures import Fields

GSM8K = ("openai/gsm8k",)
MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
SOURCES: Sequence[str] = (*GSM8K, *MATH)


class Verl(BuiltIn):
    """The reward that verl gives without a function of one's own. The truth is `reward_model.ground_truth`, else the answer."""

    def __call__(self, *, completion: str, answer: str, row: Fields) -> float:
        self.check_row(answer, row)
        truth = _truth(answer, row)
        if _source(row) in GSM8K:
            return gsm8k.verl_strict(question="", completion=completion, answer=truth)
        return math_verl.score(completion, math_verl.truth_of(truth))

    def check_row(self, answer: str, row: Fields) -> None:
        truth = _truth(answer, row)
        if _source(row) in MATH:
            math_verl.check_truth(math_verl.truth_of(truth))
        elif not gsm8k.verl_strict(question="", completion=self.own_completion(answer, row), answer=truth):
            raise ValueError(f"the row's answer {shown(truth)} is not right after its own '#### ': give a number")

    def own_completion(self, answer: str, row: Fields) -> str:
        truth = _truth(answer, row)
        is_gsm8k = _source(row) in GSM8K
        return f"#### {gsm8k.ground_truth(truth)}" if is_gsm8k else math_verl.in_box(math_verl.truth_of(truth))


def _source(row: Fields) -> str:
    """Raises ValueError for a data set whose rule is not here."""
    found = row.get("data_source")
    if found not in SOURCES:
        raise ValueError(f"the row's column 'data_source' is {shown(found)}: verl's rules are here for {', '.join(SOURCES)}")
    return str(found)


def _truth(answer: str, row: Fields) -> str:
    model = row.get("reward_model")
    found = model.get("ground_truth") if isinstance(model, dict) else None
    return answer if found is None else str(found)
