"""The reward for mathematics by Hugging Face's math-verify: two expressions are equal if sympy finds them so.

Source of the rule: verl-project/verl, verl/utils/reward_score/math_verify.py at 1dda039 (Apache-2.0), which calls huggingface/Math-Verify
(Apache-2.0). Their time-outs give 0, and work in no thread; here there are none, and the worker's deadline leaves such a sample unjudged.
"""

import logging
from functools import lru_cache
from typing import Any

from infra.rewards.built_in import math_verl
from infra.rewards.built_in.base import BuiltIn, shown
from infra.rewards.signatures import Fields

NUM_KEPT = 256
"""Answers that stay ready: the samples of a group have the same one."""


class MathVerify(BuiltIn):
    r"""1 if the final expression of a completion, in a \boxed{}, in LaTeX or plain, equals the answer; else 0.

    Of an answer that is a solution, its last \boxed{} is meant. A completion in which no expression is found gets 0.
    """

    _library: Any  # Any: math-verify has no types

    def setup(self) -> None:
        """Import math-verify, with sympy: in a worker only."""
        import math_verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time-out
        self._library = math_verify
        self._gold = lru_cache(NUM_KEPT)(self._parsed_answer)

    def __call__(self, *, completion: str, answer: str, row: Fields) -> float:
        library = self._library
        kinds = (library.ExprExtractionConfig(), library.LatexExtractionConfig())
        found = library.parse(completion, kinds, parsing_timeout=None)
        return float(library.verify(self._gold(answer), found, timeout_seconds=None))

    def _parsed_answer(self, answer: str) -> list[Any]:
        """Raises ValueError for an answer in which math-verify finds nothing."""
        self.check_row(answer, {})
        library, text = self._library, math_verl.in_box(math_verl.truth_of(answer))
        found: list[Any] = library.parse(text, (library.LatexExtractionConfig(),), parsing_timeout=None)
        if not found:
            raise ValueError(f"the row's answer {shown(answer)} is no expression that math-verify reads: give LaTeX or a number")
        return found

    def check_row(self, answer: str, row: Fields) -> None:
        math_verl.check_truth(math_verl.truth_of(answer))

    def own_completion(self, answer: str, row: Fields) -> str:
        return math_verl.in_box(math_verl.truth_of(answer))
