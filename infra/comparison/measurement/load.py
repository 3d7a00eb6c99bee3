"""The inputs of all engines of a comparison: the same prompts and the same adapters, determined by the seed."""

import random
from pathlib import Path

import numpy as np
import safetensors.numpy

from infra.comparison.config import ComparisonConfig
from infra.comparison.measurement import load
from infra.comparison.paths import adapter_folder
from infra.config import LoraConfig
from infra.data import arithmetic
from infra.data.prompts import Prompt
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CANARY
from infra.megatron.protocol.optimizer_files import BOTH, MOMENTS, NUM_STEPS, num_steps
from infra.models import base_model
from infra.models.architecture import linear_shapes, read_architecture
from infra.records import AdapterVersion, BaseModelRef
from infra.store.files import fresh_folder, publish_folder, record_of, write, write_json

ADAPTER_STD = 0.02
"""Standard deviation of the random adapters: large enough to change log-probs visibly, small enough not to break the model."""
FIRST_ORDINARY_TOKEN = 3
PEFT_PREFIX = "base_model.model."
QUESTION = "{examples}Question: {question}\nAnswer:"


def speed_prompts(config: ComparisonConfig, vocab_size: int, step: int) -> list[Prompt]:
    """Random token ids, each prompt of max_input_tokens. They differ in each step, so none is in the prefix cache. Step -1 is the warm-up."""
    count = config.num_prompts if step >= 0 else min(config.num_prompts, config.concurrency)
    return [_random_prompt(config, vocab_size, step, number) for number in range(count)]


def _random_prompt(config: ComparisonConfig, vocab_size: int, step: int, number: int) -> Prompt:
    rng = random.Random(f"{config.seed}/{step}/{number}")
    tokens = [rng.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(config.max_input_tokens)]
    return Prompt(number, number, "", "", tokens, rng.getrandbits(31))


def quality_prompts(config: ComparisonConfig, model_folder: Path) -> list[Prompt]:
    """Arithmetic questions, each after as many solved ones as fit: the same for all engines and rounds. Raises ValueError if a prompt has no room for
    a question."""
    tokenizer = base_model.tokenizer(model_folder)
    solved = arithmetic.problems("train", 64, config.seed)
    prompts = []
    for number, row in enumerate(arithmetic.problems("test", config.num_quality, config.seed)):
        tokens: list[int] = []
        for count in range(len(solved)):
            examples = "".join(
                QUESTION.format(examples="", question=s["question"]) + f" {s['answer']}\n\n" for s in solved[:count]
            )
            longer = list(tokenizer(QUESTION.format(examples=examples, question=row["question"]))["input_ids"])
            if len(longer) > config.max_input_tokens:
                break
            tokens = longer
        if not tokens:
            raise ValueError(f"max_input_tokens {config.max_input_tokens} has no room for a question: give 64 or more")
        prompts.append(Prompt(number, number, row["question"], row["answer"], tokens, config.seed + number))
    return prompts


def make_adapter(folder: Path, base: BaseModelRef, lora: LoraConfig, seed: int, *, is_trainable: bool) -> None:
    """Write a random LoRA adapter in PEFT layout. If trainable, it comes with the state of an optimizer that has taken no step."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, (out, into) in linear_shapes(read_architecture(base_model.locate(base.id))).items():
        if name.rsplit(".", 1)[1] in lora.target_modules:
            for matrix, shape in (("lora_A", (lora.rank, into)), ("lora_B", (out, lora.rank))):
                values = rng.standard_normal(shape, dtype=np.float32) * ADAPTER_STD
                tensors[f"{PEFT_PREFIX}{name}.{matrix}.weight"] = values
    staging = fresh_folder(folder.with_name(f"{folder.name}.making"))
    write(staging / ADAPTER_WEIGHTS, safetensors.numpy.save(tensors))
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": alpha, "bias": "none"}
    about |= {"target_modules": list(lora.target_modules), "base_model_name_or_path": base.id, "lora_dropout": 0.0}
    write_json(staging / ADAPTER_CONFIG, about)
    if is_trainable:
        zeros = safetensors.numpy.save({name: np.zeros_like(values) for name, values in tensors.items()}, {NUM_STEPS: "0"})
        for name in MOMENTS.values():
            write(staging / name, zeros)
    publish_folder(staging, folder)


def adapter_in(folder: Path, config: ComparisonConfig, base: BaseModelRef, digest: str, version: int) -> AdapterVersion:
    """Return the record of an adapter in a folder of the workspace."""
    files = {**MOMENTS, "optimizer": BOTH, "canary": CANARY}
    there = {field: record_of(folder / name) for field, name in files.items() if (folder / name).exists()}
    lora = config.trainer.lora
    return AdapterVersion(
        run=f"comparison-{digest}",
        version=version,
        num_optimizer_steps=num_steps(folder) if {"exp_avg", "optimizer"} & there.keys() else 0,
        base=base,
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.target_modules,
        seed=config.seed,
        weights=record_of(folder / ADAPTER_WEIGHTS),
        **there,
    )


def adapter_of(config: ComparisonConfig, digest: str, step: int) -> AdapterVersion:
    """Return the adapter of a step: version 1 in the first step, never the base model alone, so that all steps do the same work."""
    version = step + 1
    base = base_model.reference(config.model)
    return load.adapter_in(adapter_folder(digest, version), config, base, digest, version)
