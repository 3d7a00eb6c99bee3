"""A taskset of verifiers with a tool."""

from collections.abc import Iterator

import verifiers.v1 as vf

from ratchet_calculator.tools import Calculator

__all__ = ["Products"]


class ProductData(vf.TaskData):
    answer: str


class Product(vf.Task[ProductData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def is_right(self, trace) -> float:
        return float((trace.last_reply or "").strip().endswith(self.data.answer))


class Products(vf.Taskset[Product, vf.TasksetConfig]):
    def load(self) -> Iterator[Product]:
        for first in range(12, 20):
            data = ProductData(prompt=f"What is {first} * 7?", system_prompt="Use the tool.", answer=str(first * 7))
            yield Product(data, self.config.task)
