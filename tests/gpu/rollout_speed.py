"""What serves rollouts fastest: base and adapter, beside the weights and merged into them, by LoRA backend and form of request.

    python tests/gpu/rollout_speed.py OUT.json --model FOLDER [--backends csgmv 'csgmv --max-lora-chunk-size 128' triton] [--blocks 256 512]
        [--variants 'quantization=fp8' 'SGLANG_EXPERIMENTAL_LORA_OPTI=1 SGLANG_TWO_STREAM_MAX_TOKENS=512' '--num-continuous-decode-steps 4']
        [--forms] [--profile] [--only-lora] [--set FIELD=VALUE ...]

One table, a row for each case: tokens a second, and as a share of the base model on a server without LoRA. Every sample has
--output-tokens tokens. --forms: other forms of request than ours (each prompt first alone, then one request for each sample), with the
first backend: `no leader` (the same without the first), `one batch` (all in one request). --profile: what a decoding step's kernels take.
--variants: the adapter again: words in capitals with `=` are environment variables of the server, others with `=` are fields of
the section `engine`, the rest are flags.
--blocks: csgmv again with blocks of so many columns (lora_blocks.py). --only-lora: without the first two rows.
"""

import argparse
import asyncio
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from bench import Bench, parser, timed_rollout
from kernel_times import profiled
from lora_blocks import VARIABLE, write_blocks

from infra.config import EngineConfig
from infra.data.prompts import Prompt, sample_seed
from infra.engines import check_config
from infra.engines.interface import Engine, RolloutRequest
from infra.engines.server import server_process
from infra.machine import devices
from infra.models import base_model
from infra.models.architecture import read_architecture
from infra.records import AdapterVersion
from infra.settings import settings

TIMEOUT_S = 300
CPU_BACKEND = "torch_native"
ALL_UNDER_WAY = 0.4
"""Of a rollout's seconds: by then every sample has been prefilled, and none is finished."""


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--backends", nargs="+", default=["csgmv", "csgmv --max-lora-chunk-size 128", "triton"])
    p.add_argument("--variants", nargs="+", default=[])
    p.add_argument("--blocks", nargs="+", type=int, default=[])
    p.add_argument("--only-lora", action="store_true")
    p.add_argument("--forms", action="store_true")
    p.add_argument("--profile", action="store_true")
    options = p.parse_args()
    bench = Bench(options, "rollout-speed")
    adapter, base, rows = bench.adapter(), bench.base(), {}

    def add(name: str, figures: dict[str, Any]) -> None:
        rows[name] = figures
        bench.say(rows=rows)

    try:
        if not options.only_lora:
            engine = bench.engine(adapter, lora_mode="merged")
            for name, version in {"base, no LoRA": base, "merged": adapter}.items():
                add(name, measured(bench, engine, version))
            engine.stop()
        servers = kinds(options)
        for name, flags, columns in servers:
            if not bench.has_time_for(120):
                break
            with blocks_of(bench, columns):
                engine = bench.engine(adapter, extra_flags=(*bench.config.engine.extra_flags, *flags))
                add(f"base, LoRA server, {name}", measured(bench, engine, base))
                add(f"adapter, {name}", measured(bench, engine, adapter))
                for form in ("no leader", "one batch") if options.forms and name == servers[0][0] else ():
                    if bench.has_time_for(60):
                        add(f"adapter, {name}, {form}", in_form(bench, form, adapter))
                engine.stop()
        for variant in options.variants:
            if not bench.has_time_for(120):
                break
            add(f"adapter, {variant}", of_variant(bench, variant, adapter))
    finally:
        server_process.stop_recorded()
    best = rows["base, no LoRA"]["tokens_per_s"] if not options.only_lora else float("nan")
    for name, row in rows.items():
        if "failed" in row:
            print(f"| {name} | {row['failed']} |")
            continue
        print(f"| {name} | {row['tokens_per_s']:.0f} | {100 * row['tokens_per_s'] / best:.0f}% |")
    print("done")


def kinds(options: argparse.Namespace) -> list[tuple[str, list[str], int | None]]:
    """Name, flags and columns of a block (None: SGLang's own) of each LoRA server."""
    if options.small:
        return [(CPU_BACKEND, [], None)]
    own = [(backend, shlex.split(f"--lora-backend {backend}"), None) for backend in options.backends]
    return [*own, *((f"csgmv, blocks of {n}", ["--lora-backend", "csgmv"], n) for n in options.blocks)]


def of_variant(bench: Bench, variant: str, adapter: AdapterVersion) -> dict[str, Any]:
    """Figures with an adapter; a variant that this machine or engine cannot run is a result too."""
    words = shlex.split(variant)
    environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    fields = dict(word.split("=", 1) for word in words if re.match(r"[a-z_]+=", word))
    flags = [word for word in words if not re.match(r"[A-Za-z_]+=", word)]
    before = os.environ.copy()
    os.environ.update(environment)
    try:
        config = EngineConfig.model_validate(bench.config.engine.model_dump() | fields)
        check_config(config, config.colocation if config.colocation != "auto" else "offload")
        engine = bench.engine(adapter, **fields, extra_flags=(*bench.config.engine.extra_flags, *flags))
        found = measured(bench, engine, adapter)
        engine.stop()
        return found
    except (RuntimeError, ValueError) as error:
        server_process.stop_recorded()
        return {"failed": f"{type(error).__name__}: {error}"[-600:]}
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def blocks_of(bench: Bench, columns: int | None) -> Iterator[None]:
    """The environment of the servers that are started meanwhile."""
    if columns is None:
        yield
        return
    architecture, rank = read_architecture(base_model.locate(bench.options.model)), bench.config.engine.max_lora_rank
    folder = settings().workspace / f"lora-blocks-{columns}"
    os.environ[VARIABLE] = str(write_blocks(folder, architecture, rank=rank, block_n=columns, gpu=devices.processor()))
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def measured(bench: Bench, engine: Engine, adapter: AdapterVersion) -> dict[str, Any]:
    """The second of two rollouts: the first compiles kernels and fills the slots."""
    begin = time.monotonic()
    engine.wake()
    engine.load_adapter(adapter)
    ready_s = time.monotonic() - begin
    few, sampling = bench.prompts()[:8], bench.config.sampling.but(ignore_eos=True)
    timed_rollout(engine, few, sampling.but(max_output_tokens=8), adapter)
    found = {"ready_s": ready_s} | timed_rollout(engine, bench.prompts(), sampling, adapter)
    if not bench.options.profile:
        return found
    return found | {"decoding_step_ms": step_ms(bench, engine, adapter, found["seconds"])}


def step_ms(bench: Bench, engine: Engine, adapter: AdapterVersion, rollout_s: float) -> dict[str, float]:
    sampling = bench.config.sampling.but(ignore_eos=True)
    return profiled(
        lambda: engine.generate(RolloutRequest(bench.prompts(), sampling, adapter)),
        settings().workspace / "traces",
        after_s=ALL_UNDER_WAY * rollout_s,
    )


def in_form(bench: Bench, form: str, adapter: AdapterVersion) -> dict[str, Any]:
    """Another form of request than ours, straight to the server; its cache is emptied first."""
    state = server_process.recorded()
    assert state is not None
    server_process.post(state.url, "/flush_cache", {}, TIMEOUT_S)
    requests = [request(bench, prompt, n, adapter) for prompt in bench.prompts() for n in range(bench.options.group)]
    begin = time.monotonic()
    if form == "one batch":
        together = {name: [each[name] for each in requests] for name in ("input_ids", "sampling_params", "lora_path")}
        answers = server_process.post(state.url, "/generate", together | {"return_logprob": True}, TIMEOUT_S).json()
    else:
        answers = asyncio.run(all_at_once(state.url, requests))
    seconds = time.monotonic() - begin
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    return {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}


def request(bench: Bench, prompt: Prompt, number: int, adapter: AdapterVersion) -> dict[str, Any]:
    sampling = {
        "temperature": 1.0,
        "max_new_tokens": bench.options.output_tokens,
        "ignore_eos": True,
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
    async with httpx.AsyncClient(headers=server_process.authorization(url), timeout=TIMEOUT_S, limits=limits) as client:
        answers = await asyncio.gather(*(client.post(f"{url}/generate", json=each) for each in requests))
    return [answer.raise_for_status().json() for answer in answers]


if __name__ == "__main__":
    main()
