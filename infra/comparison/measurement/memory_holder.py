"""Stand-in for training in mode inference: how much memory it would hold and for how long, and the program that holds it.

    bytes    weights + adapter x 4 (float32: values, gradients, two moments) + tokens x layers x 2 x (5 x hidden + 4 x feed-forward)
    seconds  4 x active weights x tokens / (40% of the peak of the GPUs); in a mixture of experts, the experts of a token are active

The formula for activations fits the measured 55.8 and 97.0 GiB for 8 and 16 thousand tokens of Qwen2.5-7B in bfloat16 on an H200.
The trainer reached 40% of the peak there. This is an estimate: mode training runs the real trainer.
"""

import math
from pathlib import Path

from infra.comparison.config import ComparisonConfig
from infra.machine import devices
from infra.models import base_model
from infra.models.architecture import base_shapes, linear_shapes, num_active, read_architecture
from infra.processes import gpu_programs
from infra.settings import CHECKOUT, main_python, settings

GIB = 2**30
REACHED = 0.4
CPU_SECONDS = 0.5
GRACE_S = 300.0


def memory_gib(config: ComparisonConfig) -> float:
    """Return the GiB that training would hold: train_gib, or an estimate for one GPU."""
    if config.train_gib:
        return config.train_gib
    a = read_architecture(base_model.locate(config.model))
    weights = sum(math.prod(shape) for shape in base_shapes(a).values())
    lora = config.trainer.lora
    adapted = sum(sum(shape) for name, shape in linear_shapes(a).items() if name.rsplit(".", 1)[1] in lora.target_modules)
    tokens = min(num_tokens(config), config.trainer.microbatch_tokens)
    activations = tokens * a.num_layers * 2 * (5 * a.hidden_size + 4 * a.ffn_size)
    width = 4 if devices.dtype_of(config.trainer.dtype) == "float32" else 2
    return (weights * width + adapted * lora.rank * 4 * 4 + activations) / GIB


def seconds(config: ComparisonConfig) -> float:
    """Estimate how long training would hold the GPUs.

    Raises:
        ValueError: for a GPU whose peak is not known.
    """
    if config.train_s:
        return config.train_s
    if devices.device() == "cpu":
        return CPU_SECONDS
    a = read_architecture(base_model.locate(config.model))
    if (peak := devices.peak_flops(devices.processor())) is None:
        raise ValueError(
            f"the peak of {devices.processor()} is not known, so the time of a training cannot be estimated: give --train-s SECONDS"
        )
    active = num_active(a, {name: math.prod(shape) for name, shape in linear_shapes(a).items()})
    return 4 * active * num_tokens(config) / (REACHED * peak * max(devices.num_gpus(), 1))


def num_tokens(config: ComparisonConfig) -> int:
    """Largest number of tokens of a step's rollouts, with their prompts."""
    return config.num_rollouts * (config.max_input_tokens + config.max_output_tokens)


def hold(config: ComparisonConfig, log_path: Path) -> None:
    """Hold the memory. Raises ProgramFailed if the memory is not available."""
    duration = seconds(config)
    python = str(settings().trainer_python or main_python())
    gpu_programs.run(
        "stand-in of the trainer",
        [python, "-m", "infra.megatron.program.hold_memory", repr(memory_gib(config)), repr(duration), devices.device()],
        log_path,
        timeout_s=duration + GRACE_S,
        env={},
        cwd=CHECKOUT,
        on_line=lambda line: None,
    )
