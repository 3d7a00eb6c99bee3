"""Within one engine: tokens that were decoded one after the other, in batches of several sizes, against the same tokens computed at once.

    python tests/gpu/decoding.py OUT.json --model FOLDER [--backends csgmv triton] [--rank 8] [--set FIELD=VALUE ...]

Nats, mean absolute difference over the sampled tokens, by the base model and through a random adapter. What the kernels of decoding do
otherwise with an adapter on (experts, CUDA graphs) is found here and by no trainer: decoding is what a rollout is made of.
"""

from statistics import fmean
from typing import Any

from bench import Bench, parser

from infra.engines.health_checks import mean_abs_difference
from infra.engines.interface import Engine, RolloutRequest
from infra.engines.server import server_process
from infra.records import AdapterVersion
from infra.store.samples import Sample

BATCHES = ((1, 1), (8, 1), (64, 8))
"""Prompts, and samples of each."""
NUM_COMPARED = 16
MAX_FACTOR = 3.0
"""By which an adapter may widen the difference that the base model has."""


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--backends", nargs="+", default=["csgmv", "triton"])
    options = p.parse_args()
    bench, rows = Bench(options, "decoding"), dict[str, dict[str, float]]()
    adapter, base = bench.adapter(), bench.base()
    try:
        for backend in ["torch_native"] if options.small else options.backends:
            engine = bench.engine(adapter, extra_flags=(*bench.config.engine.extra_flags, "--lora-backend", backend))
            for num_prompts, group_size in BATCHES:
                asked = {"num_prompts": num_prompts, "group_size": group_size}
                by_base, by_adapter = (difference(bench, engine, version, **asked) for version in (base, adapter))
                rows[f"{backend}, {num_prompts} x {group_size}"] = {"base": by_base, "adapter": by_adapter}
                bench.say(rows=rows)
            server_process.stop_recorded()
    finally:
        server_process.stop_recorded()
    failed = [name for name, row in rows.items() if not row["adapter"] <= MAX_FACTOR * max(row["base"], 1e-3)]
    print("done" if not failed else f"FAILED: with an adapter decoding is another thing: {', '.join(failed)}")


def difference(bench: Bench, engine: Engine, adapter: AdapterVersion, *, num_prompts: int, group_size: int) -> float:
    engine.wake()
    engine.load_adapter(adapter)
    sampling = bench.config.sampling.but(group_size=group_size, ignore_eos=True)
    samples, _ = engine.generate(RolloutRequest(bench.prompts()[:num_prompts], sampling, adapter))
    return fmean(
        mean_abs_difference(sample.output_logprobs, computed(engine, sample, adapter)) for sample in samples[:NUM_COMPARED]
    )


def computed(engine: Any, sample: Sample, adapter: AdapterVersion) -> list[float]:
    text = [*sample.prompt_tokens, *sample.output_tokens]
    scores: list[float] = engine.program.logprobs(text, adapter.served_name)  # the raw verb
    return scores[len(sample.prompt_tokens) - 1 :]


if __name__ == "__main__":
    main()
