"""What the gateway adds to turns: `.venv/bin/python tests/benches/gateway.py [--sessions N] [--turns N] [--output-tokens N] [--delay S]`.

A server answers /generate after a fixed delay, in a process of its own. The same turns are sent to it twice in one run: by agents through
the gateway, which are in another process, and straight by their token ids. Prints the gateway's CPU seconds per 1,000 turns, those of the
requests without it, and the ratio of the two wall times. Seconds to a minute.
"""

import argparse
import asyncio
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

QUESTION, GOES_ON = "Ben has 12 pens and buys 30 more. How many pens has he? " * 6, "Are you sure? Count the pens again. " * 4


class Load(NamedTuple):
    sessions: int
    turns: int
    output_tokens: int
    delay_s: float


def answer_generate(port: Any, load: Load) -> None:
    """The engine: answers with fixed tokens, as SGLang writes them."""
    from aiohttp import web

    tokens = [100 + number % 300 for number in range(load.output_tokens)]
    about = {
        "finish_reason": {"type": "length"},
        "cached_tokens": 0,
        "output_token_logprobs": [[-0.123456789, token, None] for token in tokens],
    }

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(load.delay_s)
        return web.json_response({"output_ids": tokens, "meta_info": about})

    async def main() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


def run_agents(base_url: str, keys: Sequence[str], num_turns: int, ready: Any, begin: Any, done: Any, leave: Any) -> None:
    """ready, done: Semaphores; begin, leave: Events. Importing libraries and ending take seconds, which do not count."""
    import aiohttp

    ready.release()
    begin.wait()

    async def agent(client: aiohttp.ClientSession, key: str) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
        for _ in range(num_turns):
            body = {"model": "policy", "messages": messages}
            async with client.post(
                f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            ) as response:
                message = (await response.json())["choices"][0]["message"]
            messages += [message, {"role": "user", "content": GOES_ON}]

    async def main() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            await asyncio.gather(*(agent(client, key) for key in keys))

    asyncio.run(main())
    done.release()
    leave.wait()


def model_folder(folder: Path) -> Path:
    """The tiny models' tokenizer."""
    from infra.tiny_model.tokenizer import train_tokenizer

    train_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 640, "architectures": ["Qwen3ForCausalLM"]}')
    return folder


class Measured(NamedTuple):
    wall_s: float
    cpu_s: float


async def measure(load: Load, folder: Path, url: str) -> tuple[Measured, Measured]:
    """Through the gateway, and straight."""
    from infra.config import EngineConfig
    from infra.engines.server.transport import Sender
    from infra.engines.server.turns import TurnClient
    from infra.engines.sglang.generate_api import Generate
    from infra.gateway.rendering.admission import renderer_of
    from infra.records import AdapterVersion, BaseModelRef

    base = BaseModelRef(id=str(folder), sha256="0")
    adapter = AdapterVersion(run="r", version=0, base=base, rank=1, alpha=1, target_modules=("q_proj",), seed=0)
    sender = Sender(Generate([2]), url, "/health", 600)
    async with sender.client() as client:
        turns = TurnClient(sender, client, EngineConfig(max_running_requests=load.sessions), adapter)
        through, asked = await through_gateway(turns, renderer_of(folder), load, folder / "turns.journal")
        return through, await straight(turns, asked, load)


async def through_gateway(
    turns: Any, renderer: Any, load: Load, journal_path: Path, num_processes: int = 1, seed: int = 0
) -> tuple[Measured, list[Any]]:
    """All sessions by agents in other processes. Returns what it took until the last agent had its last answer, and the trajectories."""
    from infra.gateway.http.server import Gateway
    from infra.gateway.session.records import TurnJournal
    from infra.gateway.session.session import Episode, TurnLimits

    limits = TurnLimits(1.0, load.output_tokens, 1 << 20, ignore_eos=True)
    spawned = mp.get_context("spawn")
    ready, done, begin, leave = spawned.Semaphore(0), spawned.Semaphore(0), spawned.Event(), spawned.Event()
    with TurnJournal(journal_path, {}) as journal:
        async with Gateway.serving(turns, renderer, limits, journal.add) as gateway:
            opened = [gateway.open_session(Episode(f"{n}", n, 0, seed + n)) for n in range(load.sessions)]
            keys = [each.api_key for each in opened]
            agents = [
                spawned.Process(
                    target=run_agents,
                    args=(gateway.base_url, keys[number::num_processes], load.turns, ready, begin, done, leave),
                )
                for number in range(num_processes)
            ]
            for each in agents:
                each.start()
            await asyncio.to_thread(lambda: [ready.acquire() for _ in agents])
            begin.set()
            took = await clocked(asyncio.to_thread(lambda: [done.acquire() for _ in agents]))
            leave.set()
            await asyncio.to_thread(lambda: [each.join() for each in agents])
    trajectories = [trajectory for each in opened for trajectory in each.session.trajectories()]
    assert [trajectory.num_turns for trajectory in trajectories] == [load.turns] * load.sessions
    return took, trajectories


async def straight(turns: Any, asked: Sequence[Any], load: Load) -> Measured:
    """The same conversations by token ids alone: what each turn was given is given again, behind the answers that come now. So the prefix cache
    finds what it finds for the gateway."""
    from infra.engines.interface import TurnRequest

    async def again(number: int, trajectory: Any) -> None:
        tokens: list[int] = []
        for segment in trajectory.segments:
            if segment.is_sampled:
                request = TurnRequest(number, 0, tokens, segment.sampling_seed, 1.0, load.output_tokens, ignore_eos=True)
                tokens = [*tokens, *(await turns.sample(request)).output_tokens]
            else:
                tokens = [*tokens, *segment.tokens]

    return await clocked(asyncio.gather(*(again(number, each) for number, each in enumerate(asked))))


async def clocked(work: Any) -> Measured:
    begin, cpu = time.perf_counter(), time.process_time()
    await work
    return Measured(time.perf_counter() - begin, time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--delay", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    load, port = Load(given.sessions, given.turns, given.output_tokens, given.delay), mp.get_context("spawn").Queue()
    engine = mp.get_context("spawn").Process(target=answer_generate, args=(port, load), daemon=True)
    engine.start()
    with tempfile.TemporaryDirectory() as workspace:
        os.environ["RATCHET_WORKSPACE"] = workspace
        folder, url = model_folder(Path(workspace)), f"http://127.0.0.1:{port.get()}"
        for _ in range(given.repeats):
            (folder / "turns.journal").unlink(missing_ok=True)
            through, straight = asyncio.run(measure(load, folder, url))
            a_thousand = 1000 / (load.sessions * load.turns)
            print(
                f"{load.sessions} sessions of {load.turns} turns: gateway {through.cpu_s * a_thousand:.2f} s of CPU per 1,000 turns, "
                f"straight {straight.cpu_s * a_thousand:.2f} s; wall {through.wall_s:.2f} s against {straight.wall_s:.2f} s",
                flush=True,
            )
    engine.terminate()


if __name__ == "__main__":
    main()
