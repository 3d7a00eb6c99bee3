"""One rollout by several replicas: each samples its share in a thread of its own, and takes over what others cannot do.

A replica that does not answer is ended, as a single engine would be. Its unfinished samples go to the others at once, and it is started
again in the background, with its checks and the adapter. The rollout fails only when no replica is left. Requests of a slow replica are sent
to one that is idle.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from statistics import fmean
from typing import Any

from infra.concurrency.background import Submit, run_concurrently
from infra.concurrency.deadline import Deadline
from infra.engines.checked import CheckedEngine
from infra.engines.interface import RolloutMeasures, RolloutRequest, SampleRequest
from infra.engines.replicas.assignment import Assignment
from infra.engines.replicas.share import Key
from infra.engines.rollout_collector import RolloutCollector
from infra.failures import EngineUnavailable, WrongAnswer
from infra.store.samples import Sample

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between two looks for requests that are late."""
END_S = 10.0
"""Seconds in which a replica gives up what it samples when the rollout needs nothing more; with partial rollouts it returns the prefixes."""


class ReplicaShare:
    """See Share in infra/engines/replicas/share.py."""

    def __init__(self, replica: int, assignment: Assignment, is_first: bool, deadline: Deadline) -> None:
        self.replica, self.assignment, self.is_first, self.deadline = replica, assignment, is_first, deadline

    def begins(self, key: Key) -> bool:
        return not self.deadline.is_over and self.assignment.begins(self.replica, key)

    def is_over(self) -> bool:
        return self.deadline.is_over or self.assignment.is_over()

    def take(self, sample: Sample) -> bool:
        return self.assignment.take(self.replica, sample)


class SharedRollout:
    """A rollout while its replicas sample it."""

    def __init__(self, replicas: Mapping[int, CheckedEngine], request: RolloutRequest, rollout: RolloutCollector) -> None:
        """replicas: Those that serve the adapter, by their numbers."""
        self.replicas, self.request, self.rollout = replicas, request, rollout
        self.assignment = Assignment(rollout.missing, rollout.take)
        self.lost: dict[int, EngineUnavailable] = {}
        self.num_moved = 0
        """Samples that lost replicas had not finished."""
        self._measures: list[RolloutMeasures] = []
        self.num_reissued = 0
        """Samples that a slow replica had not finished, and an idle one made."""
        self.num_lost = 0
        self._restarts: dict[Future[None], int] = {}
        """By restart under way: its replica. Each replica is started again once."""
        self._restarted: set[int] = set()
        self._over_at = 0.0
        self._hanging: set[int] = set()
        self._calls: dict[Future[RolloutMeasures], int] = {}
        """By call under way: its replica."""

    @property
    def living(self) -> list[int]:
        return [replica for replica in self.replicas if replica not in self.lost]

    def sample(self) -> RolloutMeasures:
        """Sample what is missing. Raises the error of the last replica if all are lost, and any error that is not about a lost replica."""
        with run_concurrently(len(self.replicas) ** 2 + len(self.replicas)) as submit:
            try:
                self._begin(submit, self.assignment.shares(self.living), is_first=True)
                while self._calls:
                    under_way: list[Future[Any]] = [*self._calls, *self._restarts]
                    wait(under_way, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                    for restart in [each for each in self._restarts if each.done()]:
                        self._serve_again(submit, restart)
                    for call in [each for each in self._calls if each.done()]:
                        self._end(submit, call)
                    self._reissue(submit)
                    self._end_what_hangs()
                # A start that is left to the next wake would begin again there: what is left of this one is shorter.
                wait(self._restarts)
                for restart in list(self._restarts):
                    self._serve_again(submit, restart)
            except BaseException:
                self.assignment.end()
                for replica in self._restarts.values():
                    self.replicas[replica].stop()  # ends the program that its start waits for
                raise
        return summed(self._measures)

    def check_again(self) -> None:
        """Check each living replica once more. One that does not answer is lost; its samples are there already."""
        with run_concurrently(len(self.living)) as submit:
            calls = {replica: submit(self.replicas[replica].check_again, self.request.adapter) for replica in self.living}
        for replica, call in calls.items():
            if isinstance(error := call.exception(), EngineUnavailable):
                self._lose(replica, error)
            else:
                call.result()

    def _begin(self, submit: Submit, shares: Mapping[int, Sequence[SampleRequest]], *, is_first: bool) -> None:
        for replica, missing in shares.items():
            call = submit(self._sample_share, replica, missing, is_first)
            self._calls[call] = replica

    def _sample_share(self, replica: int, missing: Sequence[SampleRequest], is_first: bool) -> RolloutMeasures:
        share, keeps = (
            ReplicaShare(replica, self.assignment, is_first, self.request.deadline),
            self.rollout.sink.partial is not None,
        )
        return self.replicas[replica].sample_share(missing, self.request, share.take, share, keeps_prefixes=keeps)

    def _end(self, submit: Submit, call: Future[RolloutMeasures]) -> None:
        replica, error = self._calls.pop(call), call.exception()
        if isinstance(error, EngineUnavailable):
            if replica not in self.lost:  # another of its calls failed before
                self._lose(replica, error)
                moved = self.assignment.lost(replica, self.living)
                self.num_moved += sum(map(len, moved.values()))
                self._begin(submit, moved, is_first=False)
                self._restart(submit, replica)
            return
        self._measures.append(call.result())
        if replica not in self.lost and (more := self.assignment.overflow(replica)):
            self._begin(submit, {replica: more}, is_first=False)

    def _restart(self, submit: Submit, replica: int) -> None:
        if replica not in self._restarted:
            self._restarted.add(replica)
            self._restarts[submit(self._start_again, replica)] = replica

    def _start_again(self, replica: int) -> None:
        self.replicas[replica].wake()
        self.replicas[replica].load_adapter(self.request.adapter)

    def _serve_again(self, submit: Submit, call: "Future[None]") -> None:
        """A replica was started again: it takes what waits at others. One that was not stays lost, until the next wake."""
        replica, error = self._restarts.pop(call), call.exception()
        if isinstance(error, EngineUnavailable | WrongAnswer):  # the next wake meets it again, and says so
            log.warning("replica %d of the engine could not be started again in this rollout: %s", replica, error)
            return
        call.result()
        del self.lost[replica]
        log.info("replica %d of the engine serves again", replica)
        if more := self.assignment.overflow(replica):
            self._begin(submit, {replica: more}, is_first=False)

    def _reissue(self, submit: Submit) -> None:
        busy = set(self._calls.values())
        for replica in self.living:
            if replica not in busy and (late := self.assignment.reissue(replica)):
                self.num_reissued += len(late)
                log.warning("%d samples of a slow replica are sent to replica %d of the engine", len(late), replica)
                self._begin(submit, {replica: late}, is_first=False)

    def _end_what_hangs(self) -> None:
        """End the replicas that do not give up their requests though the rollout needs nothing more."""
        if not self.assignment.is_over():
            return
        self._over_at = self._over_at or time.monotonic()
        if self._over_at + END_S < time.monotonic():
            for replica in set(self._calls.values()) - self._hanging:
                self._hanging.add(replica)
                log.warning("replica %d of the engine does not give up its requests: it is ended", replica)
                self.replicas[replica].stop()

    def _lose(self, replica: int, error: EngineUnavailable) -> None:
        self.lost[replica] = error
        self.num_lost += 1
        if not self.living:
            raise error
        log.warning("replica %d of the engine is lost, %d go on without it: %s", replica, len(self.living), error)


def summed(parts: Iterable[RolloutMeasures]) -> RolloutMeasures:
    """Measures of a rollout from those of its shares: first and last times, means over shares of the rest."""
    found = [part for part in parts if part.last_token_at]
    if not found:
        return RolloutMeasures()
    return RolloutMeasures(
        ttft_s=fmean(part.ttft_s for part in found),
        first_token_at=min(part.first_token_at for part in found),
        last_token_at=max(part.last_token_at for part in found),
        prefix_cache_hit_frac=fmean(part.prefix_cache_hit_frac for part in found),
    )
