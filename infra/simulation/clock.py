"""Simulated time: events in the order of their times."""

import heapq
from collections.abc import Callable


class Event:
    """Something that will happen, unless it is cancelled."""

    def __init__(self, do: Callable[[], None]) -> None:
        self.do, self.is_cancelled = do, False

    def cancel(self) -> None:
        self.is_cancelled = True


class EventClock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.is_stopped = False
        self._events: list[tuple[float, int, Event]] = []
        self._num_made = 0

    def after(self, seconds: float, do: Callable[[], None]) -> Event:
        """Have something happen this many seconds from now. Equal times keep the order in which they were asked for."""
        event = Event(do)
        self._num_made += 1
        heapq.heappush(self._events, (self.now_s + seconds, self._num_made, event))
        return event

    def run(self) -> None:
        """Let all events happen until one of them stops the clock."""
        while self._events and not self.is_stopped:
            time_s, _, event = heapq.heappop(self._events)
            if not event.is_cancelled:
                self.now_s = time_s
                event.do()

    def stop(self) -> None:
        self.is_stopped = True
