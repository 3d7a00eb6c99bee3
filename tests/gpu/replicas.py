"""Replicas of the engine: two on two GPUs, and two on one GPU, against one.

    python tests/gpu/replicas.py OUT.json --model FOLDER_OF_0.5B --output-tokens 256 [--set engine.extra_flags=FLAGS]

Each row is a start, two equal rollouts, a release, a wake and a third rollout: seconds, tokens a second, memory by NVML, and how far the
samples are from those of one replica. With engine.deterministic first; then, if there is time, without it, for speed. Where there is one
GPU, the row with two GPUs is left out. The last line is the table as JSON.
"""

import json
import os
import time
from typing import Any

from bench import Bench, compared, parser

from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import Engine, RolloutRequest
from infra.engines.server import server_process
from infra.machine import devices, nvml
from infra.records import AdapterVersion
from infra.settings import settings
from infra.store.samples import Sample

GIB = 2**30
ROW_S = 75
"""Seconds that a row may take on a GPU."""


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--plan", default="reload", choices=("keep_weights", "offload", "reload", "restart"))
    options = p.parse_args()
    bench = Bench(options, "replicas")
    found: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    try:
        for is_deterministic in (True, False):
            expected: list[Sample] | None = None
            for name, (num_gpus, replicas, memory_fraction) in kinds(options.small).items():
                title = f"{name}, {'deterministic' if is_deterministic else 'fast'}"
                if not bench.has_time_for(ROW_S):
                    failed.append(f"no time for {title}")
                    continue
                changes = {"replicas": replicas, "memory_fraction": memory_fraction, "deterministic": is_deterministic}
                found[title], samples = row(bench, num_gpus, changes | {"colocation": options.plan}, expected)
                expected = expected or samples
                bench.write(rows=found)
                print(json.dumps({title: found[title]}), flush=True)
    finally:
        server_process.stop_recorded()
    print(json.dumps({"rows": found, "failed": failed}, indent=1))
    print("done" if not failed else f"FAILED: {'; '.join(failed)}")


def kinds(is_small: bool) -> dict[str, tuple[int, int, float]]:
    """By name: GPUs, replicas, engine.memory_fraction."""
    made = {"one replica": (1, 1, 0.8), "two replicas on one GPU": (1, 2, 0.4)}
    return made | ({"two replicas on two GPUs": (2, 2, 0.8)} if devices.num_gpus() > 1 or is_small else {})


def row(
    bench: Bench, num_gpus: int, changes: dict[str, Any], expected: list[Sample] | None
) -> tuple[dict[str, Any], list[Sample]]:
    if gpus := list(nvml.numbers()[:num_gpus]):
        os.environ |= dict.fromkeys(("RATCHET_ENGINE_GPUS", "RATCHET_TRAINER_GPUS"), json.dumps(gpus))
        settings.cache_clear()
    adapter, prompts, used_before = bench.adapter(), bench.prompts(), used_gib()
    engine, begin = open_engine(bench.config.engine.but(**changes), adapter), time.monotonic()
    engine.wake()
    engine.load_adapter(adapter)
    figures: dict[str, Any] = {"start_s": time.monotonic() - begin, "kv_cache_tokens": engine.kv_cache_tokens}
    sampled(engine, prompts[: max(1, len(prompts) // 8)], bench, adapter)  # the first batch of a server is slower
    first, speed = sampled(engine, prompts, bench, adapter)
    again, speed_again = sampled(engine, prompts, bench, adapter)
    figures |= {"rollout": speed, "rollout_again": speed_again, "again_against_first": compared(first, again)}
    figures["awake_gib"] = used_gib()
    begin = time.monotonic()
    release = engine.release_memory()
    figures |= {"release_s": time.monotonic() - begin, "released_gib": release.released_bytes / GIB, "asleep_gib": used_gib()}
    begin = time.monotonic()
    engine.wake()
    engine.load_adapter(adapter)
    figures |= {"wake_s": time.monotonic() - begin, "used_before_gib": used_before}
    woken, _ = sampled(engine, prompts, bench, adapter)
    figures["after_wake_against_first"] = compared(first, woken)
    if expected is not None:
        figures["against_one_replica"] = compared(expected, first)
    engine.stop()
    return figures, first


def sampled(
    engine: Engine, prompts: list[Prompt], bench: Bench, adapter: AdapterVersion
) -> tuple[list[Sample], dict[str, float]]:
    begin = time.monotonic()
    samples, how = engine.generate(RolloutRequest(prompts, bench.config.sampling, adapter))
    seconds = time.monotonic() - begin
    return samples, {
        "seconds": seconds,
        "tokens": how.num_new_output_tokens,
        "tokens_per_s": how.num_new_output_tokens / seconds,
        "ttft_s": how.ttft_s,
        "prefix_cache_hit_frac": how.prefix_cache_hit_frac,
    }


def used_gib() -> dict[int, float]:
    """Memory in use on each GPU, as reported by NVML."""
    return {gpu.number: round(gpu.used_bytes / GIB, 2) for gpu in nvml.read().gpus}


if __name__ == "__main__":
    main()
