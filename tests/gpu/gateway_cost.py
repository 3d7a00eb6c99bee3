"""What the gateway costs on a GPU: the same turns by agents through it, and straight by token ids to the same engine.

    PYTHONPATH=.:tests/gpu:tests/benches python tests/gpu/gateway_cost.py OUT.json --model FOLDER [--sessions 512] [--turns 4]
        [--output-tokens 128] [--rounds 6] [--processes 8]

Agents are in other processes and speak OpenAI's protocol. Both begin with an empty prefix cache, with equal seeds and equal lengths (end-of-
sequence tokens are ignored), and take turns at being first. Prints the seconds of each round, the ratio of the medians, and CPU seconds of
this process per 1,000 turns. Round 0, in which kernels are loaded, does not count.
"""

import asyncio
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench import Bench, parser
from gateway import Load, Measured, straight, through_gateway

from infra.engines.server import server_process
from infra.gateway.rendering.admission import renderer_of
from infra.models import base_model
from infra.records import AdapterVersion

PORTION = 1000
"""Turns for which CPU seconds are given."""


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--sessions", type=int, default=512)
    p.add_argument("--turns", type=int, default=4)
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--processes", type=int, default=8)
    p.set_defaults(output_tokens=128, prompt_tokens=1536)
    options = p.parse_args()
    bench = Bench(options, "agents")
    if options.small:
        options.sessions, options.turns, options.output_tokens, options.prompt_tokens = 8, 3, 24, 400
    load = Load(options.sessions, options.turns, options.output_tokens, 0.0)
    adapter = bench.adapter()
    engine = bench.engine(
        adapter, max_running_requests=load.sessions, max_context_tokens=options.prompt_tokens + options.output_tokens
    )
    try:
        engine.wake()
        engine.load_adapter(adapter)
        found = asyncio.run(rounds(engine, adapter, bench, load))
    finally:
        server_process.stop_recorded()
    bench.say(**found)
    print("done")


async def rounds(engine: Any, adapter: AdapterVersion, bench: Bench, load: Load) -> dict[str, Any]:
    """Measure both, round after round."""
    options, renderer = bench.options, renderer_of(base_model.locate(adapter.base.id))
    made: dict[str, list[Measured]] = {"gateway": [], "straight": []}
    trajectories: list[Any] = []
    async with engine.turns(adapter) as turns:

        async def one(kind: str, number: int) -> Measured:
            nonlocal trajectories
            state = server_process.recorded()
            assert state
            await asyncio.to_thread(server_process.post, state.url, "/flush_cache", {}, 60)
            if kind == "straight":
                return await straight(turns, trajectories, load)
            with TemporaryDirectory() as folder:
                journal = Path(folder) / "turns.journal"
                took, trajectories = await through_gateway(turns, renderer, load, journal, options.processes)
            return took

        for number in range(options.rounds + 1):
            order = ("straight", "gateway") if number % 2 == 0 and number else ("gateway", "straight")
            for kind in order:
                took = await one(kind, number)
                made[kind] += [took] if number else []
            bench.say(**{kind: [each._asdict() for each in each_round] for kind, each_round in made.items()})
    wall = {kind: median(each.wall_s for each in each_round) for kind, each_round in made.items()}
    cpu = {kind: median(each.cpu_s for each in each_round) for kind, each_round in made.items()}
    num_turns = load.sessions * load.turns
    sampled = num_turns * load.output_tokens
    given = sum(len(s.tokens) for each in trajectories for s in each.segments if not s.is_sampled)
    return {
        "sampled_tokens": sampled,
        "given_tokens": given,
        "gateway_overhead_frac": wall["gateway"] / wall["straight"] - 1,
        "sampled_tokens_per_s": {kind: sampled / seconds for kind, seconds in wall.items()},
        f"cpu_s_per_{PORTION}_turns": {kind: seconds * PORTION / num_turns for kind, seconds in cpu.items()},
    }


if __name__ == "__main__":
    main()
