"""An engine made of several: replicas that serve the same adapter, each a server with checks, state and log of its own.

Wake, load and release are done by all replicas or fail. A rollout needs one living replica: see shared_rollout.py. A lost replica is
started again in the background, or by the next wake.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from infra.concurrency.background import run_concurrently
from infra.engines.checked import CheckedEngine
from infra.engines.interface import NO_SINK, Release, RolloutMeasures, RolloutRequest, SampleSink, Turns
from infra.engines.replicas.routed_turns import RoutedTurns
from infra.engines.replicas.shared_rollout import SharedRollout
from infra.engines.rollout_collector import RolloutCollector
from infra.failures import EngineUnavailable, WrongAnswer
from infra.machine import devices
from infra.records import AdapterVersion, EngineRan
from infra.store.samples import Sample

log = logging.getLogger(__name__)
T = TypeVar("T")


class ReplicaSet:
    """An Engine; see infra/engines/interface.py."""

    def __init__(self, replicas: Sequence[CheckedEngine]) -> None:
        """replicas: Two or more of one identity, in the order of their numbers."""
        self.replicas = dict(enumerate(replicas))
        self.first = replicas[0]
        shares_gpus = devices.replicas_per_gpu(self.first.program.config) > 1
        self.num_at_a_time = 1 if shares_gpus else len(replicas)
        """Replicas that may be launched, woken or released together. On a shared GPU each measures what the others have left."""

    @property
    def identity(self) -> str:
        return self.first.identity

    @property
    def flags(self) -> tuple[str, ...]:
        return self.first.flags

    def ran(self) -> EngineRan:
        first, *others = self._by_each(CheckedEngine.ran)
        for number, other in enumerate(others, start=1):
            if other != first:
                raise EngineUnavailable(f"replica {number} of the engine runs {other}, the first runs {first}")
        return first

    def wake(self) -> None:
        self._by_each(CheckedEngine.wake)

    def start_figures(self) -> dict[str, float]:
        found = self._by_each(CheckedEngine.start_figures)
        return {name: max(each.get(name, 0.0) for each in found) for name in set().union(*found)}

    def load_adapter(self, adapter: AdapterVersion) -> None:
        self._by_each(lambda replica: replica.load_adapter(adapter))

    def release_memory(self) -> Release:
        released = self._by_each(CheckedEngine.release_memory)
        return released[0].model_copy(update={"released_bytes": sum(each.released_bytes for each in released)})

    def generate(self, request: RolloutRequest, sink: SampleSink = NO_SINK) -> tuple[list[Sample], RolloutMeasures]:
        living, gone = self._serving(request.adapter)
        rollout = RolloutCollector(request, sink, self.first.program.vocab_size)
        shared = SharedRollout(living, request, rollout)
        samples, how = rollout.completed(shared.sample, shared.check_again, self._ended_where_wrong())
        lost = {"num_lost_replicas": gone + shared.num_lost, "num_moved_samples": shared.num_moved}
        return samples, how.model_copy(update=lost | {"num_reissued_samples": shared.num_reissued})

    @asynccontextmanager
    async def turns(self, adapter: AdapterVersion) -> AsyncIterator[Turns]:
        living, num_gone = self._serving(adapter)
        with self._ended_where_wrong():
            async with RoutedTurns(living, adapter, num_gone) as turns:
                yield turns

    @property
    def kv_cache_tokens(self) -> int:
        return sum(replica.kv_cache_tokens for replica in self.replicas.values())

    def memory_in_use_gib(self) -> float:
        return self.first.memory_in_use_gib()  # of the machine's GPUs, or of all servers

    def stop(self) -> None:
        for replica in self.replicas.values():
            replica.stop()

    def _serving(self, adapter: AdapterVersion) -> tuple[dict[int, CheckedEngine], int]:
        """Return the replicas that serve the adapter, and the number of those that are gone.

        Raises:
            WrongAnswer: if one serves another adapter. EngineUnavailable: if all are gone.
        """
        living, errors = dict(self.replicas), list[EngineUnavailable]()
        for number, replica in self.replicas.items():
            try:
                replica.check_served(adapter)
            except EngineUnavailable as error:
                log.warning("replica %d of the engine is gone: %s", number, error)
                errors.append(error)
                replica.stop()  # child processes of a dead engine may still run
                del living[number]
        if not living:
            raise errors[-1]
        return living, len(errors)

    def _by_each(self, do: Callable[[CheckedEngine], T]) -> list[T]:
        """Have each replica do something, side by side. Raises the error of one of them, a wrong answer first; the others finish before."""
        with run_concurrently(self.num_at_a_time) as submit:
            calls = [submit(do, replica) for replica in self.replicas.values()]
            try:
                wait(calls)
            except BaseException:
                self.stop()  # ends the programs that the calls wait for
                raise
        errors = [error for call in calls if (error := call.exception()) is not None]
        for error in sorted(errors, key=lambda error: not isinstance(error, WrongAnswer)):
            raise error
        return [call.result() for call in calls]

    @contextmanager
    def _ended_where_wrong(self) -> Iterator[None]:
        """End all replicas after a wrong answer: nothing of the rollout is used, whichever gave it."""
        try:
            yield
        except WrongAnswer:
            self.stop()
            raise
