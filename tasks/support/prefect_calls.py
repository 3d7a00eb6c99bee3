"""One rule for every call of Prefect's API: wait for the server, log that once a minute, fail after a stated time.

    call --no answer, or HTTP 408, 429, 502, 503--> pause of 0.5, 1, 2, 4, 8, 10, 10 ... s --> the same call again

While calls are waiting, a thread writes these log lines, and restarts the server if it is ours. Prefect's own client retries a call for about
a minute, silently, and does not retry the first call of a connection. The package `tasks` installs the rule: all flows import it
before they call the API.
"""

import contextvars
import errno
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import anyio
import httpx
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient

from infra.processes.children import ProgramFailed
from infra.services import servers
from infra.settings import settings

# Not below `infra` or `tasks`, whose lines go to Prefect's API: the thread's lines do not belong to a flow run.
log = logging.getLogger("ratchet.prefect")

WAIT_S = 600.0
"""Seconds that one call waits for an answer."""
FIRST_LINE_S, LINE_EVERY_S = 5.0, 60.0
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
LONGEST_PAUSE_S = 10.0
FULL_BYTES = 4 * 2**20
"""With less than this left, an error of the server is taken for that of a full disk: the log of its SQLite database grows to 4 MiB."""
NO_ANSWER = (httpx.TimeoutException, httpx.NetworkError, httpx.ProtocolError)


_is_hurried: ContextVar[bool] = ContextVar("is_hurried", default=False)


@contextmanager
def without_waiting() -> Iterator[None]:
    """Make failing calls in the block raise at once: for non-essential calls, such as progress on a page."""
    token = _is_hurried.set(True)
    try:
        yield
    finally:
        _is_hurried.reset(token)


def _is_exiting() -> bool:
    """Whether this process is exiting: pending calls of Prefect's threads must not delay that."""
    return getattr(threading, "_SHUTTING_DOWN", False) or not threading.main_thread().is_alive()


class PrefectAway(ProgramFailed):
    """Prefect's server gave no usable answer in time."""


class FlowRunDeleted(ProgramFailed):
    """Prefect's server has no such flow run any more."""


def _explain(request: httpx.Request, outcome: httpx.Response | Exception) -> None:
    """Raise an error that says more than Prefect's own: for a flow run that was deleted while it ran, and for a server whose disk is full.

    Raises:
        FlowRunDeleted, OSError
    """
    code = outcome.status_code if isinstance(outcome, httpx.Response) else 0
    if code not in (404, 500) or not (found := re.search(r"/flow_runs/([^/]+)/set_state$", request.url.path)):
        return
    workspace = settings().workspace
    if code == 500 and (free := shutil.disk_usage(workspace).free) < FULL_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: Prefect's server answered HTTP 500 to the state of flow run {found[1]}, "
            f"and the disk of {workspace} has {free / 2**20:.1f} MiB left; make room, then run the same again: committed steps are whole",
        )
    if code == 404:
        raise FlowRunDeleted(
            f"Prefect's server does not have flow run {found[1]} any more: it was deleted while it ran, or the server has another database. "
            "What is committed is kept; run the same again"
        )


class Call:
    """A call of the API. It waits if it fails."""

    def __init__(self, client: httpx.Client | httpx.AsyncClient, request: httpx.Request, retry_codes: set[int]) -> None:
        self.api_url = str(client.base_url).rstrip("/")
        self.what, self.retry_codes = f"{request.method} {request.url.path}", retry_codes
        self.why = ""
        self.num_failures = 0
        self.since = time.monotonic()
        self.is_answered = False
        self.is_refused = False
        """The server is running, but too busy."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        WAITING.remove(self)

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since

    def pause(self, outcome: httpx.Response | Exception) -> float | None:
        """Return the seconds until the next try; None if the outcome is an answer.

        Raises:
            PrefectAway: after WAIT_S, or at once if another call has waited that long already.
        """
        if isinstance(outcome, httpx.Response) and outcome.status_code not in self.retry_codes:
            self.is_answered = True
            return None
        self.is_refused = isinstance(outcome, httpx.Response)
        self.why = f"HTTP {outcome.status_code}" if isinstance(outcome, httpx.Response) else f"{type(outcome).__name__} {outcome}"
        self.num_failures += 1
        if _is_hurried.get() or _is_exiting():
            raise PrefectAway(f"Prefect's server at {self.api_url} did not answer ({self.what}: {self.why})")
        WAITING.add(self)
        if self.waited_s >= WAIT_S or WAITING.is_given_up:
            raise WAITING.give_up(self)
        return PAUSES_S[self.num_failures - 1] if self.num_failures <= len(PAUSES_S) else LONGEST_PAUSE_S


class Waiting:
    """All calls of this process that are waiting for Prefect's server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._is_watched = False
        self.is_given_up = False

    def add(self, call: Call) -> None:
        with self._lock:
            if call not in self._calls:
                self._calls.append(call)
            if not self._is_watched:
                self._is_watched = True
                in_context = contextvars.copy_context().run  # context of the flow run, if any, to which these log lines belong
                threading.Thread(target=in_context, args=(self._watch, call.api_url), daemon=True).start()

    def remove(self, call: Call) -> None:
        with self._lock:
            if call in self._calls:
                self._calls.remove(call)
            if call.is_answered:
                self.is_given_up = False

    def give_up(self, call: Call) -> PrefectAway:
        if not self.is_given_up:
            self.is_given_up = True
            _silence_prefect()
        return PrefectAway(
            f"Prefect's server at {call.api_url} did not answer for {WAIT_S:g} s ({call.what}: {call.why}). Start it again, "
            "then run the same again: what is committed is kept, and the step goes on where it was"
        )

    def _oldest(self) -> Call | None:
        with self._lock:
            if not self._calls:
                self._is_watched = False
            return min(self._calls, key=lambda call: call.since, default=None)

    def _cure(self, call: Call, is_ours: bool) -> str:
        if call.is_refused:
            return f"it is busy and asked again, for {WAIT_S:g} s at most"
        return "it is started again" if is_ours else f"it was not started here, so the run ends after {WAIT_S:g} s"

    def _watch(self, api_url: str) -> None:
        next_line_s, begun, is_told = FIRST_LINE_S, time.monotonic(), False
        while (call := self._oldest()) is not None:
            is_ours = servers.is_our_prefect(api_url)
            if call.waited_s >= next_line_s:
                cure = self._cure(call, is_ours)
                log.warning(
                    "waiting for Prefect's server at %s for %.0f s (%s: %s); %s",
                    api_url,
                    call.waited_s,
                    call.what,
                    call.why,
                    cure,
                )
                next_line_s, is_told = call.waited_s + LINE_EVERY_S, True
            if is_ours:
                _revive(api_url, call.waited_s)
            time.sleep(0.25)
        if is_told and not self.is_given_up:
            log.warning("Prefect's server answers again, after %.0f s", time.monotonic() - begun)


WAITING = Waiting()


def _silence_prefect() -> None:
    """Keep Prefect's own loggers from adding a traceback for each later call that fails: the run ends with a single error."""
    logging.raiseExceptions = False
    for name in [*logging.root.manager.loggerDict, "prefect"]:
        if name.partition(".")[0] == "prefect":
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _revive(api_url: str, waited_s: float) -> None:
    try:
        servers.revive_prefect(api_url, waited_s)
    except (ProgramFailed, OSError, ValueError) as error:
        log.warning("Prefect's server could not be started again: %s", error)
        time.sleep(LONGEST_PAUSE_S)


def install() -> None:
    """Make all clients of Prefect's API in this process follow the rule. Their own method still handles tokens against cross-site requests."""
    sync, asynchronous = PrefectHttpxSyncClient._send_with_retry, PrefectHttpxAsyncClient._send_with_retry

    # Any: arguments of httpx that Prefect passes through, and the exceptions that it would have retried.
    def send_with_retry(
        self: PrefectHttpxSyncClient,
        request: httpx.Request,
        send: Callable[..., httpx.Response],
        send_args: Any,
        send_kwargs: Any,
        retry_codes: set[int],
        retry_exceptions: Any,
    ) -> Any:
        def patiently(request: httpx.Request, *args: Any, **kwargs: Any) -> Any:
            with Call(self, request, retry_codes) as call:
                while (pause_s := call.pause(outcome := _outcome(send, request, *args, **kwargs))) is not None:
                    time.sleep(pause_s)
                _explain(request, outcome)
                return outcome

        return sync(self, request, patiently, send_args, send_kwargs)

    async def asend_with_retry(
        self: PrefectHttpxAsyncClient,
        request: httpx.Request,
        send: Callable[..., Awaitable[httpx.Response]],
        send_args: Any,
        send_kwargs: Any,
        retry_codes: set[int],
        retry_exceptions: Any,
    ) -> Any:
        async def patiently(request: httpx.Request, *args: Any, **kwargs: Any) -> Any:
            with Call(self, request, retry_codes) as call:
                while (pause_s := call.pause(outcome := await _aoutcome(send, request, *args, **kwargs))) is not None:
                    await anyio.sleep(pause_s)
                _explain(request, outcome)
                return outcome

        return await asynchronous(self, request, patiently, send_args, send_kwargs)

    PrefectHttpxSyncClient._send_with_retry = send_with_retry  # type: ignore[method-assign,assignment]
    PrefectHttpxAsyncClient._send_with_retry = asend_with_retry  # type: ignore[method-assign,assignment]


def _outcome(
    send: Callable[..., httpx.Response], request: httpx.Request, *args: Any, **kwargs: Any
) -> httpx.Response | Exception:
    try:
        return send(request, *args, **kwargs)
    except NO_ANSWER as error:
        return error


async def _aoutcome(
    send: Callable[..., Awaitable[httpx.Response]], request: httpx.Request, *args: Any, **kwargs: Any
) -> httpx.Response | Exception:
    try:
        return await send(request, *args, **kwargs)
    except NO_ANSWER as error:
        return error
