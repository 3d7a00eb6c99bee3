"""The requests of one rollout to an engine that is a server: token ids out, token ids with log-probabilities back.

One request for one sample, each with a seed of its own; each prompt goes once before its samples, which then find it in the
prefix cache. How a kind of server is spoken to is its Dialect.

The last bits of log-probabilities depend on how much of a prompt came from the prefix cache: which other prompts begin alike, and
whether they were there first. So in deterministic mode each prompt of each rollout has its part of the cache to itself: its first
request computes all of it, and each of its samples finds all but the last token, in whatever order requests arrive.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import aiohttp
import orjson

from infra.config import EngineConfig, SamplingConfig
from infra.engines import server, timing
from infra.engines.base import Wanted
from infra.engines.timing import RequestTiming
from infra.failures import EngineRefused, EngineUnavailable, WrongAnswer
from infra.prompts import Prompt, sample_seed
from infra.records import AdapterVersion, FinishReason
from infra.samples import Sample

log = logging.getLogger(__name__)

READ_BUFFER_BYTES = 2**24
"""A line of a stream may be so long."""
BREAK_OFF_AGAIN_S = 0.2
NETWORK_ERRORS = (aiohttp.ClientError, TimeoutError)
JSON = {"Content-Type": "application/json"}
SSE = b"data: "
END_OF_STREAM = b"[DONE]"


class Question(NamedTuple):
    """A request for one completion."""

    tokens: list[int]
    adapter_name: str | None
    temperature: float
    max_new_tokens: int
    seed: int
    ignore_eos: bool
    cache_key: str | None = None
    """Only requests of one key share what the prefix cache holds; None: all without a key do."""


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    """Nats, of tokens; nan where the engine gives none."""
    finish_reason: FinishReason
    num_cached: int
    """Prompt tokens that were in the prefix cache."""


class Dialect(Protocol):
    path: str

    def body(self, question: Question) -> dict[str, object]: ...

    def answer(self, content: Any) -> Answer:
        """From the parsed JSON; raises ValueError, TypeError, KeyError, IndexError or AttributeError for another form."""

    def stream_body(self, question: Question) -> dict[str, object]: ...

    def joined(self, chunks: Sequence[Any]) -> Any:
        """One answer from the chunks of a stream."""

    def break_off(self) -> tuple[str, dict[str, object]]:
        """Path and body of the request that breaks off all that are under way."""

    def refused(self, error: EngineRefused) -> Exception:
        """What an HTTP 4xx of this server means."""


class Rollout:
    """All requests of one rollout: first each prompt alone, then each of its samples."""

    def __init__(
        self,
        dialect: Dialect,
        config: EngineConfig,
        url: str,
        sampling: SamplingConfig,
        adapter: AdapterVersion,
        take: Callable[[Sample], bool],
        *,
        keeps_beginnings: bool = False,
    ) -> None:
        self.dialect, self.server_url, self.url = dialect, url, url + dialect.path
        self.sampling, self.adapter, self.take, self.keeps_beginnings = sampling, adapter, take, keeps_beginnings
        self.timeout_s = config.request_timeout_s
        self.load = timing.wanted()
        self.cache_keys = f"{secrets.token_hex(8)}-" if config.deterministic else None
        """What the keys of the prompts begin with: of this rollout alone."""
        self.slots = asyncio.Semaphore(self.load.concurrency if self.load else 2 * config.max_running_requests)
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.first_token_at = self.last_token_at = 0.0
        """Seconds since the epoch."""
        self.enough = asyncio.Event()
        self.seconds_to_first_tokens: list[float] = []
        """Of the prompts, each of which goes first with a request for one token."""

    @property
    def ttft_s(self) -> float:
        """Mean; 0 where no prompt went first."""
        return fmean(self.seconds_to_first_tokens or [0.0])

    async def all_of(self, missing: Sequence[Wanted]) -> float:
        """Give every sample to `take` as soon as it is finished; the share of their prompt tokens that were in the prefix cache."""
        # A prompt of which one sample is missing goes first too: its sample then comes about as it would have in one go.
        prompts = {wanted.prompt.prompt_id: wanted.prompt for wanted in missing}.values()
        if self.load and self.sampling.group_size == 1:
            prompts = {}.values()  # nobody would find it in the cache, and the time to the first token would not be that of a prompt
        async with self._client() as client:
            begin = time.perf_counter()
            await asyncio.gather(*(self._lead(client, prompt) for prompt in prompts))
            sampling = asyncio.gather(*(self._sample(client, wanted) for wanted in missing))
            enough = asyncio.create_task(self.enough.wait())
            await asyncio.wait((sampling, enough), return_when=asyncio.FIRST_COMPLETED)
            enough.cancel()
            if self.load:
                self.load.seconds += time.perf_counter() - begin
            if sampling.done():
                sampling.result()  # raises what a sample raised
            else:
                log.info("rollout: enough whole groups, what is still under way is broken off")
                await self._end(client, sampling)
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    def _client(self) -> aiohttp.ClientSession:
        """Hundreds of requests at a time: httpx, which the control calls use, then spends its time on looking for a connection
        (1,024 requests, 512 at a time, to a server that does nothing: 7 s of CPU, against 0.4 s here)."""
        return aiohttp.ClientSession(
            headers=server.authorization(),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=server.KEEP_ALIVE_S / 2),
            timeout=aiohttp.ClientTimeout(total=None, connect=self.timeout_s, sock_read=self.timeout_s),
            read_bufsize=READ_BUFFER_BYTES,
        )

    async def _end(self, client: aiohttp.ClientSession, sampling: "asyncio.Future[list[None]]") -> None:
        """Where beginnings are kept, each request answers with what there is of it; one that had not reached the engine meets the next call."""
        if not self.keeps_beginnings:
            sampling.cancel()
            await asyncio.wait((sampling,))
            with suppress(asyncio.CancelledError):
                sampling.result()  # heard, so that asyncio does not log it as an error that nobody did
            await self._break_off(client)
            return
        deadline = time.monotonic() + self.timeout_s
        while not sampling.done():
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"{self.url}: what was broken off has not come back in {self.timeout_s:g} s")
            await self._break_off(client)
            await asyncio.wait((sampling,), timeout=BREAK_OFF_AGAIN_S)
        sampling.result()

    async def _break_off(self, client: aiohttp.ClientSession) -> None:
        path, body = self.dialect.break_off()
        await self._posted(client, self.server_url + path, body)

    async def _posted(self, client: aiohttp.ClientSession, url: str, body: dict[str, object]) -> bytes:
        """The answer as it came; raises as `server.post` does."""
        try:
            async with client.post(url, data=orjson.dumps(body), headers=JSON) as response:
                answer = await response.read()
        except NETWORK_ERRORS as error:
            raise unavailable(url, error) from error
        server.check_status(url, response.status, answer.decode(errors="replace"))
        return answer

    def _question(self, prompt: Prompt, first: list[int], *, seed: int, max_new_tokens: int) -> Question:
        """first: tokens of the answer that are there already."""
        sampling, key = self.sampling, f"{self.cache_keys}{prompt.prompt_id}" if self.cache_keys else None
        tokens, name = prompt.prompt_tokens + first, self.adapter.served_name
        return Question(tokens, name, sampling.temperature, max_new_tokens, seed, sampling.ignore_eos, key)

    async def _lead(self, client: aiohttp.ClientSession, prompt: Prompt) -> None:
        begin = time.perf_counter()
        async with self.slots:
            await self._ask(client, self._question(prompt, [], seed=0, max_new_tokens=1))
        self.seconds_to_first_tokens.append(time.perf_counter() - begin)

    async def _sample(self, client: aiohttp.ClientSession, wanted: Wanted) -> None:
        prompt, index, begun = wanted
        first, said = (list(begun.output_tokens), list(begun.output_logprobs)) if begun else ([], [])
        seed, num_new = sample_seed(prompt.seed, index, len(first)), self.sampling.max_output_tokens - len(first)
        question = self._question(prompt, first, seed=seed, max_new_tokens=num_new)
        async with self.slots:
            if self.enough.is_set():
                return
            answer = await (self._ask(client, question) if self.load is None else self._timed(client, question, self.load))
        self.num_prompt_tokens += len(question.tokens)
        self.num_cached_tokens += answer.num_cached
        is_more_needed = self.take(
            Sample(
                prompt_id=prompt.prompt_id,
                sample_index=index,
                prompt_tokens=prompt.prompt_tokens,
                output_tokens=first + answer.tokens,
                output_logprobs=said + answer.logprobs,
                finish_reason=answer.finish_reason,
                adapter_version=self.adapter.version,
                adapter_sha256=self.adapter.sha256,
                num_older_tokens=len(first),
                older_adapter_sha256=begun.adapter_sha256 if begun else "",
            )
        )
        if not is_more_needed:
            self.enough.set()

    async def _ask(self, client: aiohttp.ClientSession, question: Question) -> Answer:
        try:
            answer = await self._posted(client, self.url, self.dialect.body(question))
        except EngineRefused as error:
            raise self.dialect.refused(error) from error
        self._tokens_came()
        return _read(self.dialect, lambda: parsed(answer), answer)

    async def _timed(self, client: aiohttp.ClientSession, question: Question, load: timing.Load) -> Answer:
        body = self.dialect.stream_body(question)
        chunks: list[bytes] = []
        times: list[float] = []
        begin = time.perf_counter()
        try:
            async with client.post(self.url, data=orjson.dumps(body), headers=JSON) as response:
                if not response.ok:
                    server.check_status(self.url, response.status, await response.text(errors="replace"))
                async for chunk in _events(self.url, response):
                    times.append(time.perf_counter() - begin)
                    chunks.append(chunk)
        except EngineRefused as error:
            raise self.dialect.refused(error) from error
        except NETWORK_ERRORS as error:
            raise unavailable(self.url, error) from error
        # Parsed when the request is over: what the client does meanwhile would count as the engine's time.
        answer = _read(self.dialect, lambda: self.dialect.joined([parsed(chunk) for chunk in chunks]), b"\n".join(chunks))
        load.requests.append(RequestTiming(times[0], times[-1], len(answer.tokens)))
        self._tokens_came()
        return answer

    def _tokens_came(self) -> None:
        """The leaders, which are first, end with their first token."""
        self.last_token_at = time.time()
        self.first_token_at = self.first_token_at or self.last_token_at


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
        raise EngineUnavailable(f"{url}: the stream ended early, after {count} chunks")


def unavailable(url: str, error: Exception) -> EngineUnavailable:
    return EngineUnavailable(f"{url}: {type(error).__name__} {error}")


def parsed(data: bytes) -> Any:
    """JSON, also with the NaN that is none and that some servers write: what is wrong with it is said by a later check."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data.decode(errors="replace"))


def _read(dialect: Dialect, content: Callable[[], Any], answer: bytes) -> Answer:
    """Raises WrongAnswer if it is not of the form that was asked for."""
    try:
        return dialect.answer(content())
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise WrongAnswer(
            "the engine's answer has not the form that was asked for", {"answer": answer.decode(errors="replace")}
        ) from error
