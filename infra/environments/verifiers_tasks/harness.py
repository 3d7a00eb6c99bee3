"""A harness of verifiers that runs in its process: a chat loop with the taskset's tools. It starts and fetches nothing.

It takes the place of verifiers' ready harness `null` (verifiers/v1/harnesses/null, verifiers/v1/harnesses/utils/core.py in verifiers 0.4.0), which
does the same in a script that `uv` installs.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import verifiers.v1 as vf
from tokenizers import Tokenizer
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.core import gate_tool_call
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from infra.environments.verifiers_tasks.limits import LIMITS

__all__ = ["RatchetChatHarness"]
CUT = " [...] "
"""Stands for what is left out of a tool's result that is too long."""
Message = dict[str, Any]


class RatchetChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # verifiers has no types here
    """Asks for turns until an answer calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(each) for each in prompt or ()]
        )
        servers = {name: {"url": url, "timeout": LIMITS.get().turn_timeout_s} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            # Perf: verify=False reads no certificates, which is a tenth of a second a turn; the endpoint is plain HTTP on loopback
            client = await stack.enter_async_context(
                httpx.AsyncClient(
                    timeout=httpx.Timeout(None, connect=5.0), headers={"Authorization": f"Bearer {secret}"}, verify=False
                )
            )
            found = await connect_mcp({"mcpServers": servers}, stack)
            tools = _Tools(found, client, tool_interception_url, secret)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools.schemas} if tools.schemas else {})
                response = await client.post(f"{endpoint}/chat/completions", json=body)
                if response.is_error:
                    # of a limit the session and the trace know the reason
                    code = int(not _is_limit(response))
                    return vf.ProgramResult(exit_code=code, stdout="", stderr=response.text[-500:])
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    messages.append(await tools.answer(call))


class _Tools:
    """The taskset's tools, which its servers have."""

    def __init__(self, found: tuple[list[Message], Message, Message], client: Any, gate: str | None, secret: str) -> None:
        """found: Schemas, and how each is called. gate: Where verifiers wants to be asked before a call."""
        self.schemas, self.dispatch, self.servers = found
        self.client, self.gate, self.secret = client, gate, secret

    async def answer(self, call: Message) -> Message:
        """Make a call. What cannot be made or takes too long has an error as its result."""
        head = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
        if self.gate:
            asked = SimpleNamespace(id=call["id"], function=SimpleNamespace(**call["function"]))
            decision = await gate_tool_call(self.client, self.gate, self.secret, asked)
            if decision["action"] == "deny":
                denied: Message = decision["message"]
                return denied
        return head | {"content": cut(await self._result(call["function"]))}

    async def _result(self, function: Message) -> Any:
        name, limit_s = function["name"], LIMITS.get().turn_timeout_s
        if name not in self.dispatch:
            return f"error: no tool {name!r}; there are {', '.join(self.dispatch)}"
        try:
            arguments = json.loads(function["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ValueError(f"{arguments!r:.80} is no object")
        except ValueError as error:
            return f"error: arguments of {name!r}: {error}"
        # on record before it is made; a tool server is the episode's own, so that one that begins again makes its calls again
        call = LIMITS.get().journal.begin(name, arguments, LIMITS.get().repeats_tools)
        try:
            result = await asyncio.wait_for(call_mcp(self.servers, self.dispatch, name, arguments), limit_s)
        except TimeoutError:
            result = f"error: {name!r} took longer than environment.turn_timeout_s {limit_s:g}"
        if not call["is_done"]:
            is_error = isinstance(result, str) and result.startswith("error: ")
            LIMITS.get().journal.finish(call["key"], result, is_error)
        elif result != call["result"]:
            raise RuntimeError(f"tool {name!r} gives another result than the one on record: the taskset cannot be repeated")
        return result


def cut(content: Any) -> Any:
    """Cut the middle out of a text of more than max_observation_tokens."""
    most, path = LIMITS.get().max_observation_tokens, LIMITS.get().tokenizer
    if not isinstance(content, str) or len(content.encode()) <= most:  # a token has at least one byte
        return content
    encoded = Tokenizer.from_file(path).encode(content, add_special_tokens=False)
    if len(encoded.ids) <= most:
        return content
    begin, end = encoded.offsets[most // 2 - 1][1] if most > 1 else 0, encoded.offsets[-(most // 2)][0]
    return f"{content[:begin]}{CUT}{content[end:]}"


def _is_limit(response: Any) -> bool:
    """Whether the gateway says that the conversation has no room, or that the episode is over."""
    return "context_length_exceeded" in response.text or "episode_ended" in response.text
