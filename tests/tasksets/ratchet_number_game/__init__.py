"""A taskset of verifiers with a game of several turns: guess a number."""

import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["NumberGame", "Numbers"]
NUM_GUESSES = 3


class NumberData(vf.TaskData):
    answer: int


class Number(vf.Task[NumberData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def is_found(self, trace) -> float:
        return float(str(self.data.answer) in re.findall(r"\d+", trace.last_reply or "")[:1])


class Numbers(vf.Taskset[Number, vf.TasksetConfig]):
    def load(self) -> Iterator[Number]:
        for answer in range(1, 10):
            yield Number(NumberData(prompt=None, name=f"number {answer}", answer=answer), self.config.task)


class NumberGame(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents) -> None:
        async with agents.agent.interaction(task) as game:
            said = "Guess a number from 1 to 9."
            for _ in range(NUM_GUESSES):
                answer = await game.turn(said)
                guess = re.findall(r"\d+", answer.last_reply or "")
                if answer.terminated or guess[:1] == [str(task.data.answer)]:
                    return
                said = "Name a number." if not guess else "higher" if int(guess[0]) < task.data.answer else "lower"
