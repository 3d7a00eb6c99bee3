"""The requests of one rollout to an engine that is a server: token ids out, token ids with log-probabilities back.

Each sample is one request with its own seed. Each prompt is sent once before its samples, which then find it in the prefix cache.
A ServerApi defines how a kind of server is called.

The last bits of log-probs depend on how much of a prompt came from the prefix cache. That depends on which other prompts share a prefix,
and on which came first. So in deterministic mode each prompt of each rollout has its own part of the cache: its first request
computes all of the prompt, and each of its samples finds all but the last token, in any order of requests. A sample that continues a prefix has
a part of its own and computes all: prefixes of one prompt may begin alike.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import aiohttp

from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt, sample_seed
from infra.engines.interface import WHOLE, SampleRequest, Share
from infra.engines.request_timing import Load, RequestTiming
from infra.engines.server.transport import GenerateRequest, GenerateResponse, Sender, ServerApi, parsed
from infra.failures import EngineUnavailable, WrongAnswer
from infra.records import AdapterVersion
from infra.store.samples import Sample

log = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.2
LOOK_S = 0.05
"""Seconds between two looks at whether other replicas have finished the rollout."""


class GenerationClient:
    """Sends all requests of one rollout: first each prompt alone, then each of its samples."""

    def __init__(
        self,
        api: ServerApi,
        config: EngineConfig,
        url: str,
        sampling: SamplingConfig,
        adapter: AdapterVersion,
        take: Callable[[Sample], bool],
        *,
        health_path: str,
        keeps_prefixes: bool = False,
        load: Load | None = None,
        share: Share = WHOLE,
    ) -> None:
        """health_path: Path of the server that returns 200 while it is healthy."""
        self.share = share
        self.api, self.sender = api, Sender(api, url, health_path, config.request_timeout_s)
        self.sampling, self.adapter, self.take, self.keeps_prefixes = sampling, adapter, take, keeps_prefixes
        self.timeout_s = config.request_timeout_s
        self.load = load
        self.has_cache_keys = config.deterministic
        self.records_routes = config.record_routes and sampling.is_for_training
        self.slots = asyncio.Semaphore(self.load.concurrency if self.load else 2 * config.running_requests)
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.cached_by_prompt: dict[int, set[int]] = defaultdict(set)
        """By prompt: the numbers of prompt tokens that its samples found in the prefix cache."""
        self.first_token_at = self.last_token_at = 0.0
        """Seconds since the epoch."""
        self.enough = asyncio.Event()
        self.seconds_to_first_tokens: list[float] = []
        """Seconds to the first token, of the prompts that were sent first with a request for one token."""

    @property
    def ttft_s(self) -> float:
        """Mean time to the first token; 0 if no prompt was sent first."""
        return fmean(self.seconds_to_first_tokens or [0.0])

    async def all_of(self, missing: Sequence[SampleRequest]) -> float:
        """Pass every sample to `take` as soon as it is finished. Returns the share of their prompt tokens that were in the prefix cache."""
        # A prompt with only one missing sample is sent first too: so its sample is computed as in an uninterrupted rollout.
        is_led = [wanted for wanted in missing if not (wanted.begun and self.has_cache_keys)]
        prompts = {wanted.prompt.prompt_id: wanted.prompt for wanted in is_led}.values()
        if self.load and self.sampling.group_size == 1:
            prompts = {}.values()  # no request would find it in the cache, and the time to the first token would not be that of a whole prompt
        async with self.sender.client() as client:
            begin = time.perf_counter()
            # Perf: 99.8% of the samples' prompt tokens are in the prefix cache then (7B, H200, docs/results/h200-hand-over.md).
            await asyncio.gather(*(self._lead(client, prompt) for prompt in prompts))
            sampling = asyncio.gather(*(self._sample(client, wanted) for wanted in missing))
            enough = asyncio.create_task(self._until_enough())
            await asyncio.wait((sampling, enough), return_when=asyncio.FIRST_COMPLETED)
            enough.cancel()
            if self.load:
                self.load.seconds += time.perf_counter() - begin
            if sampling.done():
                sampling.result()  # raises what a sample raised
            else:
                log.info("rollout: enough whole groups, what is still under way is aborted")
                await self._end(client, sampling)
        if self.has_cache_keys:
            self._warn_of_a_small_cache()
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    async def _until_enough(self) -> None:
        """Wait until there are enough samples: by this client's last one, or by those of other replicas."""
        while not self.enough.is_set():
            if self.share.is_over():
                self.enough.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.enough.wait(), None if self.share is WHOLE else LOOK_S)

    def _warn_of_a_small_cache(self) -> None:
        """In deterministic mode all samples of a prompt find equally much of it in the cache, unless the engine had to evict some of it."""
        if unlike := sum(len(found) > 1 for found in self.cached_by_prompt.values()):
            log.warning(
                "rollout: samples of %d of %d prompts found unequal parts of them in the prefix cache, which is too small for this rollout: last "
                "bits of log-probabilities may be others when it is made again (engine.kv_cache_tokens, engine.memory_fraction)",
                unlike,
                len(self.cached_by_prompt),
            )

    async def _end(self, client: aiohttp.ClientSession, sampling: "asyncio.Future[list[None]]") -> None:
        """Abort the requests under way. If prefixes are kept, each request returns its tokens so far. A request that had not reached the engine
        yet is caught by the next abort."""
        if not self.keeps_prefixes:
            left = list(self.sender.under_way)
            sampling.cancel()
            await asyncio.wait((sampling,))
            with suppress(asyncio.CancelledError):
                sampling.result()  # read, so that asyncio does not log it as an error that was never retrieved
            await self.sender.abort(client, left)
            return
        deadline = time.monotonic() + self.timeout_s
        while not sampling.done():
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"{self.sender.url}: what was aborted has not come back in {self.timeout_s:g} s")
            await self.sender.abort(client, self.sender.under_way)
            await asyncio.wait((sampling,), timeout=ABORT_AGAIN_S)
        sampling.result()

    def _question(self, prompt: Prompt, first: list[int], *, seed: int, max_new_tokens: int, part: str = "") -> GenerateRequest:
        """first: Tokens of the answer that were sampled before. part: Names a part of the prefix cache of the request's own."""
        sampling, key = self.sampling, f"{self.sender.token}-{prompt.prompt_id}{part}" if self.has_cache_keys else None
        tokens, name = prompt.prompt_tokens + first, self.adapter.served_name
        return GenerateRequest(
            *(tokens, name, sampling.temperature, max_new_tokens, seed, sampling.ignore_eos, key), top_p=sampling.nucleus
        )

    async def _lead(self, client: aiohttp.ClientSession, prompt: Prompt) -> None:
        begin = time.perf_counter()
        async with self.slots:
            if self.share.is_over():
                return
            await self._ask(client, self._question(prompt, [], seed=0, max_new_tokens=1))
        self.seconds_to_first_tokens.append(time.perf_counter() - begin)

    async def _sample(self, client: aiohttp.ClientSession, wanted: SampleRequest) -> None:
        prompt, index, begun = wanted
        first, said = (list(begun.output_tokens), list(begun.output_logprobs)) if begun else ([], [])
        seed, num_new = sample_seed(prompt.seed, index, len(first)), self.sampling.max_output_tokens - len(first)
        part = f"-{index}" if first else ""
        request = self._question(prompt, first, seed=seed, max_new_tokens=num_new, part=part)
        request = request._replace(returns_routes=self.records_routes)
        async with self.slots:
            if self.enough.is_set() or not self.share.begins(wanted.key):
                return
            answer = await (self._ask(client, request) if self.load is None else self._timed(client, request, self.load))
        self.num_prompt_tokens += len(request.tokens)
        self.num_cached_tokens += answer.num_cached
        if not first:
            self.cached_by_prompt[prompt.prompt_id].add(answer.num_cached)
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
                routes=answer.routes,
            )
        )
        if not is_more_needed:
            self.enough.set()

    async def _ask(self, client: aiohttp.ClientSession, request: GenerateRequest) -> GenerateResponse:
        answer = await self.sender.answered(client, request, self.sender.whole)
        self._tokens_came()
        return read_answer(self.api, lambda: parsed(answer), answer, request)

    async def _timed(self, client: aiohttp.ClientSession, request: GenerateRequest, load: Load) -> GenerateResponse:
        chunks, times = await self.sender.answered(client, request, self.sender.streamed)
        # Parsed when the request is complete: parsing in between would count as the engine's time.
        whole = b"\n".join(chunks)
        answer = read_answer(self.api, lambda: self.api.merge_chunks([parsed(chunk) for chunk in chunks]), whole, request)
        load.requests.append(RequestTiming(times[0], times[-1], len(answer.tokens)))
        self._tokens_came()
        return answer

    def _tokens_came(self) -> None:
        """Record the time of the first and the latest token. The first requests are for one token, so they end with it."""
        self.last_token_at = time.time()
        self.first_token_at = self.first_token_at or self.last_token_at


def read_answer(api: ServerApi, content: Callable[[], Any], answer: bytes, request: GenerateRequest) -> GenerateResponse:
    """Raises WrongAnswer if the response does not have the requested form."""
    try:
        return api.answer(content(), request)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise WrongAnswer(
            "the engine's answer has not the form that was asked for", {"answer": answer.decode(errors="replace")}
        ) from error
