"""A taskset of verifiers with one turn: sums."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace) -> float:
        return float(self.data.answer in (trace.last_reply or "").split())

    @vf.reward(weight=0.1)
    async def has_form(self, trace) -> float:
        return float("####" in (trace.last_reply or ""))

    @vf.metric
    async def num_letters(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        for first in range(1, 9):
            for second in range(1, 9):
                data = SumData(prompt=f"What is {first} + {second}? End with #### and the number.", answer=str(first + second))
                yield Sum(data, self.config.task)
