"""The second model that judges, as an engine: checked as the run's own, and asleep but for the time in which it judges."""

from typing import Protocol

from infra.engines.checked import CheckedEngine
from infra.engines.interface import EngineProgram
from infra.records import AdapterVersion


class JudgeProgram(EngineProgram, Protocol):
    """What a judge's server provides."""

    def is_asleep(self) -> bool:
        """Whether it lives, answers and has released its memory.

        Raises:
            WrongAnswer: if it has answered requests in its sleep, where that is known.
        """


class JudgeEngine(CheckedEngine):
    """An Engine for version 0 of the judge's model."""

    def __init__(self, program: JudgeProgram, version: AdapterVersion) -> None:
        super().__init__(program)
        self.judge, self.version = program, version

    def is_asleep(self) -> bool:
        """Whether its server lives, answers and has released its memory.

        Raises:
            WrongAnswer: if it has answered requests in its sleep. It is ended.
        """
        with self._ended_where_it_fails("sleep of the judge"):
            return self.judge.is_asleep()

    @property
    def is_launched_to_judge(self) -> bool:
        """Whether its server lives only while it judges."""
        return self.program.config.colocation == "restart"

    def start_asleep(self) -> None:
        """Launch its server unless it lives, check it, and have it release its memory. One that is awake was left so by a process that died."""
        if not self.is_launched_to_judge:
            self.wake()
            self.load_adapter(self.version)
        self.release_memory()
