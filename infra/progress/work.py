"""Progress of a long piece of work. The worker keeps a count; the watcher polls the count in its own thread.

engine, trainer, download --count--> Work <--looks every now and then-- bar in the terminal, log line, Prefect artifact

So a sample costs one addition, however many watchers there are, and no watcher can slow or fail the work.
"""

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

JOIN_S = 2.0
"""Seconds to wait for a watcher that is busy when the work ends."""


@dataclass
class Work:
    """A piece of work. The worker changes its counts in place."""

    what: str
    total: float | None = None
    """Total amount of work; None: unknown."""
    unit: str = ""
    done: float = 0.0
    num_tokens: int = 0
    """Generated tokens; 0 if tokens are not counted."""
    note: str = ""
    """The current activity."""
    has_bar: bool = False
    """The library that does the work draws its own bar in a terminal."""
    began: float = field(default_factory=time.monotonic)

    def restart(self, what: str, total: float | None, unit: str, done: float = 0.0) -> None:
        """Start another part of the work."""
        self.what, self.total, self.unit, self.done, self.note, self.began = what, total, unit, done, "", time.monotonic()

    @property
    def fraction(self) -> float | None:
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.elapsed_s, 1e-9)

    @property
    def left_s(self) -> float | None:
        """Remaining seconds at the pace so far."""
        fraction = self.fraction
        return self.elapsed_s * (1 - fraction) / fraction if fraction else None

    def __str__(self) -> str:
        parts = [f"{self.done:g} of {self.total:g} {self.unit}".strip() if self.total else f"{self.elapsed_s:.0f} s"]
        parts += [f"{self.tokens_per_s:.0f} tokens/s"] if self.num_tokens else []
        parts += [f"{self.left_s:.0f} s left"] if self.left_s else []
        parts += [self.note] if self.note else []
        return f"{self.what}: {', '.join(parts)}"


Watcher = Callable[[Work], AbstractContextManager[None]]
"""Entered when a piece of work starts, left when it ends, however it ends. It must not raise."""

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())


@contextmanager
def watched_by(*watchers: Watcher) -> Iterator[None]:
    """Watch all work that starts in the block. Has no effect inside a block that is already watched."""
    token = _watchers.set(_watchers.get() or watchers)
    try:
        yield
    finally:
        _watchers.reset(token)


@contextmanager
def unwatched() -> Iterator[None]:
    """Show no progress of work that starts in the block."""
    token = _watchers.set(())
    try:
        yield
    finally:
        _watchers.reset(token)


@contextmanager
def work(what: str, total: float | None = None, unit: str = "", *, has_bar: bool = False) -> Iterator[Work]:
    """A piece of work from start to end."""
    begun = Work(what, total, unit, has_bar=has_bar)
    with shown(begun):
        yield begun


@contextmanager
def shown(work: Work) -> Iterator[None]:
    """Show work to the watchers of this context. It may have started elsewhere."""
    with ExitStack() as stack:
        for watcher in _watchers.get():
            stack.enter_context(watcher(work))
        yield


@contextmanager
def looked_at(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `look` at once, every every_s seconds until the block ends, and once more then; in a thread, in the caller's context."""
    over = threading.Event()

    def keep_looking() -> None:
        look()
        while not over.wait(every_s):
            look()
        look()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(keep_looking,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(JOIN_S)
