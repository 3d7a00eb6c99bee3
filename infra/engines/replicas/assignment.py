"""Which replica makes which sample of a rollout. Threads of several clients ask here, so each method holds a lock.

A sample has one owner at a time. Only its owner sends its request, and only its owner's answer is taken, so no sample is counted twice.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from infra.engines.interface import SampleRequest
from infra.engines.replicas import routing
from infra.engines.replicas.share import Key
from infra.store.samples import Sample

SLOW_QUANTILE, SLOW_FACTOR = 0.95, 3.0
SLOW_MIN_SAMPLES = 8
"""Finished samples of other replicas without which no request is late."""
SLOW_MIN_S = 5.0
"""No request is late before."""


class Assignment:
    """The samples of a rollout and their owners."""

    def __init__(self, missing: Sequence[SampleRequest], take: Callable[[Sample], bool]) -> None:
        """take: Takes each sample once. Returns whether more are needed."""
        self._lock = threading.Lock()
        self._take = take
        self._owner: dict[Key, int] = {}
        self._left = {wanted.key: wanted for wanted in missing}
        """Unfinished samples."""
        self._begun: set[Key] = set()
        """Samples whose requests were sent by their present owners."""
        self._begun_at: dict[Key, float] = {}
        """Of unfinished samples: when their present owners have sent the requests."""
        self._seconds: dict[int, list[float]] = defaultdict(list)
        """By replica: seconds of its finished samples, each from its request on."""
        self._reissued: set[Key] = set()
        self._is_over = False

    def shares(self, replicas: Sequence[int]) -> dict[int, list[SampleRequest]]:
        """Give all samples to these replicas, each prompt to one of them."""
        with self._lock:
            return self._given(self._left.values(), replicas)

    def lost(self, replica: int, others: Sequence[int]) -> dict[int, list[SampleRequest]]:
        """Give the unfinished samples of a lost replica to the others."""
        with self._lock:
            left = [wanted for key, wanted in self._left.items() if self._owner[key] == replica]
            self._begun -= {wanted.key for wanted in left}
            return self._given(left, others)

    def reissue(self, idle: int) -> list[SampleRequest]:
        """Give an idle replica the requests of another one that take far longer than the others' did. Empty: there are none.

        A request is late after SLOW_FACTOR times the SLOW_QUANTILE of the seconds of samples that other replicas have finished. It moves once, and
        its first owner's answer is not taken any more. A seed belongs to its sample, so the choice of the replica does not change the sample.
        """
        now = time.monotonic()
        with self._lock:
            moved = [] if self._is_over else [key for key in self._left if self._is_late(key, idle, now)]
            self._owner |= dict.fromkeys(moved, idle)
            self._begun -= set(moved)
            self._reissued |= set(moved)
            return [self._left[key] for key in moved]

    def _is_late(self, key: Key, idle: int, now: float) -> bool:
        owner = self._owner[key]
        if owner == idle or key not in self._begun or key in self._reissued:
            return False
        others = sorted(second for replica, found in self._seconds.items() if replica != owner for second in found)
        if len(others) < SLOW_MIN_SAMPLES:
            return False
        deadline = SLOW_FACTOR * others[int(SLOW_QUANTILE * (len(others) - 1))]
        return now - self._begun_at[key] > max(deadline, SLOW_MIN_S)

    def overflow(self, replica: int) -> list[SampleRequest]:
        """Give an idle replica half of the samples that wait at the one where most of them wait. Empty: none waits."""
        with self._lock:
            waiting = [key for key in self._left if key not in self._begun and self._owner[key] != replica]
            if not waiting or self._is_over:
                return []
            ((busiest, _),) = Counter(self._owner[key] for key in waiting).most_common(1)
            theirs = [key for key in waiting if self._owner[key] == busiest]
            moved = theirs[len(theirs) // 2 :]  # the last ones, which would be sent last
            self._owner |= dict.fromkeys(moved, replica)
            return [self._left[key] for key in moved]

    def begins(self, replica: int, key: Key) -> bool:
        """Whether this replica still has to make the sample. From then on it cannot overflow to another."""
        with self._lock:
            is_wanted = not self._is_over and key in self._left and self._owner[key] == replica
            if is_wanted:
                self._begun.add(key)
                self._begun_at[key] = time.monotonic()
            return is_wanted

    def take(self, replica: int, sample: Sample) -> bool:
        """Take a sample of a replica. Returns whether more are needed. Raises as the rollout's own `take` does."""
        key = (sample.prompt_id, sample.sample_index)
        with self._lock:
            if self._owner.get(key, replica) != replica:  # the replica was lost, and its answer came too late
                return not self._is_over
            is_more_needed = self._take(sample)
            self._left.pop(key, None)
            if (begun_at := self._begun_at.pop(key, None)) is not None:
                self._seconds[replica].append(time.monotonic() - begun_at)
            self._is_over = self._is_over or not is_more_needed
            return is_more_needed

    def end(self) -> None:
        """No more samples are needed, because the rollout failed."""
        self._is_over = True

    def is_over(self) -> bool:
        return self._is_over

    def _given(self, samples: Iterable[SampleRequest], replicas: Sequence[int]) -> dict[int, list[SampleRequest]]:
        by_prompt: dict[int, list[SampleRequest]] = {}
        for wanted in samples:
            by_prompt.setdefault(wanted.prompt.prompt_id, []).append(wanted)
        shares: dict[int, list[SampleRequest]] = {replica: [] for replica in replicas}
        room = sum(map(len, by_prompt.values())) / len(replicas)
        for prompt_id, group in by_prompt.items():
            replica = routing.choose(prompt_id, {replica: len(share) for replica, share in shares.items()}, room)
            shares[replica] += group
            self._owner |= {wanted.key: replica for wanted in group}
        return {replica: share for replica, share in shares.items() if share}
