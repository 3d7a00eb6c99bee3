"""Make and measure one step of the RL loop with one engine. A step that was made before is reused."""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from prefect import task

from infra import engines
from infra.comparison.config import Block, ComparisonConfig
from infra.comparison.measurement import memory_holder, reused_blocks
from infra.comparison.measurement.load import adapter_of
from infra.comparison.measurement.measures import PASSED
from infra.comparison.measurement.measuring import LoopParts, measured_step, open_backend
from infra.comparison.paths import adapter_folder, block_folder, state_folder, step_path
from infra.comparison.results import keep_log, read_step
from infra.config import BatchConfig
from infra.data.packing import packed, serialized
from infra.data.prompts import Prompt
from infra.megatron.protocol.job import ADAPTER_WEIGHTS
from infra.models import base_model
from infra.records import AdapterVersion, TrainBatch
from infra.rewards.built_in import gsm8k
from infra.store.digests import sha256_of
from infra.store.files import fresh_folder, publish_folder, record_of, write, write_json
from infra.store.samples import Sample
from infra.trainers import resident, trainer_of
from infra.trainers.jobs import job_of
from tasks.support.caching import NO_CACHE

log = logging.getLogger(__name__)


def graded(samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[float]:
    """Return the rewards of the quality part."""
    asked = {prompt.prompt_id: prompt for prompt in prompts}
    return [
        gsm8k.numeric(question=asked[each.prompt_id].question, completion=each.text, answer=asked[each.prompt_id].answer)
        for each in samples
    ]


def grader(config: ComparisonConfig) -> Callable[[Sequence[Sample], Sequence[Prompt]], list[float]]:
    def grade(samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[float]:
        texts = base_model.texts_of(base_model.locate(config.model), [sample.output_tokens for sample in samples])
        return graded([replace(sample, text=text) for sample, text in zip(samples, texts, strict=True)], prompts)

    return grade


def common_batch(config: ComparisonConfig, digest: str, step: int, adapter: AdapterVersion, samples: list[Sample]) -> TrainBatch:
    """Make the batch that every engine trains on in this step: the samples of the first engine, with random advantages.

    Training on random tokens teaches nothing: it is a control, the same job for all.
    """
    path = state_folder(digest) / "batches" / f"{step:06d}.safetensors"
    if not path.exists():
        rng = random.Random(f"{config.seed}/{step}/advantages")
        tensors = packed([replace(sample, advantage=rng.choice((-1.0, 1.0))) for sample in samples], BatchConfig())
        del tensors["rewards"]  # there are none
        about = {"adapter_version": str(adapter.version), "adapter_sha256": adapter.sha256, "temperature": "1.0"}
        write(path, serialized(tensors, about))
    num_tokens = sum(len(sample.prompt_tokens) + len(sample.output_tokens) for sample in samples)
    return TrainBatch(
        run=adapter.run,
        step=step,
        adapter_version=adapter.version,
        adapter_sha256=adapter.sha256,
        file=record_of(path),
        num_sequences=len(samples),
        num_tokens=num_tokens,
        num_loss_tokens=int(np.sum([len(sample.output_tokens) for sample in samples])),
    )


def train_for_real(config: ComparisonConfig, digest: str, block: Block, step: int, samples: list[Sample]) -> str:
    """Run the Megatron step. The adapter of the engine that trains first is the next one for all."""
    adapter = adapter_of(config, digest, step)
    folder = state_folder(digest) / "trained" / f"{block.name}-{step:06d}"
    job = job_of(config.trainer, common_batch(config, digest, step, adapter, samples), adapter, folder)
    fresh_folder(job.output_dir)
    job.result_path.unlink(missing_ok=True)
    trainer_of(config.trainer).train(job, folder)
    made = sha256_of(job.output_dir / ADAPTER_WEIGHTS)
    target = adapter_folder(digest, step + 2)
    if not target.exists():
        publish_folder(job.output_dir, target)
    elif made != sha256_of(target / ADAPTER_WEIGHTS):
        log.warning("%s, step %d: the same training job gave other last bits than before", block.name, step)
    return made


@task(cache_policy=NO_CACHE)
def measure_step(config: ComparisonConfig, digest: str, block: Block, step: int) -> bool:
    """Block and step -> whether the engine may continue: after a failed check it makes no further step."""
    block = Block(*block)
    path = step_path(digest, block, step)
    if (known := read_step(path)) is not None:
        return known.golden == PASSED

    def train(samples: list[Sample]) -> str:
        if config.mode == "training":
            return train_for_real(config, digest, block, step, samples)
        memory_holder.hold(config, block_folder(digest, block) / f"training-{step:06d}.log")
        return ""

    adapter = adapter_of(config, digest, step)
    parts = LoopParts(train, grader(config), next_adapter=lambda: adapter_of(config, digest, step + 1))
    engine = open_backend(config, block.backend, adapter)
    try:
        made = measured_step(engine, config, block, step, adapter, parts)
    finally:
        keep_log(digest, block)
    write_json(path, made.model_dump(mode="json"))
    if made.is_sound:
        log.info("%s, step %d: %.0f tokens/s, %s", block.name, step, made.figures()["tokens_per_s"], made.golden)
    return made.golden == PASSED


@task(cache_policy=NO_CACHE)
def end_engine(config: ComparisonConfig, digest: str, block: Block) -> None:
    """End all our programs after a block's last step, including the persistent trainer. So each engine starts with free memory and
    without a running trainer. The block is stored for reuse."""
    block = Block(*block)
    keep_log(digest, block)
    engines.stop_recorded()
    resident.stop_recorded()
    made = [read_step(step_path(digest, block, step)) for step in range(config.num_steps)]
    log.info("%s: %d of %d steps are sound", block.name, sum(bool(step and step.is_sound) for step in made), config.num_steps)
    reused_blocks.keep(config, digest, block)
