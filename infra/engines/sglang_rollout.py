"""The requests of one rollout to SGLang's /generate: token ids out, token ids with log-probabilities back; one request for one sample."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from infra import base_model
from infra.config import EngineConfig, SamplingConfig
from infra.engines import server
from infra.engines.base import Wanted
from infra.engines.sglang_memory import BASE_VERSION
from infra.failures import EngineUnavailable, WrongAnswer
from infra.prompts import Prompt, sample_seed
from infra.records import AdapterVersion
from infra.samples import Sample

log = logging.getLogger(__name__)


def parsed(response: httpx.Response) -> dict[str, Any]:
    """The answer to /generate.

    Raises:
        WrongAnswer: if it is not of the form that was asked for.
    """
    try:
        answer = response.json()
        num_tokens, about = len(answer["output_ids"]), answer["meta_info"]
        if {"output_token_logprobs", "finish_reason", "cached_tokens"} <= about.keys() and num_tokens >= 0:
            return dict(answer)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise WrongAnswer("the engine's answer has not the form that was asked for", {"answer": response.text})


def values(answer: dict[str, Any], name: str) -> list[float]:
    """nan where the engine gives none: JSON has no word for it."""
    return [float("nan") if value is None else float(value) for value, *_ in answer["meta_info"][name]]


def check_version(answer: dict[str, Any], version: str) -> None:
    """With merged weights no request can name its adapter; each answer says which weights gave it.

    Raises:
        WrongAnswer: if they are not those of this version.
    """
    said = answer["meta_info"].get("weight_version")
    if said != version:
        raise WrongAnswer(f"the engine answered with weights {said!r}, asked for {version!r}", {"answer": answer})


class Rollout:
    """All requests of one rollout: first each prompt alone, then each of its samples."""

    def __init__(
        self,
        config: EngineConfig,
        model_folder: Path,
        url: str,
        sampling: SamplingConfig,
        adapter: AdapterVersion,
        take: Callable[[Sample], bool],
    ) -> None:
        self.url, self.sampling, self.adapter, self.take = url, sampling, adapter, take
        self.is_merged = config.serve == "merged"
        self.timeout_s = config.request_timeout_s
        self.stop_token_ids = base_model.stop_token_ids(model_folder)
        self.slots = asyncio.Semaphore(2 * config.max_running_requests)
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.enough = asyncio.Event()

    async def all_of(self, missing: Sequence[Wanted]) -> float:
        """Give every sample to `take` as soon as it is finished; the share of their prompt tokens that were in the prefix cache."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # A prompt of which one sample is missing goes first too: its sample then comes about as it would have in one go.
        prompts = {wanted.prompt.prompt_id: wanted.prompt for wanted in missing}.values()
        async with httpx.AsyncClient(headers=server.authorization(), timeout=self.timeout_s, limits=limits) as client:
            await asyncio.gather(*(self._ask(client, prompt, seed=0, max_new_tokens=1) for prompt in prompts))
            sampling = asyncio.gather(*(self._sample(client, wanted) for wanted in missing))
            enough = asyncio.create_task(self.enough.wait())
            await asyncio.wait((sampling, enough), return_when=asyncio.FIRST_COMPLETED)
            enough.cancel()
            if sampling.done():
                sampling.result()  # raises what a sample raised
            else:
                sampling.cancel()
                await asyncio.wait((sampling,))
                await self._break_off(client)
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    async def _break_off(self, client: httpx.AsyncClient) -> None:
        log.info("rollout: enough whole groups, what is still under way is broken off")
        try:
            server.answered(await client.post(f"{self.url}/abort_request", json={"abort_all": True}))
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{self.url}/abort_request: {type(error).__name__} {error}") from error

    async def _sample(self, client: httpx.AsyncClient, wanted: Wanted) -> None:
        prompt, index = wanted
        seed = sample_seed(prompt.seed, index)
        answer = await self._ask(client, prompt, seed=seed, max_new_tokens=self.sampling.max_output_tokens)
        about = answer["meta_info"]
        self.num_prompt_tokens += len(prompt.prompt_tokens)
        self.num_cached_tokens += int(about["cached_tokens"])
        is_more_needed = self.take(
            Sample(
                prompt_id=prompt.prompt_id,
                sample_index=index,
                prompt_tokens=prompt.prompt_tokens,
                output_tokens=answer["output_ids"],
                output_logprobs=values(answer, "output_token_logprobs"),
                finish_reason=(about["finish_reason"] or {}).get("type", "error"),
                adapter_version=self.adapter.version,
                adapter_sha256=self.adapter.sha256,
            )
        )
        if not is_more_needed:
            self.enough.set()

    async def _ask(self, client: httpx.AsyncClient, prompt: Prompt, *, seed: int, max_new_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "input_ids": prompt.prompt_tokens,
            "sampling_params": {
                "temperature": self.sampling.temperature,
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": self.stop_token_ids,
                "sampling_seed": seed,
            },
            "return_logprob": True,
        }
        if not self.is_merged:
            body["lora_path"] = self.adapter.served_name
        async with self.slots:
            try:
                response = await client.post(f"{self.url}/generate", json=body)
            except httpx.HTTPError as error:
                raise EngineUnavailable(f"{self.url}/generate: {type(error).__name__} {error}") from error
        answer = parsed(server.answered(response))
        if self.is_merged:
            check_version(answer, self.adapter.served_name or BASE_VERSION)
        return answer
