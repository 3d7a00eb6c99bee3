"""Trajectories of several turns for tests, and an engine that dies between them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from infra.engines.interface import TurnRequest, Turns
from infra.engines.scripted import ScriptedEngine
from infra.failures import EngineUnavailable
from infra.records import AdapterVersion
from infra.store.samples import Sample, sample_of
from infra.trajectories.segments import Segment, StopReason, Trajectory
from infra.trajectories.spans import SegmentSpan

DIGESTS = {3: "a" * 64, 4: "b" * 64}
Turn = tuple[list[int], list[int], list[float]]
"""Given tokens, sampled tokens, log-probabilities."""


def trajectory(*turns: Turn, episode: str = "5/0", branch: int = 0, version: int = 3, stop: StopReason = "done") -> Trajectory:
    segments: list[Segment] = []
    for turn, (given, said, logprobs) in enumerate(turns):
        segments.append(Segment("given", tuple(given), turn))
        segments.append(Segment("sampled", tuple(said), turn, tuple(logprobs), version, DIGESTS[version], 17 + turn, "stop"))
    return Trajectory(episode, tuple(segments), branch, stop)


def sampled(*turns: Turn, index: int = 0, branch: int = 0, stop: StopReason = "done") -> Sample:
    """A sample of task 5."""
    return sample_of(trajectory(*turns, episode=f"5/{index}", branch=branch, stop=stop), 5, index, "text")


TWO_TURNS: tuple[Turn, ...] = (([1, 2, 3], [4, 5], [-0.5, -0.125]), ([6], [7, 8, 9], [-0.25, -0.375, -0.4375]))
ONE_TURN: tuple[Turn, ...] = (([1, 2, 3], [5], [-0.75]),)
THREE_TURNS: tuple[Turn, ...] = (
    ([1, 2, 3], [4, 4], [-0.625, -0.875]),
    ([6, 6], [7], [-0.9375]),
    ([2], [8, 8], [-1.0, -1.125]),
)


def turns_apart(whole: Sample, turns: Sequence[Turn]) -> list[Sample]:
    """The same episode with each turn a trajectory of its own, whose context is not what the turns before had."""
    found = []
    for number, (given, said, logprobs) in enumerate(turns):
        context = [*given, *[9] * number]
        spans = (
            SegmentSpan("given", len(context), number),
            SegmentSpan("sampled", len(said), number, 3, DIGESTS[3], 17 + number, "stop"),
        )
        alone = replace(whole, branch=number, segments=spans, prompt_tokens=context, output_tokens=said, output_logprobs=logprobs)
        found.append(replace(alone, turn_rewards=whole.turn_rewards and whole.turn_rewards[number : number + 1]))
    return found


KILLED = EngineUnavailable("the engine was killed")


def engine_dies_at(number: int, monkeypatch: pytest.MonkeyPatch, error: Exception = KILLED) -> list[list[int]]:
    """The engine dies at this turn, or fails with another error. Returns the prompts of all turns that it is asked for, as they come."""
    asked: list[list[int]] = []
    scripted = ScriptedEngine.turns

    class Counted:
        def __init__(self, turns: Turns) -> None:
            self.turns, self.adapter = turns, turns.adapter
            self.num_prompt_tokens = self.num_cached_tokens = 0

        async def sample(self, request: TurnRequest) -> Sample:
            if len(asked) == number:
                raise error
            asked.append(list(request.tokens))
            return await self.turns.sample(request)

    @asynccontextmanager
    async def turns(self: ScriptedEngine, adapter: AdapterVersion) -> AsyncIterator[Counted]:
        async with scripted(self, adapter) as found:
            yield Counted(found)

    monkeypatch.setattr(ScriptedEngine, "turns", turns)
    return asked
