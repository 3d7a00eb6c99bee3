"""Turns of episodes from several replicas: all turns of a prompt from one of them, as long as it lives."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from infra.engines.checked import CheckedEngine
from infra.engines.interface import TurnRequest, Turns
from infra.engines.replicas import routing
from infra.failures import EngineUnavailable
from infra.records import AdapterVersion
from infra.store.samples import Sample

log = logging.getLogger(__name__)

SLACK = 1.25
"""A replica may have this multiple of the mean number of prompts. Prompts come one by one, so their final number is unknown."""


class RoutedTurns:
    """Turns; see infra/engines/interface.py. A context manager over those of each replica."""

    def __init__(self, replicas: Mapping[int, CheckedEngine], adapter: AdapterVersion) -> None:
        self.adapter, self._replicas = adapter, replicas
        self._contexts: dict[int, AbstractAsyncContextManager[Turns]] = {}
        self._turns: dict[int, Turns] = {}
        self._lost: dict[int, EngineUnavailable] = {}
        self._replica_of: dict[int, int] = {}
        """By prompt."""

    async def __aenter__(self) -> Self:
        for number, replica in self._replicas.items():
            context = replica.turns(self.adapter)
            try:
                self._turns[number] = await context.__aenter__()
                self._contexts[number] = context
            except EngineUnavailable as error:
                self._say_lost(number, error)
        if not self._turns:
            raise EngineUnavailable("no replica of the engine is running")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Check the replicas once more. One that does not answer is lost; its turns are there already."""
        failed: BaseException | None = None
        for number, context in self._contexts.items():
            given = self._lost.get(number) or error
            try:
                await context.__aexit__(type(given) if given else None, given, given.__traceback__ if given else None)
            except EngineUnavailable as lost:
                if number not in self._lost:
                    self._say_lost(number, lost)
            except BaseException as other:  # noqa: BLE001  # raised when all replicas are closed
                failed = other
        if failed is None and error is None and not self._living:
            failed = next(iter(self._lost.values()))
        if failed is not None and failed is not error:
            raise failed

    @property
    def _living(self) -> list[int]:
        return [number for number in self._turns if number not in self._lost]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(turns.num_prompt_tokens for turns in self._turns.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(turns.num_cached_tokens for turns in self._turns.values())

    async def sample(self, request: TurnRequest) -> Sample:
        while True:
            number = self._route(request.prompt_id)
            try:
                return await self._turns[number].sample(request)
            except EngineUnavailable as error:
                if self._living == [number]:
                    raise
                await self._lose(number, error)

    def _route(self, prompt_id: int) -> int:
        number = self._replica_of.get(prompt_id)
        if number is None or number in self._lost:
            counts = Counter(self._replica_of.values())
            loads = {replica: counts[replica] for replica in self._living}
            number = routing.choose(prompt_id, loads, SLACK * (sum(loads.values()) + 1) / len(loads))
            self._replica_of[prompt_id] = number
        return number

    async def _lose(self, number: int, error: EngineUnavailable) -> None:
        """End a replica that does not answer. So its other turns under way fail too, and come here."""
        if number not in self._lost:  # no await before it is marked: the last living replica is never marked, its error is raised
            self._say_lost(number, error)
            await asyncio.to_thread(self._replicas[number].stop)

    def _say_lost(self, number: int, error: EngineUnavailable) -> None:
        self._lost[number] = error
        log.warning("replica %d of the engine is lost, %d go on without it: %s", number, len(self._living), error)
