"""What spare prompts leave out, and what partial rollouts do about it. The real SGLang with the tiny model, nothing is trained:

    python tests/benches/partial_rollouts.py [--steps 12]

For each way the same number of steps: mean length of the answers that are used (tokens, with its standard error over groups), the share of
them that is long, and which share of the sampled tokens is used.
"""

import argparse
import json
import time
from statistics import fmean, stdev

from infra.config import DataConfig, EngineConfig, SamplingConfig
from infra.data import prompts
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import Engine, RolloutRequest, SampleSink
from infra.engines.partial import Partial
from infra.models import base_model
from infra.records import AdapterVersion
from infra.store.samples import Sample, groups_of

NUM_PROMPTS, NUM_SPARE, GROUP_SIZE, LONG = 16, 8, 8, 16
"""LONG: tokens of a long answer."""
DATA = DataConfig(num_prompts=NUM_PROMPTS, max_prompt_tokens=128)
WAYS = {
    "no spare prompts": DATA,
    "spare prompts": DATA.but(num_oversampled_prompts=NUM_SPARE),
    "partial rollouts": DATA.but(num_oversampled_prompts=NUM_SPARE, partial_rollouts=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    num_steps = parser.parse_args().steps
    base = base_model.reference("tiny")
    adapter = AdapterVersion(run="bench", version=0, base=base, rank=8, alpha=16, target_modules=("q_proj",), seed=0)
    engine = open_engine(EngineConfig(deterministic=False, max_running_requests=64), adapter)
    engine.wake()
    engine.load_adapter(adapter)
    try:
        for way, data in WAYS.items():
            print(json.dumps({"way": way} | measured(engine, data, adapter, num_steps)), flush=True)
    finally:
        engine.stop()


def measured(engine: Engine, data: DataConfig, adapter: AdapterVersion, num_steps: int) -> dict[str, float]:
    folder, sampling = base_model.locate(adapter.base.id), SamplingConfig(group_size=GROUP_SIZE, max_output_tokens=48)
    ends = frozenset(base_model.stop_token_ids(folder))
    used: list[Sample] = []
    asked: list[Prompt] = []
    before: Partial | None = None
    num_sampled, seconds = 0, 0.0
    for step in range(num_steps):
        left_ids = {prompt.prompt_id for prompt in asked} - {sample.prompt_id for sample in used} if before else set()
        fresh = prompts.draw(data, folder, step=step, seed=0, goes_on=before is not None)
        asked = [prompt for prompt in asked if prompt.prompt_id in left_ids] + fresh
        partial = None
        if data.partial_rollouts:
            partial = Partial(ends, sampling.max_output_tokens, before.left if before else {}, frozenset(left_ids))
        begin = time.perf_counter()
        samples, how = engine.generate(
            RolloutRequest(asked, sampling, adapter, data.num_oversampled_prompts), SampleSink(partial=partial)
        )
        seconds += time.perf_counter() - begin
        used += samples
        num_sampled += how.num_new_output_tokens
        before = partial
    lengths = [fmean(len(sample.output_tokens) for sample in group) for group in groups_of(used)]
    return {
        "mean_tokens": round(fmean(lengths), 2),
        "standard_error": round(stdev(lengths) / len(lengths) ** 0.5, 2),
        "long_frac": round(fmean(len(sample.output_tokens) >= LONG for sample in used), 3),
        "used_frac": round(sum(len(sample.output_tokens) for sample in used) / num_sampled, 3),
        "seconds_a_step": round(seconds / num_steps, 2),
    }


if __name__ == "__main__":
    main()
