"""How far a long piece of work is. The worker keeps a count; the watcher polls the count in a thread of its own.

engine, trainer, download --count--> Work <--looks every now and then-- bar in the terminal, log line, Prefect artifact

So a sample costs an addition, however many watch, and nothing that a watcher does can slow or fail the work.
"""

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

JOIN_S = 2.0
"""A watcher that is busy when the work ends is left behind after so long."""


@dataclass
class Work:
    """Its counts are changed in place by the one who does it."""

    what: str
    total: float | None = None
    """None: not known."""
    unit: str = ""
    done: float = 0.0
    num_tokens: int = 0
    """That were generated; 0 where tokens do not count."""
    note: str = ""
    """What it is at just now."""
    has_bar: bool = False
    """The library that does it draws a bar of its own where there is a terminal."""
    began: float = field(default_factory=time.monotonic)

    def restart(self, what: str, total: float | None, unit: str, done: float = 0.0) -> None:
        """Another part of it begins."""
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
        """At the pace so far."""
        fraction = self.fraction
        return self.elapsed_s * (1 - fraction) / fraction if fraction else None

    def __str__(self) -> str:
        parts = [f"{self.done:g} of {self.total:g} {self.unit}".strip() if self.total else f"{self.elapsed_s:.0f} s"]
        parts += [f"{self.tokens_per_s:.0f} tokens/s"] if self.num_tokens else []
        parts += [f"{self.left_s:.0f} s left"] if self.left_s else []
        parts += [self.note] if self.note else []
        return f"{self.what}: {', '.join(parts)}"


Watcher = Callable[[Work], AbstractContextManager[None]]
"""Entered when a piece of work begins, left when it ends, however it ends. It must not raise."""

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())


@contextmanager
def watched_by(*watchers: Watcher) -> Iterator[None]:
    """Have all work that is begun in the block watched; within a block that is watched already it changes nothing."""
    token = _watchers.set(_watchers.get() or watchers)
    try:
        yield
    finally:
        _watchers.reset(token)


@contextmanager
def unwatched() -> Iterator[None]:
    """Show no progress of work that begins in the block."""
    token = _watchers.set(())
    try:
        yield
    finally:
        _watchers.reset(token)


@contextmanager
def work(what: str, total: float | None = None, unit: str = "", *, has_bar: bool = False) -> Iterator[Work]:
    """A piece of work from its beginning to its end."""
    begun = Work(what, total, unit, has_bar=has_bar)
    with shown(begun):
        yield begun


@contextmanager
def shown(work: Work) -> Iterator[None]:
    """Show it to the watchers here; it may have begun elsewhere."""
    with ExitStack() as stack:
        for watcher in _watchers.get():
            stack.enter_context(watcher(work))
        yield


@contextmanager
def looked_at(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `look` at once and every so often until the block ends, and once more then; in a thread, in the caller's context."""
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
