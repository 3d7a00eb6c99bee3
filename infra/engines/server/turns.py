"""Turns of episodes from an engine that is a server: each is one request for one completion, with its own seed, as in a rollout."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp

from infra.config import EngineConfig
from infra.engines.interface import TurnRequest
from infra.engines.server.generation import read_answer
from infra.engines.server.server_process import ServerState
from infra.engines.server.transport import GenerateRequest, Sender, ServerApi, parsed
from infra.processes import logs
from infra.records import AdapterVersion
from infra.store.samples import Sample


class TurnClient:
    """Sends turns; see Turns in infra/engines/interface.py."""

    def __init__(self, sender: Sender, client: aiohttp.ClientSession, config: EngineConfig, adapter: AdapterVersion) -> None:
        self.sender, self.client, self.adapter = sender, client, adapter
        self.is_deterministic = config.deterministic
        self.slots = asyncio.Semaphore(2 * config.running_requests)
        self.num_prompt_tokens = self.num_cached_tokens = 0

    async def sample(self, request: TurnRequest) -> Sample:
        async with self.slots:
            sent = self._request(request)
            data = await self.sender.answered(self.client, sent, self.sender.whole)
        answer = read_answer(self.sender.api, lambda: parsed(data), data, sent)
        self.num_prompt_tokens += len(request.tokens)
        self.num_cached_tokens += answer.num_cached
        return Sample(
            prompt_id=request.prompt_id,
            sample_index=request.sample_index,
            prompt_tokens=request.tokens,
            output_tokens=answer.tokens,
            output_logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            adapter_version=self.adapter.version,
            adapter_sha256=self.adapter.sha256,
        )

    def _request(self, turn: TurnRequest) -> GenerateRequest:
        # In deterministic mode no turn finds anything in the prefix cache: what it would find depends on where a killed episode resumed.
        key = f"{self.sender.token}-{self.sender.num_asked}" if self.is_deterministic else None
        name = self.adapter.served_name
        return GenerateRequest(
            turn.tokens, name, turn.temperature, turn.max_new_tokens, turn.seed, ignore_eos=turn.ignore_eos, cache_key=key
        )


@asynccontextmanager
async def turn_client(
    api: ServerApi,
    config: EngineConfig,
    state: ServerState,
    adapter: AdapterVersion,
    health_path: str,
    on_log_line: Callable[[str], None],
) -> AsyncIterator[TurnClient]:
    """health_path: Path of the server that returns 200 while it is healthy."""
    sender = Sender(api, state.url, health_path, config.request_timeout_s)
    with logs.followed(state.log_path, on_log_line):
        async with sender.client() as client:
            yield TurnClient(sender, client, config, adapter)
            if api.aborts_by_id:
                await sender.abort(client, list(sender.under_way))
