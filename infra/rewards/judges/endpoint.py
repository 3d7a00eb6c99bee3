"""An OpenAI-compatible endpoint: chat completions, tried again by the class of the failure.

HTTP 408, 409, 425, 429 and 5xx, time-outs and lost connections    tried again after a growing wait, or after Retry-After
other 4xx                                                          not: the same request would fail again
a 400 that names a parameter which can be left out                 sent without it from then on
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp
import orjson
from pydantic import SecretStr

from infra.concurrency import event_loop
from infra.concurrency.deadline import Deadline
from infra.config import JudgeConfig
from infra.rewards.judges.cases import LATE, NO_CHAT, JudgeAnswer, JudgeAway, JudgeRequest, OnAnswer

log = logging.getLogger(__name__)

POLL_S = 0.1
TRANSIENT = (408, 409, 425, 429)
QUOTA = "insufficient_quota"
"""OpenAI's code of a 429 that no waiting cures."""
MAX_WAIT_S = 300.0
"""Longest Retry-After that is waited for."""
CHARACTERS_PER_TOKEN = 4
"""For endpoints that do not say how many tokens they took."""
SHOWN_CHARACTERS = 200


class _Failed(Exception):
    def __init__(self, message: str, *, is_transient: bool, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.is_transient, self.retry_after_s = is_transient, retry_after_s


class _Reply(NamedTuple):
    status: int
    data: bytes
    retry_after: str


class JudgeEndpoint:
    """Sends requests; an Ask."""

    def __init__(self, config: JudgeConfig, key: SecretStr | None, deadline: Deadline) -> None:
        """deadline: After it nothing is sent. What is under way then is awaited: it may have been paid."""
        self.config, self._key, self.deadline = config, key, deadline
        self.url = f"{config.base_url}/chat/completions"
        self.left_out: set[str] = set()
        """Parameters that the endpoint refuses."""
        self._resume_at = 0.0
        """Before this moment nothing is sent: the endpoint said so."""

    def __call__(self, requests: Sequence[JudgeRequest], on_answer: OnAnswer) -> None:
        batches: Iterator[Sequence[JudgeRequest] | None] = iter([requests, None])
        self.follow(lambda: next(batches), on_answer)

    def follow(self, more: Callable[[], Sequence[JudgeRequest] | None], on_answer: OnAnswer) -> None:
        """Send requests as they come, and return when all are answered.

        more: Is called every POLL_S seconds. Returns the requests since the last call; None: there will be no others. Their positions count
            through all calls. Its errors are treated as those of on_answer.
        """
        event_loop.completed(self._all_of(more, on_answer))

    async def _all_of(self, more: Callable[[], Sequence[JudgeRequest] | None], on_answer: OnAnswer) -> None:
        slots, stop, errors = asyncio.Semaphore(self.config.concurrency), asyncio.Event(), list[BaseException]()
        headers = {"Authorization": f"Bearer {self._key.get_secret_value()}"} if self._key else {}
        limit = aiohttp.ClientTimeout(total=self.config.timeout_s)

        async def one(position: int, request: JudgeRequest) -> None:
            async with slots:
                found = None if stop.is_set() else await self._asked(client, request, stop)
            if found is None and errors:
                return
            try:
                on_answer(position, found or LATE)
            except BaseException as error:  # noqa: BLE001  # raised below, when all that is under way has come back
                errors.append(error)
                stop.set()

        if self.deadline.is_over:
            stop.set()
        late = asyncio.create_task(self.deadline.passes())
        late.add_done_callback(lambda passed: stop.set())
        async with aiohttp.ClientSession(headers=headers, timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as client:
            sent: list[asyncio.Task[None]] = []
            try:
                while not errors and (requests := more()) is not None:
                    sent += [asyncio.create_task(one(len(sent) + n, request)) for n, request in enumerate(requests)]
                    await asyncio.sleep(0.0 if requests else POLL_S)
            except BaseException as error:  # noqa: BLE001  # as above
                stop.set()
                errors.append(error)
            await asyncio.gather(*sent)
        late.cancel()
        if errors:
            raise errors[0]

    async def _asked(
        self, client: aiohttp.ClientSession, request: JudgeRequest, stop: asyncio.Event
    ) -> JudgeAnswer | JudgeAway | None:
        """Return the answer, or why there is none. None: it was stopped before the next attempt."""
        for attempt in range(1, self.config.max_attempts + 1):
            if await _waited(self._resume_at - time.monotonic(), stop):
                return None
            try:
                return await self._sent(client, request)
            except _Failed as error:
                failed = error
            if not failed.is_transient or failed.retry_after_s > MAX_WAIT_S:
                break
            log.debug("judge: attempt %d of %d: %s", attempt, self.config.max_attempts, failed)
            if attempt == self.config.max_attempts:
                break
            if failed.retry_after_s:
                self._resume_at = max(self._resume_at, time.monotonic() + failed.retry_after_s)
            elif await _waited(self.config.retry_delay_s * 2 ** (attempt - 1), stop):
                return None
        return JudgeAway(f"{failed}; {attempt} {'attempt' if attempt == 1 else 'attempts'}")

    async def _sent(self, client: aiohttp.ClientSession, request: JudgeRequest) -> JudgeAnswer:
        while True:
            body = self._body(request)
            reply = await self._posted(client, body)
            if reply.status == 200:
                return self._read(reply.data, body)
            if reply.status != 400 or not self._leaves_out(reply.data.decode(errors="replace"), body):
                raise self._failure(reply)

    def _body(self, request: JudgeRequest) -> dict[str, Any]:
        config = self.config
        limit = "max_tokens" if "max_tokens" not in self.left_out else "max_completion_tokens"
        body: dict[str, Any] = {"model": config.model, "messages": list(request.messages), limit: config.max_output_tokens}
        if "temperature" not in self.left_out:
            body["temperature"] = config.temperature
        if request.schema and config.answer != "text" and "response_format" not in self.left_out:
            body["response_format"] = {"type": "json_schema", "json_schema": {**request.schema, "strict": True}}
        return body

    def _leaves_out(self, text: str, body: dict[str, Any]) -> bool:
        """Leave out a parameter that a refusal names; returns whether there is one that can be left out."""
        can = ["temperature", "max_tokens", *(["response_format"] if self.config.answer == "auto" else [])]
        said = text.replace("json_schema", "response_format")
        found = next((name for name in can if name in body and name in said), None)
        if found is None:
            return False
        if found not in self.left_out:
            log.warning("the judge refuses the parameter %s: %s; it is left out", found, self._clean(text))
        self.left_out.add(found)
        return True

    async def _posted(self, client: aiohttp.ClientSession, body: dict[str, Any]) -> _Reply:
        try:
            headers = {"Content-Type": "application/json"}
            # A redirect could take the key elsewhere.
            async with client.post(self.url, data=orjson.dumps(body), headers=headers, allow_redirects=False) as response:
                return _Reply(response.status, await response.read(), response.headers.get("Retry-After", ""))
        except TimeoutError as error:
            raise _Failed(f"{self.url} gave no answer in {self.config.timeout_s:g} s", is_transient=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(f"{self.url}: {self._clean(f'{type(error).__name__} {error}')}", is_transient=True) from error

    def _failure(self, reply: _Reply) -> _Failed:
        text = reply.data.decode(errors="replace")
        is_transient = (reply.status in TRANSIENT and QUOTA not in text) or reply.status >= 500
        return _Failed(
            f"{self.url}: HTTP {reply.status} {self._clean(text)}",
            is_transient=is_transient,
            retry_after_s=retry_after_s(reply.retry_after),
        )

    def _read(self, data: bytes, body: dict[str, Any]) -> JudgeAnswer:
        """Read a reply. One that is no chat completion is an answer too, which cannot be read: it may have been paid."""
        try:
            content = orjson.loads(data)
            choice = content["choices"][0]
            text, reason = choice["message"]["content"] or "", str(choice.get("finish_reason"))
            usage = content.get("usage") or {}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            text, reason, usage = self._clean(data.decode(errors="replace")), NO_CHAT, {}
        sizes = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        guesses = (len(str(body["messages"])) // CHARACTERS_PER_TOKEN, len(str(text)) // CHARACTERS_PER_TOKEN)
        found = [size if isinstance(size, int) and size >= 0 else guess for size, guess in zip(sizes, guesses, strict=True)]
        return JudgeAnswer(str(text), reason, *found)

    def _clean(self, text: str) -> str:
        """Shorten what an endpoint said to a line without the key."""
        key = self._key.get_secret_value() if self._key else ""
        return " ".join((text.replace(key, "***") if key else text).split())[:SHOWN_CHARACTERS]


async def _waited(seconds: float, stop: asyncio.Event) -> bool:
    """Wait, and return whether everything was stopped meanwhile."""
    if seconds > 0:
        try:
            await asyncio.wait_for(stop.wait(), seconds)
        except TimeoutError:
            return False
    return stop.is_set()


def retry_after_s(value: str) -> float:
    """Return the seconds of a Retry-After header: a number, or a date. 0 if there is none."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
