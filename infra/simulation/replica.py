"""A simulated replica of the engine: requests that share its tokens per second.

Running requests share equally (processor sharing), each with at most the rate that it has alone. So all of them advance by the same number
of tokens, and one running count orders their ends.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from infra.simulation.clock import Event, EventClock
from infra.simulation.requests import SimulatedRequest
from infra.simulation.scenario import Scenario


class SimulatedReplica:
    def __init__(
        self,
        clock: EventClock,
        scenario: Scenario,
        begun: Callable[[SimulatedRequest], None],
        ended: Callable[["SimulatedReplica", SimulatedRequest], None],
    ) -> None:
        """begun, ended: Called when a turn of a request begins to run, and when it has ended."""
        self.waiting: deque[SimulatedRequest] = deque()
        self.busy_s = 0.0
        """Seconds in which a request ran."""
        self.is_up, self.is_paused = True, False
        self._clock, self._scenario, self._begun, self._ended = clock, scenario, begun, ended
        self._running: list[tuple[float, int, SimulatedRequest]] = []
        """Heap by the count of tokens at which a request ends."""
        self._count, self._counted_at, self._num_begun = 0.0, 0.0, 0
        """Tokens that a request which ran all the time would have; when that was; numbers that order equal ends."""
        self._next: Event | None = None

    @property
    def is_idle(self) -> bool:
        return not self._running and not self.waiting

    def add(self, requests: Sequence[SimulatedRequest]) -> None:
        self._advance()
        self.waiting += requests
        self._go_on()

    def set_paused(self, is_paused: bool) -> None:
        """Hold all requests where they are, or let them go on."""
        self._advance()
        self.is_paused = is_paused
        self._go_on()

    def take_back(self) -> list[SimulatedRequest]:
        """Give up all requests, running ones first."""
        self._advance()
        left = [request for _, _, request in sorted(self._running)] + list(self.waiting)
        self._running, self.waiting = [], deque()
        self._go_on()
        return left

    def give_half_of_what_waits(self) -> list[SimulatedRequest]:
        """Give up the second half of the waiting requests, as an idle replica takes them over."""
        return [self.waiting.pop() for _ in range((len(self.waiting) + 1) // 2)][::-1]

    def counted_busy_s(self) -> float:
        self._advance()
        return self.busy_s

    def _rate(self) -> float:
        return min(self._scenario.request_tokens_per_s, self._scenario.replica_tokens_per_s / len(self._running))

    def _advance(self) -> None:
        passed, self._counted_at = self._clock.now_s - self._counted_at, self._clock.now_s
        if self._running and not self.is_paused:
            self._count += passed * self._rate()
            self.busy_s += passed

    def _go_on(self) -> None:
        if self._next:
            self._next.cancel()
            self._next = None
        if self.is_paused or not self.is_up:
            return
        while self.waiting and len(self._running) < self._scenario.max_running_requests:
            self._begin(self.waiting.popleft())
        if self._running:
            left = max(0.0, self._running[0][0] - self._count)
            self._next = self._clock.after(left / self._rate(), self._end_first)

    def _begin(self, request: SimulatedRequest) -> None:
        self._begun(request)
        self._num_begun += 1
        tokens = request.turns[0] + self._scenario.request_s * self._scenario.request_tokens_per_s
        heapq.heappush(self._running, (self._count + tokens, self._num_begun, request))

    def _end_first(self) -> None:
        self._advance()
        self._count, _, request = heapq.heappop(self._running)
        self._go_on()
        self._ended(self, request)
