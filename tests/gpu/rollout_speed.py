"""What serves rollouts fastest: base and adapter, beside the weights and merged into them, by LoRA backend and form of request.

    python tests/gpu/rollout_speed.py OUT.json --model FOLDER [--backends csgmv triton] [--set FIELD=VALUE ...]

One table, a row for each case: tokens a second, and as a share of the base model on a server without LoRA. Forms of request: `ours`
(each prompt first alone, then one request for each sample), `no leader` (the same without the first), `one batch` (all in one request).
"""

import asyncio
import time
from typing import Any

import httpx
from bench import Bench, parser, timed_rollout

from infra import base_model
from infra.engines import server
from infra.engines.base import Engine
from infra.prompts import Prompt, sample_seed
from infra.records import AdapterVersion

TIMEOUT_S = 300
CPU_BACKEND = "torch_native"


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--backends", nargs="+", default=["csgmv", "triton"])
    options = p.parse_args()
    bench = Bench(options, "rollout-speed")
    adapter, base, rows = bench.adapter(), bench.base(), {}
    backends = [CPU_BACKEND] if options.small else options.backends

    def add(name: str, figures: dict[str, Any]) -> None:
        rows[name] = figures
        bench.say(rows=rows)

    try:
        engine = bench.engine(adapter, serve="merged")
        for name, version in {"base, no LoRA": base, "merged": adapter}.items():
            add(name, measured(bench, engine, version))
        engine.stop()
        for backend in backends:
            if not bench.has_time_for(120):
                break
            flags = () if options.small else ("--lora-backend", backend)
            engine = bench.engine(adapter, extra_flags=(*bench.config.engine.extra_flags, *flags))
            add(f"base, LoRA server, {backend}", measured(bench, engine, base))
            add(f"adapter, {backend}", measured(bench, engine, adapter))
            for form in ("no leader", "one batch"):
                if bench.has_time_for(60):
                    add(f"adapter, {backend}, {form}", in_form(bench, form, adapter))
            engine.stop()
    finally:
        server.stop_recorded()
    best = rows["base, no LoRA"]["tokens_per_s"]
    for name, row in rows.items():
        print(f"| {name} | {row['tokens_per_s']:.0f} | {100 * row['tokens_per_s'] / best:.0f}% |")
    print("done")


def measured(bench: Bench, engine: Engine, adapter: AdapterVersion) -> dict[str, Any]:
    """The second of two rollouts: the first compiles kernels and fills the slots."""
    begin = time.monotonic()
    engine.wake()
    engine.load_adapter(adapter)
    ready_s = time.monotonic() - begin
    few = bench.prompts()[:8]
    timed_rollout(engine, few, bench.config.sampling.but(max_output_tokens=8), adapter)
    return {"ready_s": ready_s} | timed_rollout(engine, bench.prompts(), bench.config.sampling, adapter)


def in_form(bench: Bench, form: str, adapter: AdapterVersion) -> dict[str, Any]:
    """Another form of request than ours, straight to the server; its cache is emptied first."""
    state = server.recorded()
    assert state is not None
    server.post(state.url, "/flush_cache", {}, TIMEOUT_S)
    requests = [request(bench, prompt, n, adapter) for prompt in bench.prompts() for n in range(bench.options.group)]
    begin = time.monotonic()
    if form == "one batch":
        together = {name: [each[name] for each in requests] for name in ("input_ids", "sampling_params", "lora_path")}
        answers = server.post(state.url, "/generate", together | {"return_logprob": True}, TIMEOUT_S).json()
    else:
        answers = asyncio.run(all_at_once(state.url, requests))
    seconds = time.monotonic() - begin
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    return {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}


def request(bench: Bench, prompt: Prompt, number: int, adapter: AdapterVersion) -> dict[str, Any]:
    sampling = {
        "temperature": 1.0,
        "max_new_tokens": bench.options.output_tokens,
        "stop_token_ids": base_model.stop_token_ids(base_model.locate(bench.options.model)),
        "sampling_seed": sample_seed(prompt.seed, number),
    }
    return {
        "input_ids": prompt.prompt_tokens,
        "sampling_params": sampling,
        "return_logprob": True,
        "lora_path": adapter.served_name,
    }


async def all_at_once(url: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=server.authorization(), timeout=TIMEOUT_S, limits=limits) as client:
        answers = await asyncio.gather(*(client.post(f"{url}/generate", json=each) for each in requests))
    return [answer.raise_for_status().json() for answer in answers]


if __name__ == "__main__":
    main()
