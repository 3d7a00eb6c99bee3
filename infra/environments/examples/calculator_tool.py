"""The word problems of calculator.py, whose working is checked by the tool `calculate`: each call of it is on record."""

from infra.environments.examples.calculator import Calculator
from infra.environments.examples.tools import calculate


class CalculatorTool(Calculator):
    def result_of(self, a: str, sign: str, b: str) -> int:
        return int(calculate(expression=f"{a} {sign} {b}"))
