"""Turns of episodes from several replicas: all turns of a prompt from one of them, as long as it lives.

A replica that does not answer is ended. Its turns under way go to the others at once, and it is started again in the background, once a rollout,
with its checks and the adapter. A turn that takes far longer than those of the other replicas is made by an idle one; the first one's
answer is not taken any more.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Self

from infra.engines.checked import CheckedEngine
from infra.engines.interface import TurnRequest, Turns
from infra.engines.replicas import routing
from infra.engines.replicas.assignment import SLOW_FACTOR, SLOW_MIN_S, SLOW_MIN_SAMPLES, SLOW_QUANTILE
from infra.failures import EngineUnavailable, WrongAnswer
from infra.records import AdapterVersion
from infra.store.samples import Sample

log = logging.getLogger(__name__)

SLACK = 1.25
"""A replica may have this multiple of the mean number of prompts. Prompts come one by one, so their final number is unknown."""
LOOK_S = 0.25
"""Seconds between two looks whether a turn is late."""


class RoutedTurns:
    """Turns; see infra/engines/interface.py. A context manager over those of each replica."""

    def __init__(self, replicas: Mapping[int, CheckedEngine], adapter: AdapterVersion, num_gone: int = 0) -> None:
        """num_gone: Replicas that were lost before."""
        self.adapter, self._replicas = adapter, replicas
        self._contexts: dict[int, AbstractAsyncContextManager[Turns]] = {}
        self._turns: dict[int, Turns] = {}
        self._earlier: list[Turns] = []
        """Those of replicas before they were started again."""
        self._lost: dict[int, EngineUnavailable] = {}
        self._replica_of: dict[int, int] = {}
        """By prompt."""
        self._moved: dict[int, set[int]] = defaultdict(set)
        """By lost replica: its prompts, which others have now."""
        self._restarts: dict[int, asyncio.Task[None]] = {}
        """By replica. Each is started again once."""
        self._num_under_way: Counter[int] = Counter()
        self._seconds: dict[int, list[float]] = defaultdict(list)
        """By replica: of its finished turns."""
        self._silent: set[int] = set()
        """Replicas from which a late turn was taken, and that have answered none since."""
        self._is_over = False
        self.counts = {"num_lost_replicas": num_gone, "num_moved_samples": 0, "num_reissued_samples": 0}
        """For the figures of a step. Moved: turns under way at a replica that was lost; reissued: turns of a slow one."""

    async def __aenter__(self) -> Self:
        for number in self._replicas:
            try:
                await self._open(number)
            except EngineUnavailable as error:
                self._note_lost(number, error)
        if not self._turns:
            raise EngineUnavailable("no replica of the engine is running")
        return self

    async def _open(self, number: int) -> None:
        context = self._replicas[number].turns(self.adapter)
        turns = await context.__aenter__()
        if number in self._turns:
            self._earlier.append(self._turns[number])
        self._contexts[number], self._turns[number] = context, turns

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Check the replicas once more. One that does not answer is lost; its turns are there already."""
        for number in (self._silent & set(self._living)) if error is None else ():
            if self._living != [number]:
                await self._lose(number, EngineUnavailable(f"replica {number} of the engine does not give up its turns"))
        self._is_over = True
        failed = await self._restarts_ended(is_failed=error is not None)
        for number, context in self._contexts.items():
            given = self._lost.get(number) or error
            try:
                await context.__aexit__(type(given) if given else None, given, given.__traceback__ if given else None)
            except EngineUnavailable as lost:
                if number not in self._lost:
                    self._note_lost(number, lost)
            except BaseException as other:  # noqa: BLE001  # raised when all replicas are closed
                failed = other
        if failed is None and error is None and not self._living:
            failed = next(iter(self._lost.values()))
        if failed is not None and failed is not error:
            raise failed

    async def _restarts_ended(self, *, is_failed: bool) -> BaseException | None:
        """Wait for starts under way: the next wake would begin them again. After a failure, end them. Returns an error of another kind."""
        if is_failed:
            for number, restart in self._restarts.items():
                if not restart.done():
                    await asyncio.to_thread(self._replicas[number].stop)  # ends the program that its start waits for
        ended = await asyncio.gather(*self._restarts.values(), return_exceptions=True)
        return next((each for each in ended if each is not None), None)

    @property
    def _living(self) -> list[int]:
        return [number for number in self._turns if number not in self._lost]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(turns.num_prompt_tokens for turns in (*self._turns.values(), *self._earlier))

    @property
    def num_cached_tokens(self) -> int:
        return sum(turns.num_cached_tokens for turns in (*self._turns.values(), *self._earlier))

    async def sample(self, request: TurnRequest) -> Sample:
        number, is_reissued = self._route(request.prompt_id), False
        while True:
            turns = self._turns[number]
            try:
                found = await self._unless_late(number, request, may_move=not is_reissued)
            except EngineUnavailable as error:
                if turns is self._turns[number]:  # else it was started again meanwhile
                    if self._living == [number]:
                        raise
                    await self._lose(number, error)
                self.counts["num_moved_samples"] += 1
                number = self._route(request.prompt_id)
                continue
            if isinstance(found, Sample):
                return found
            self._silent.add(number)
            number, is_reissued = found, True

    async def _unless_late(self, number: int, request: TurnRequest, *, may_move: bool) -> Sample | int:
        """Return the turn; or the idle replica that makes it since it is late here, where it was given up."""
        begun = time.monotonic()
        turn = asyncio.create_task(self._sampled(number, request))
        try:
            while not (await asyncio.wait([turn], timeout=LOOK_S))[0]:
                idle = self._idle_for(number, time.monotonic() - begun) if may_move else None
                if idle is not None:
                    self.counts["num_reissued_samples"] += 1
                    log.warning("a turn of slow replica %d is sent to replica %d of the engine", number, idle)
                    return idle
            return turn.result()
        finally:
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)

    async def _sampled(self, number: int, request: TurnRequest) -> Sample:
        begun = time.monotonic()
        self._num_under_way[number] += 1
        try:
            sample = await self._turns[number].sample(request)
        finally:
            self._num_under_way[number] -= 1
        self._seconds[number].append(time.monotonic() - begun)
        self._silent.discard(number)
        return sample

    def _idle_for(self, number: int, seconds: float) -> int | None:
        """The idle replica for a turn that has taken these seconds. None: it is not late, by the rule of infra/engines/replicas/assignment.py, or
        none is idle."""
        others = sorted(second for replica, found in self._seconds.items() if replica != number for second in found)
        if seconds < SLOW_MIN_S or len(others) < SLOW_MIN_SAMPLES:
            return None
        if seconds < SLOW_FACTOR * others[int(SLOW_QUANTILE * (len(others) - 1))]:
            return None
        return next((other for other in self._living if other != number and not self._num_under_way[other]), None)

    def _route(self, prompt_id: int) -> int:
        number = self._replica_of.get(prompt_id)
        if number is None or number in self._lost:
            if number is not None:
                self._moved[number].add(prompt_id)
            counts = Counter(self._replica_of.values())
            loads = {replica: counts[replica] for replica in self._living}
            number = routing.choose(prompt_id, loads, SLACK * (sum(loads.values()) + 1) / len(loads))
            self._replica_of[prompt_id] = number
        return number

    async def _lose(self, number: int, error: EngineUnavailable) -> None:
        """End a replica that does not answer. So its other turns under way fail too, and come here."""
        if number not in self._lost:  # no await before it is marked: the last living replica is never marked, its error is raised
            self._note_lost(number, error)
            await asyncio.to_thread(self._replicas[number].stop)
            if number not in self._restarts and not self._is_over:  # turns that a failed rollout left behind may still fail
                self._restarts[number] = asyncio.create_task(self._start_again(number, error))

    async def _start_again(self, number: int, error: EngineUnavailable) -> None:
        while self._num_under_way[number]:  # its server is gone: each of them fails now
            await asyncio.sleep(0.05)
        with suppress(EngineUnavailable):  # the error that ended it, as it was given
            await self._contexts.pop(number).__aexit__(type(error), error, error.__traceback__)
        try:
            await asyncio.to_thread(self._served, number)
            await self._open(number)
        except (EngineUnavailable, WrongAnswer) as failed:  # the next wake meets it again, and says so
            log.warning("replica %d of the engine could not be started again in this rollout: %s", number, failed)
            return
        del self._lost[number]
        for prompt_id in self._moved.pop(number, ()):  # their next turns are routed as if it had not been lost
            del self._replica_of[prompt_id]
        log.info("replica %d of the engine serves again", number)

    def _served(self, number: int) -> None:
        self._replicas[number].wake()
        self._replicas[number].load_adapter(self.adapter)

    def _note_lost(self, number: int, error: EngineUnavailable) -> None:
        self._lost[number] = error
        self.counts["num_lost_replicas"] += 1
        log.warning("replica %d of the engine is lost, %d go on without it: %s", number, len(self._living), error)


def replica_counts(turns: Turns) -> dict[str, int]:
    """Return the figures of replicas; none of a single engine."""
    return turns.counts if isinstance(turns, RoutedTurns) else {}
