"""Tokens per second of engine and trainer: what was measured here, and estimates where nothing was."""

from typing import NamedTuple

from infra.colocation.trainer_memory import Model
from infra.config import LoraConfig, TrainerConfig
from infra.forecast import fit
from infra.forecast.shapes import GPU_KINDS, model_of


class Rates(NamedTuple):
    engine_tokens_per_s: float
    """Of a full replica on one GPU."""
    request_tokens_per_s: float
    """Of a request that has a replica to itself."""
    trainer_rows_per_s: float
    """Tokens that one GPU trains per second, each prompt counted once per group."""
    source: str


MEASURED = {
    ("qwen2.5-7b", "H200"): Rates(20150, 82, 294912 / 15.7, "measured: docs/results/speed.md, 7B, step of 30.0 s"),
    ("qwen2.5-7b", "H100"): Rates(
        *(18280 * 3.35 / 4.8, 82, 294912 / 16.96),
        "trainer measured: docs/results/speed.md, 7B, 16.96 s; engine estimated from an H200 by memory bandwidth, not measured",
    ),
    ("qwen2.5-0.5b", "H100"): Rates(37600, 117.5, 105600 / 1.8, "measured: docs/results/speed.md, 0.5B preset, step of 4.95 s"),
}
"""By shape and kind of GPU. 294,912 rows: 64 prompts of 512 tokens, each with 8 samples of 512; 105,600: 64 of 150, each with 5 of 300.

A request alone: 12.1 ms a token at 7B, with 64 at a time (docs/results/h200-compare-engines.md), taken as equal on other GPUs, since it hardly
depends on the model's size. At 0.5B what each of 320 at a time had, so it is at least that."""


CANONICAL = fit.Training(rows=294400, logits=262144, sequence=1024, microbatch_rows=13821, microbatch_logits=12288)
"""The step by which a model's rate is estimated: 64 prompts of 512 tokens, each with 8 samples of 512."""
CANONICAL_RUNNING = 512


def rates_of(model: Model, kind: str) -> Rates:
    """Rates of a measured model of the same sizes; else estimates by the model that is fitted to the measured points."""
    same = {gpu: rates for (shape, gpu), rates in MEASURED.items() if model_of(shape).architecture == model.architecture}
    if kind in same:
        return same[kind]
    if same:
        known, known_kind = next((rates, gpu) for gpu, rates in same.items())
        return _on_other_gpu(known, known_kind, kind, f"estimated from {known_kind}s by data sheets, not measured")
    trainer, gpu = TrainerConfig(dtype="bfloat16", lora=LoraConfig(rank=16)), GPU_KINDS[kind]
    return Rates(
        CANONICAL_RUNNING / fit.decoding_s(model, 16, gpu, CANONICAL_RUNNING),
        1 / fit.decoding_s(model, 16, gpu, 1),
        CANONICAL.rows / fit.training_s(trainer, model, gpu, CANONICAL),
        "estimated by the fit to measured points of other models (infra/forecast/points.json), not measured",
    )


def _on_other_gpu(rates: Rates, known: str, kind: str, source: str) -> Rates:
    """Engine by the GPUs' memory bandwidth, trainer by their arithmetic."""
    bandwidth = GPU_KINDS[kind].bandwidth / GPU_KINDS[known].bandwidth
    arithmetic = GPU_KINDS[kind].arithmetic / GPU_KINDS[known].arithmetic
    return Rates(rates.engine_tokens_per_s * bandwidth, rates.request_tokens_per_s, rates.trainer_rows_per_s * arithmetic, source)
