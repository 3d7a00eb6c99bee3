"""`/inference/v1/generate`, the endpoint of token ids that verifiers' train client asks, in front of the scripted engine."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conversations import MakeModel

from infra.config import EngineConfig
from infra.engines import open_engine
from infra.gateway.http.server import Gateway, OpenSession
from infra.gateway.rendering.admission import renderer_of
from infra.gateway.session.records import TurnRecord
from infra.gateway.session.session import Episode, TurnLimits
from infra.models import base_model
from infra.records import AdapterVersion, BaseModelRef
from infra.settings import CHECKOUT

Post = Callable[..., Awaitable[tuple[int, Any]]]
TRAIN_CLIENT = Path(__file__).parents[2] / "train_client.py"
SAMPLING = {"logprobs": 1, "skip_special_tokens": False, "temperature": 1.0, "max_tokens": 9}


def served(folder: Path, agent: Callable[[OpenSession, Post], Awaitable[object]], records: list[TurnRecord]) -> OpenSession:
    base = BaseModelRef(id=str(folder), sha256="b")
    adapter = AdapterVersion(run="r", version=0, base=base, rank=1, alpha=1.0, target_modules=("q_proj",), seed=0)
    engine = open_engine(EngineConfig(kind="scripted"), adapter)
    engine.wake()
    engine.load_adapter(adapter)
    limits = TurnLimits(1.0, 64, 2048, stop_token_ids=frozenset(base_model.stop_token_ids(folder)))

    async def all_of_it() -> OpenSession:
        async with engine.turns(adapter) as turns, Gateway.serving(turns, renderer_of(folder), limits, records.append) as gateway:
            opened = gateway.open_session(Episode("0/0", 0, 0, 5))
            url = opened.base_url.removesuffix("/v1") + "/inference/v1/generate"
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {opened.api_key}"}) as client:

                async def post(tokens: object, **more: Any) -> tuple[int, Any]:
                    body = {"model": "policy", "token_ids": tokens, "sampling_params": SAMPLING} | more
                    async with client.post(url, json=body) as response:
                        return response.status, await response.json()

                await agent(opened, post)
            return opened

    return asyncio.run(all_of_it())


def test_token_ids_go_in_and_the_sampled_ones_come_out(model_of: MakeModel, workspace: Path) -> None:
    records: list[TurnRecord] = []
    folder = model_of("ChatML")

    async def agent(opened: OpenSession, post: Post) -> None:
        stops = SAMPLING | {"stop_token_ids": base_model.stop_token_ids(folder)}
        status, answer = await post([4, 5, 6], sampling_params=stops, cache_salt="0", priority=1)
        (choice,) = answer["choices"]
        assert status == 200 and choice["token_ids"] == records[0].output_tokens
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == records[0].output_logprobs
        assert choice["finish_reason"] == records[0].finish_reason and len(choice["token_ids"]) <= 9
        _, second = await post([4, 5, 6, *choice["token_ids"], 7, 8])
        assert second["request_id"] != answer["request_id"]

    opened = served(folder, agent, records)
    (trajectory,) = opened.session.trajectories("done")
    assert [each.tokens for each in trajectory.segments] == [
        (4, 5, 6), tuple(records[0].output_tokens), (7, 8), tuple(records[1].output_tokens),
    ]  # fmt: skip
    assert opened.session.counts.branches == 0


def test_tokens_that_do_not_extend_the_record_are_a_branch(model_of: MakeModel, workspace: Path) -> None:
    records: list[TurnRecord] = []

    async def agent(opened: OpenSession, post: Post) -> None:
        _, answer = await post([4, 5, 6])
        said = answer["choices"][0]["token_ids"]
        await post([4, 5, 6, *said[:-1], said[-1] + 1, 7])

    opened = served(model_of("ChatML"), agent, records)
    first, second = opened.session.trajectories("done")
    assert opened.session.counts.branches == 1
    assert [each.is_sampled for each in second.segments] == [False, True]
    assert first.segments[1].tokens == tuple(records[0].output_tokens)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"token_ids": []}, "token_ids is [], must be a list of token ids"),
        ({"token_ids": ["a"]}, "token_ids is ['a'], must be a list of token ids"),
        ({"sampling_params": {"temperature": 0.5}}, "temperature is 0.5, this rollout samples at 1"),
        ({"sampling_params": {"top_k": 5}}, "top_k is 5, it must be"),
        ({"sampling_params": {"min_tokens": 5}}, "min_tokens is 5, it must be"),
        ({"sampling_params": {"unheard_of": 5}}, "unheard_of is not supported"),
        ({"sampling_params": {"logprobs": 3}}, "logprobs is 3, it must be 1"),
        ({"sampling_params": {"stop_token_ids": [3]}}, "stop_token_ids has [3], which end no answer of this model"),
        ({"sampling_params": {"stop_token_ids": 5}}, "stop_token_ids is 5, must be a list of token ids"),
        ({"sampling_params": {"stop_token_ids": ["a", 3]}}, "stop_token_ids is ['a', 3], must be a list of token ids"),
        ({"token_ids": [4, 999_999]}, "token id 999999 is not in the model's vocabulary"),
        ({"sampling_params": []}, "sampling_params is [], must be an object"),
        ({"features": {}}, "features is not supported"),
        ({"stream": True}, "stream is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(model_of: MakeModel, workspace: Path, more: dict[str, Any], said: str) -> None:
    async def agent(opened: OpenSession, post: Post) -> None:
        status, answer = await post([4, 5, 6], **more)
        assert (status, said in answer["error"]["message"]) == (400, True), answer

    records: list[TurnRecord] = []
    served(model_of("ChatML"), agent, records)
    assert not records


@pytest.mark.full
@pytest.mark.skipif(
    not (CHECKOUT / ".venv-verifiers/bin/python").exists(),
    reason="no verifiers: `python3 infra/setup/bootstrap.py --verifiers` makes it",
)
def test_the_train_client_of_verifiers_gets_exact_tokens(random_tiny: Path, workspace: Path) -> None:
    records: list[TurnRecord] = []
    said: list[dict[str, list[Any]]] = []

    async def agent(opened: OpenSession, post: Post) -> None:
        command = [str(CHECKOUT / ".venv-verifiers/bin/python"), str(TRAIN_CLIENT), opened.base_url, str(random_tiny)]
        variables = os.environ | {"SESSION_API_KEY": opened.api_key}
        program = await asyncio.create_subprocess_exec(*command, env=variables, stdout=asyncio.subprocess.PIPE)
        printed, _ = await program.communicate()
        said.extend(json.loads(printed.splitlines()[-1]))

    opened = served(random_tiny, agent, records)
    (trajectory,) = opened.session.trajectories("done")
    assert [turn["answer"] for turn in said] == [record.output_tokens for record in records]
    assert [turn["logprobs"] for turn in said] == [record.output_logprobs for record in records]
    assert [*said[1]["prompt"], *said[1]["answer"]] == list(trajectory.tokens)
    assert opened.session.counts.branches == 0 and [each.is_sampled for each in trajectory.segments] == [False, True] * 2
