"""A word problem whose working a calculator checks, in one to four turns.

user       Bob has 5 bags of 6 plums and gives 16 to Sara. How many plums does Bob have left?
assistant  #### 12                               a bare answer is a guess: the calculator asks for a calculation
user       Write a calculation. ...
assistant  5 * 6 = 30 / 30 - 16 = 13 / #### 13   the first wrong result is corrected
user       30 - 16 = 14 ...
assistant  5 * 6 = 30 / 30 - 16 = 14 / #### 14   right calculations end the episode: the reward is 1 if the answer is right too
"""

import operator
import re
from collections.abc import Callable, Mapping

CALCULATION = re.compile(r"(\d{1,6}) ([-+*]) (\d{1,6}) = (-?\d{1,9})")
ANSWER = re.compile(r"#### (-?\d{1,9})")
OPERATORS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ASK_AGAIN = "Write a calculation."


class Calculator:
    restore = "replay"

    def reset(self, task: Mapping[str, str]) -> str:
        self.right, self.question = int(task["answer"].rpartition("#### ")[2]), task["question"]
        return self.question

    def step(self, action: str) -> tuple[str, float, bool]:
        if not (found := CALCULATION.findall(action)):
            return f"{ASK_AGAIN}\n{self.question}", 0.0, False
        for a, sign, b, said in found:
            if (result := self.result_of(a, sign, b)) != int(said):
                return f"{a} {sign} {b} = {result}\n{self.question}", 0.0, False
        answers = ANSWER.findall(action)
        return "", float(bool(answers) and int(answers[-1]) == self.right), True

    def result_of(self, a: str, sign: str, b: str) -> int:
        return OPERATORS[sign](int(a), int(b))
