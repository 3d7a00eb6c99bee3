"""Send the requests of a rollout to the engine's server. A lost connection is retried; a silent engine is an error."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import aiohttp
import orjson

from infra.engines.server import server_process
from infra.failures import EngineRefused, EngineUnavailable
from infra.records import FinishReason

log = logging.getLogger(__name__)

READ_BUFFER_BYTES = 2**24
"""Longest line of a stream."""
MAX_SENDS = 3
"""Attempts at one request whose connection is lost each time."""
NETWORK_ERRORS = (aiohttp.ClientError, TimeoutError)
JSON = {"Content-Type": "application/json"}
T = TypeVar("T")
SSE = b"data: "
END_OF_STREAM = b"[DONE]"
_latest_answers: dict[str, float] = {}
"""By a server's URL: when it last sent an answer to any client of this process, or a token of one. Requests of one client may wait in the
server for those of another."""


class ConnectionLost(EngineUnavailable):
    """A request got no complete answer; other requests still may."""


class GenerateRequest(NamedTuple):
    """A request for one completion."""

    tokens: list[int]
    adapter_name: str | None
    temperature: float
    max_new_tokens: int
    seed: int
    ignore_eos: bool
    cache_key: str | None = None
    """Only requests with the same key share cached prefixes. None: shared among all requests without a key."""
    top_p: float = 1.0
    """Probability mass of the tokens that are sampled from; below 1 in evaluations only."""
    request_id: str = ""
    """Id by which the engine can abort the request."""
    returns_routes: bool = False
    """Whether the answer brings the experts of each token."""


class GenerateResponse(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    """Log-probs of the tokens, in nats; nan where the engine gives none."""
    finish_reason: FinishReason
    num_cached: int
    """Prompt tokens that were in the prefix cache."""
    routes: bytes | None = None
    """Experts of each token, see Sample.routes."""


class ServerApi(Protocol):
    path: str
    aborts_by_id: bool
    """Whether requests are aborted by id. If not: all at once, or each by closing its connection."""

    def body(self, request: GenerateRequest) -> dict[str, object]: ...

    def answer(self, content: Any, request: GenerateRequest) -> GenerateResponse:
        """Read the parsed JSON of the answer to a request.

        Raises:
            ValueError, TypeError, KeyError, IndexError, AttributeError: if it has another form.
            WrongAnswer: if it lacks what was asked for.
        """

    def stream_body(self, request: GenerateRequest) -> dict[str, object]: ...

    def merge_chunks(self, chunks: Sequence[Any]) -> Any:
        """Merge the chunks of a stream into one answer."""

    def abort(self, request_ids: Iterable[str]) -> list[tuple[str, dict[str, object]]]:
        """Path and body of the calls that abort these requests, or all running requests if the engine knows no ids."""

    def refused(self, error: EngineRefused) -> Exception:
        """Return the error that an HTTP 4xx of this server stands for."""


class Sender:
    """Sends the requests of one rollout."""

    def __init__(self, api: ServerApi, url: str, health_path: str, timeout_s: float) -> None:
        """health_path: Path of the server that returns 200 while it is healthy. timeout_s: Longest time without an answer to any request."""
        self.api, self.server_url, self.url, self.health_url = api, url, url + api.path, url + health_path
        self.timeout_s = timeout_s
        self.token = secrets.token_hex(8)
        """Unique to this rollout: prefix of its request ids and of its prompts' cache keys."""
        self.under_way: dict[str, GenerateRequest] = {}
        """Requests under way, by request id."""
        self.num_asked = 0
        self._answered()

    # Perf: rollout 10.7k -> 14.2k tokens/s, with NVML and tensors written straight to files (7B, H200, docs/history/log.md).
    def client(self) -> aiohttp.ClientSession:
        """Return a client for hundreds of concurrent requests. httpx, which the control calls use, would spend its time searching for a connection
        (1,024 requests, 512 at a time, to a server that does nothing: 7 s of CPU, against 0.4 s here)."""
        return aiohttp.ClientSession(
            headers=server_process.authorization(self.server_url),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=server_process.KEEP_ALIVE_S / 2),
            timeout=aiohttp.ClientTimeout(total=None, connect=self.timeout_s),  # for answers see _awaited
            read_bufsize=READ_BUFFER_BYTES,
        )

    async def abort(self, client: aiohttp.ClientSession, request_ids: Iterable[str]) -> None:
        requests = self.api.abort(list(request_ids))
        limit = aiohttp.ClientTimeout(total=self.timeout_s)
        await asyncio.gather(*(self._posted(client, self.server_url + path, body, timeout=limit) for path, body in requests))

    async def _posted(self, client: aiohttp.ClientSession, url: str, body: dict[str, object], **how: Any) -> bytes:
        """Return the raw answer. Raises as `server_process.post` does."""
        try:
            async with client.post(url, data=orjson.dumps(body), headers=JSON, **how) as response:
                answer = await response.read()
        except NETWORK_ERRORS as error:
            raise unavailable(url, error) from error
        server_process.check_status(url, response.status, answer.decode(errors="replace"))
        return answer

    async def whole(self, client: aiohttp.ClientSession, request: GenerateRequest) -> bytes:
        return await self._posted(client, self.url, self.api.body(request))

    async def answered(
        self,
        client: aiohttp.ClientSession,
        request: GenerateRequest,
        ask: Callable[[aiohttp.ClientSession, GenerateRequest], Awaitable[T]],
    ) -> T:
        """Return the result of `ask`. A request whose connection is lost is resent while the engine is healthy, up to MAX_SENDS attempts in all.

        Raises:
            EngineUnavailable: if the engine is not healthy, or the connection is lost in every attempt; see also `_awaited`.
        """
        for number in range(1, MAX_SENDS + 1):
            self.num_asked += 1
            sent = request._replace(request_id=f"{self.token}-{self.num_asked:09d}")
            self.under_way[sent.request_id] = sent
            try:
                return await self._awaited(ask(client, sent))
            except EngineRefused as error:
                raise self.api.refused(error) from error
            except ConnectionLost as error:
                if number == MAX_SENDS or not await self._is_healthy(client):
                    raise
                log.warning("%s: sent again, the engine is healthy", error)
                if self.api.aborts_by_id:
                    await self._abort_lost(client, sent.request_id)
            finally:
                del self.under_way[sent.request_id]
        raise AssertionError("unreachable")

    async def _awaited(self, answer: Awaitable[T]) -> T:
        """Wait for the answer to a request. The timeout counts from when it was sent or from the engine's latest answer to any
        request, whichever is later: a request queued in the engine starts when another one ends.

        Raises:
            EngineUnavailable: after request_timeout_s without any answer.
        """
        begin, waiting = time.monotonic(), asyncio.ensure_future(answer)
        try:
            while not waiting.done():
                left = max(begin, _latest_answers[self.server_url]) + self.timeout_s - time.monotonic()
                if left <= 0:
                    raise EngineUnavailable(
                        f"{self.url}: no answer to any request for {self.timeout_s:g} s (engine.request_timeout_s)"
                    )
                await asyncio.wait((waiting,), timeout=left)
            self._answered()
            return waiting.result()
        finally:
            waiting.cancel()

    def _answered(self) -> None:
        _latest_answers[self.server_url] = time.monotonic()

    async def _is_healthy(self, client: aiohttp.ClientSession) -> bool:
        try:
            async with client.get(
                self.health_url, timeout=aiohttp.ClientTimeout(total=server_process.PROBE_TIMEOUT_S)
            ) as response:
                return response.ok
        except NETWORK_ERRORS:
            return False

    async def _abort_lost(self, client: aiohttp.ClientSession, request_id: str) -> None:
        """Abort a request that is no longer awaited, if it still runs in the engine."""
        with suppress(EngineUnavailable, EngineRefused):
            await self.abort(client, [request_id])

    async def streamed(self, client: aiohttp.ClientSession, request: GenerateRequest) -> tuple[list[bytes], list[float]]:
        """Return the chunks, and when each came, in seconds after the request was sent."""
        chunks: list[bytes] = []
        times: list[float] = []
        begin = time.perf_counter()
        try:
            async with client.post(self.url, data=orjson.dumps(self.api.stream_body(request)), headers=JSON) as response:
                if not response.ok:
                    server_process.check_status(self.url, response.status, await response.text(errors="replace"))
                async for chunk in _events(self.url, response):
                    times.append(time.perf_counter() - begin)
                    chunks.append(chunk)
                    self._answered()
        except NETWORK_ERRORS as error:
            raise unavailable(self.url, error) from error
        return chunks, times


async def _events(url: str, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event up to the one that marks the end of the stream.

    Raises:
        EngineUnavailable: if the stream ends without it. A dying server closes the connection. Without a content length, that looks to
        HTTP like the end of a complete answer.
    """
    count, is_whole = 0, False
    async for line in response.content:
        event = line.strip()
        if event == SSE + END_OF_STREAM:
            is_whole = True
        elif event.startswith(SSE):
            count += 1
            yield event.removeprefix(SSE)
    if not is_whole or not count:
        raise ConnectionLost(f"{url}: the stream ended early, after {count} chunks")


def unavailable(url: str, error: Exception) -> EngineUnavailable:
    said = f"{url}: {type(error).__name__} {error}"
    return ConnectionLost(said) if isinstance(error, aiohttp.ClientError) else EngineUnavailable(said)


def parsed(data: bytes) -> Any:
    """Parse JSON. Accepts the NaN that some servers write, although JSON has none: a later check reports it."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data.decode(errors="replace"))
