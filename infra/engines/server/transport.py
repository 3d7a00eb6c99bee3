"""How the requests of a rollout reach the engine's server: sent again where a connection is lost, given up where the engine is silent."""

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
"""A line of a stream may be so long."""
MAX_SENDS = 3
"""Of one request, whose connection is lost each time."""
NETWORK_ERRORS = (aiohttp.ClientError, TimeoutError)
JSON = {"Content-Type": "application/json"}
T = TypeVar("T")
SSE = b"data: "
END_OF_STREAM = b"[DONE]"


class ConnectionLost(EngineUnavailable):
    """A request got no whole answer; others may."""


class GenerateRequest(NamedTuple):
    """A request for one completion."""

    tokens: list[int]
    adapter_name: str | None
    temperature: float
    max_new_tokens: int
    seed: int
    ignore_eos: bool
    cache_key: str | None = None
    """Only requests of one key share what the prefix cache holds; None: all without a key do."""
    request_id: str = ""
    """By which the engine breaks it off."""


class GenerateResponse(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    """Nats, of tokens; nan where the engine gives none."""
    finish_reason: FinishReason
    num_cached: int
    """Prompt tokens that were in the prefix cache."""


class ServerApi(Protocol):
    path: str
    aborts_by_id: bool
    """Else all requests at once, or by a closed connection each."""

    def body(self, request: GenerateRequest) -> dict[str, object]: ...

    def answer(self, content: Any) -> GenerateResponse:
        """From the parsed JSON; raises ValueError, TypeError, KeyError, IndexError or AttributeError for another form."""

    def stream_body(self, request: GenerateRequest) -> dict[str, object]: ...

    def merge_chunks(self, chunks: Sequence[Any]) -> Any:
        """One answer from the chunks of a stream."""

    def abort(self, request_ids: Iterable[str]) -> list[tuple[str, dict[str, object]]]:
        """Path and body of the requests that break off these, or all that are under way where the engine knows no ids."""

    def refused(self, error: EngineRefused) -> Exception:
        """What an HTTP 4xx of this server means."""


class Sender:
    """Of one rollout."""

    def __init__(self, api: ServerApi, url: str, health_path: str, timeout_s: float) -> None:
        """health_path: of the server, answers with 200 while it is well. timeout_s: longest time in which no request is answered."""
        self.api, self.server_url, self.url, self.health_url = api, url, url + api.path, url + health_path
        self.timeout_s = timeout_s
        self.token = secrets.token_hex(8)
        """Of this rollout alone: what its request ids and the cache keys of its prompts begin with."""
        self.under_way: dict[str, GenerateRequest] = {}
        """By request id."""
        self.num_asked = 0
        self.progress_at = time.monotonic()
        """When the engine last gave an answer, or a token of one."""

    # Perf: rollout 10.7k -> 14.2k tokens/s, with NVML and tensors written straight to files (7B, H200, docs/history/log.md).
    def client(self) -> aiohttp.ClientSession:
        """Hundreds of requests at a time: httpx, which the control calls use, then spends its time on looking for a connection
        (1,024 requests, 512 at a time, to a server that does nothing: 7 s of CPU, against 0.4 s here)."""
        return aiohttp.ClientSession(
            headers=server_process.authorization(),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=server_process.KEEP_ALIVE_S / 2),
            timeout=aiohttp.ClientTimeout(total=None, connect=self.timeout_s),  # for answers see _awaited
            read_bufsize=READ_BUFFER_BYTES,
        )

    async def abort(self, client: aiohttp.ClientSession, request_ids: Iterable[str]) -> None:
        requests = self.api.abort(list(request_ids))
        limit = aiohttp.ClientTimeout(total=self.timeout_s)
        await asyncio.gather(*(self._posted(client, self.server_url + path, body, timeout=limit) for path, body in requests))

    async def _posted(self, client: aiohttp.ClientSession, url: str, body: dict[str, object], **how: Any) -> bytes:
        """The answer as it came; raises as `server.post` does."""
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
        """What `ask` gives. A request whose connection is lost is sent again while the engine's health is good, MAX_SENDS times in all.

        Raises:
            EngineUnavailable: where the engine is not healthy, or the connection is lost again and again; see also `_awaited`.
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
        """The answer to a request that has been sent. Its time runs from when it was sent or from the engine's latest answer to any
        request, whichever is later: one that waits for its turn in the engine gets it when another ends.

        Raises:
            EngineUnavailable: after request_timeout_s without any answer.
        """
        begin, waiting = time.monotonic(), asyncio.ensure_future(answer)
        try:
            while not waiting.done():
                left = max(begin, self.progress_at) + self.timeout_s - time.monotonic()
                if left <= 0:
                    raise EngineUnavailable(
                        f"{self.url}: no answer to any request for {self.timeout_s:g} s (engine.request_timeout_s)"
                    )
                await asyncio.wait((waiting,), timeout=left)
            self.progress_at = time.monotonic()
            return waiting.result()
        finally:
            waiting.cancel()

    async def _is_healthy(self, client: aiohttp.ClientSession) -> bool:
        try:
            async with client.get(
                self.health_url, timeout=aiohttp.ClientTimeout(total=server_process.PROBE_TIMEOUT_S)
            ) as response:
                return response.ok
        except NETWORK_ERRORS:
            return False

    async def _abort_lost(self, client: aiohttp.ClientSession, request_id: str) -> None:
        """Abort a request that is not waited for any more, should it still be under way there."""
        with suppress(EngineUnavailable, EngineRefused):
            await self.abort(client, [request_id])

    async def streamed(self, client: aiohttp.ClientSession, request: GenerateRequest) -> tuple[list[bytes], list[float]]:
        """The chunks, and when each came, in seconds after the request was sent."""
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
                    self.progress_at = time.monotonic()
        except NETWORK_ERRORS as error:
            raise unavailable(self.url, error) from error
        return chunks, times


async def _events(url: str, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to the one that says that the stream is whole.

    Raises:
        EngineUnavailable: if the stream ends without it. A server that dies closes the connection, and without a length that looks to
            HTTP like the end of a whole answer.
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
    """JSON, also with the NaN that is none and that some servers write: what is wrong with it is said by a later check."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data.decode(errors="replace"))
