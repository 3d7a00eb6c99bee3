"""A word problem with a calculator, in two to four turns: a calculation first, then the answer.

user       Bob has 5 bags of 6 plums and gives 16 to Sara. How many plums does Bob have left?
assistant  5 * 6 = 30 ...            a calculation is sent to the calculator
user       30 - 16 = 14              its result; without a calculation, a request for one
assistant  #### 14                   an answer after a calculation ends the episode
"""

import operator
import re
from collections.abc import Callable, Mapping

CALCULATION = re.compile(r"(\d{1,6}) ([-+*]) (\d{1,6})")
ANSWER = re.compile(r"#### (-?\d{1,9})")
OPERATORS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ASK_AGAIN = "Write a calculation."


class Calculator:
    restore = "replay"

    def reset(self, task: Mapping[str, str]) -> str:
        self.right = int(task["answer"].rpartition("#### ")[2])
        self.question, self.has_calculated = task["question"], False
        return self.question

    def step(self, action: str) -> tuple[str, float, bool]:
        answers = ANSWER.findall(action)
        if self.has_calculated and answers:
            return "", float(int(answers[-1]) == self.right), True
        if not (found := CALCULATION.findall(action)):
            return f"{ASK_AGAIN}\n{self.question}", 0.0, False
        self.has_calculated = True
        a, sign, b = found[-1]
        return f"{a} {sign} {b} = {OPERATORS[sign](int(a), int(b))}\n{self.question}", 0.0, False
