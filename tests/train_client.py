"""A program that asks the gateway for two turns by verifiers' train client, in verifiers' own environment.

    python train_client.py BASE_URL MODEL_FOLDER      the key in the variable SESSION_API_KEY

Prints the token ids of its turns as JSON: prompts, answers and their log-probabilities.
"""

import asyncio
import json
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import resolve_client
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig


async def turns(base_url: str, folder: str) -> list[dict[str, Any]]:
    client = resolve_client(vf.TrainClientConfig(base_url=base_url, api_key_var="SESSION_API_KEY", renderer_model_name=folder))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 + 2? <say>It is 5.</say>"}]
    found = []
    for said in ("Sure? <say>It is 4.</say>", ""):
        body = {"model": "policy", "messages": messages}
        response = await client.get_response(ChatDialect(), body, SamplingConfig(temperature=1.0, max_tokens=24))
        tokens = response.tokens
        found.append({"prompt": tokens.prompt_ids, "answer": tokens.completion_ids, "logprobs": tokens.completion_logprobs})
        messages += [{"role": "assistant", "content": response.message.content}, {"role": "user", "content": said}]
    await client.close()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(turns(*sys.argv[1:]))))
