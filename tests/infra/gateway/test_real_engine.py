"""Four turns with a tool's result from the real SGLang, by an agent that knows only OpenAI's protocol.

What was sampled is counted from the journal's lines by this file's own code, and each sampled token's log-probability is computed again by
transformers: it would differ if any token before it was another.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from flows.presets import smoke
from infra.engines import open_engine
from infra.engines.server import server_process
from infra.gateway.http.server import Gateway, OpenSession
from infra.gateway.rendering.admission import renderer_of
from infra.gateway.session.records import TurnJournal
from infra.gateway.session.session import Episode, TurnLimits
from infra.models import base_model
from infra.records import AdapterVersion
from infra.trajectories.segments import Trajectory

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]
NUM_TURNS, NUM_EPISODES = 4, 3
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 17, "b": 25}'}}


@pytest.fixture
def ends_engine(workspace: Path) -> Iterator[None]:
    yield
    server_process.stop_recorded()


async def agent(opened: OpenSession, number: int) -> None:
    """Sends back what it got, as an agent does."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"What is 17 + 2{number}?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    headers = {"Authorization": f"Bearer {opened.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        for turn in range(NUM_TURNS):
            body = {"model": opened.model, "messages": messages, "max_tokens": 12}
            async with client.post(f"{opened.base_url}/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": f"And {turn}?"})


def sequences_of(journal: Path) -> dict[str, list[tuple[list[int], list[float] | None]]]:
    """By episode: tokens with their log-probabilities, or without where they were given."""
    found: dict[str, list[tuple[list[int], list[float] | None]]] = {}
    for line in journal.read_text().splitlines()[1:]:
        turn = json.loads(line.split(" ", 1)[1])
        parts = found.setdefault(turn["episode"], [])
        assert turn["base"] == (turn["number"] - 1 if turn["number"] else None)
        parts += [(turn["given_tokens"], None), (turn["output_tokens"], turn["output_logprobs"])]
    return found


def computed_again(model: Any, parts: list[tuple[list[int], list[float] | None]]) -> float:
    """Largest difference of a sampled token's log-probability, in nats."""
    tokens = torch.tensor([[token for part, _ in parts for token in part]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits[0].double(), -1)
    worst, begin = 0.0, 0
    for part, values in parts:
        for offset, value in enumerate(values or ()):
            worst = max(worst, abs(float(logprobs[begin + offset - 1, part[offset]]) - value))
        begin += len(part)
    return worst


@pytest.mark.usefixtures("ends_engine")
def test_every_trained_token_was_sampled_by_the_real_engine(random_tiny: Path, workspace: Path) -> None:
    adapter = AdapterVersion(
        run="r", version=0, base=base_model.reference(str(random_tiny)), rank=4, alpha=8, target_modules=("q_proj",), seed=0
    )
    engine = open_engine(smoke().engine, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    limits = TurnLimits(temperature=1.0, max_output_tokens=16, max_context_tokens=smoke().engine.max_context_tokens)

    async def rollout(path: Path) -> list[Trajectory]:
        with TurnJournal(path, {"adapter": adapter.sha256}) as journal:
            async with (
                engine.turns(adapter) as turns,
                Gateway.serving(turns, renderer_of(random_tiny), limits, journal.add) as gateway,
            ):
                episodes = [Episode(f"{n}/0", n, 0, seed=n) for n in range(NUM_EPISODES)]
                opened = [gateway.open_session(each, journal.records.get(each.key, ())) for each in episodes]
                await asyncio.gather(*(agent(each, number) for number, each in enumerate(opened)))
                return [trajectory for each in opened for trajectory in each.session.trajectories("done")]

    path = workspace / "turns.journal"
    trajectories = asyncio.run(rollout(path))
    assert [trajectory.num_turns for trajectory in trajectories] == [NUM_TURNS] * NUM_EPISODES
    sequences, model = sequences_of(path), AutoModelForCausalLM.from_pretrained(str(random_tiny), dtype=torch.float32)
    for trajectory in trajectories:
        parts = sequences[trajectory.episode]
        trained = [token for segment in trajectory.segments if segment.is_sampled for token in segment.tokens]
        assert trained == [token for part, values in parts if values for token in part]
        assert list(trajectory.tokens) == [token for part, _ in parts for token in part]
        assert computed_again(model, parts) < 1e-3
    num_lines = len(path.read_text().splitlines())
    assert [each.sha256 for each in asyncio.run(rollout(path))] == [each.sha256 for each in trajectories]
    assert len(path.read_text().splitlines()) == num_lines == 1 + NUM_TURNS * NUM_EPISODES, "no turn was sampled twice"
