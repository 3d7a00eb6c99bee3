"""Named runs: a preset is a function that returns a RunConfig; a variant changes what differs."""

from collections.abc import Callable

from infra.config import DataConfig, EngineConfig, RunConfig, SamplingConfig, TrainerConfig

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""As in verl-project/verl, examples/data_preprocess/gsm8k.py at 1dda039."""


def arithmetic() -> RunConfig:
    """The tiny model on generated word problems; a step takes well under a minute on two CPU cores."""
    return RunConfig(
        name="arithmetic",
        data=DataConfig(num_prompts=16, max_prompt_tokens=128),
        sampling=SamplingConfig(group_size=8, max_output_tokens=48),
        trainer=TrainerConfig(learning_rate=1e-3),
    )


def gsm8k() -> RunConfig:
    """Qwen2.5-0.5B-Instruct on GSM8K, for one GPU: values to start from, not tuned and not yet run with real weights."""
    base = arithmetic()
    return base.but(
        name="gsm8k",
        model="Qwen/Qwen2.5-0.5B-Instruct",
        data=DataConfig(
            source="openai/gsm8k",
            subset="main",
            instruction=GSM8K_INSTRUCTION,
            num_prompts=128,
            max_prompt_tokens=512,
            long_prompts="drop",
        ),
        engine=EngineConfig(max_context_tokens=1536, max_running_requests=256, max_lora_rank=32, deterministic=False),
        sampling=SamplingConfig(group_size=5, max_output_tokens=1024),
        trainer=TrainerConfig(lora=base.trainer.lora.but(rank=32, alpha=32), learning_rate=3e-5),
    )


PRESETS: dict[str, Callable[[], RunConfig]] = {"arithmetic": arithmetic, "gsm8k": gsm8k}


def preset(name: str) -> RunConfig:
    """Raises ValueError for an unknown name; lists those that are known."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; known are {', '.join(PRESETS)}")
    return PRESETS[name]()
