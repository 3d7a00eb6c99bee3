"""The game of calculator.py as a taskset of verifiers: word problems whose working a calculator checks, in one to four turns.

    ratchet run --preset calculator-taskset

It is written as any taskset is, and knows nothing of Ratchet but the word problems and the calculator. It runs in verifiers' own environment.
"""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from infra.data import arithmetic
from infra.environments.examples.calculator import Calculator

__all__ = ["CalculatorEnv", "WordProblems"]
NUM_PROBLEMS = 4096


class ProblemData(vf.TaskData):  # type: ignore[misc]  # verifiers has no types here
    answer: str


class Problem(vf.Task[ProblemData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def is_right(self, trace: Any) -> float:
        """Whether the last answer has right calculations and the right result."""
        calculator = Calculator()
        calculator.reset({"question": "", "answer": self.data.answer})
        return calculator.step(trace.last_reply or "")[1]


class WordProblems(vf.Taskset[Problem, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[Problem]:
        for row in arithmetic.problems("train", NUM_PROBLEMS):
            yield Problem(ProblemData(prompt=None, name=row["question"], answer=row["answer"]), self.config.task)


class CalculatorEnv(vf.Env[vf.SingleAgentEnvConfig]):  # type: ignore[misc]
    async def run(self, task: Any, agents: Any) -> None:
        calculator = Calculator()
        said = calculator.reset({"question": task.data.name, "answer": task.data.answer})
        async with agents.agent.interaction(task) as game:
            is_done = False
            while not is_done:
                answer = await game.turn(said)
                if answer.terminated:  # by a limit
                    return
                said, _, is_done = calculator.step(answer.last_reply or "")
