"""How much GPU memory the trainer takes: an estimate by model, layout and micro-batch."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from infra.colocation.machine import GIB
from infra.config import TrainerConfig
from infra.machine import devices
from infra.models.architecture import Architecture, linear_shapes, read_architecture

TRAINER_RESIDUE_BYTES = 3 * GIB
"""Memory of a sleeping persistent trainer: 2.6 GiB on an H200."""
MARGIN_BYTES = GIB // 2
SLEEPING_BYTES = TRAINER_RESIDUE_BYTES + MARGIN_BYTES
TRAINING_SLACK_BYTES = 6 * GIB
"""Safety margin on the estimate of the trainer's peak."""


class Model(NamedTuple):
    """What the sizes depend on."""

    weight_bytes: int
    """Size of the weights in the dtype of their files."""
    architecture: Architecture


def model_in(folder: Path) -> Model:
    """Return the sizes of the model in a folder."""
    return Model(sum(path.stat().st_size for path in folder.glob("*.safetensors")), read_architecture(folder))


def weight_bytes(dtype: str, model: Model) -> int:
    """The whole model's, in the dtype that it is held in; files are taken to be bfloat16."""
    return model.weight_bytes * (2 if devices.dtype_of(dtype) == "float32" else 1)


def trainer_weight_bytes(trainer: TrainerConfig, model: Model) -> int:
    """The frozen weights that a trainer holds itself: all, or all but the experts that it shares with the engine."""
    a, of_all = model.architecture, weight_bytes(trainer.dtype, model)
    if not (trainer.share_experts and a.experts):
        return of_all
    num_shared = 3 * a.num_layers * a.experts.count * a.experts.ffn_size * a.hidden_size
    return max(0, of_all - num_shared * (4 if devices.dtype_of(trainer.dtype) == "float32" else 2))


def trainer_peak_bytes(trainer: TrainerConfig, model: Model) -> int:
    """Estimate the trainer's peak memory on each GPU. On one H200, with micro-batches of 8192 and 16384 tokens: 7B shape, rank 16, 56 and
    96 GiB (measured: 56.6 and 97.9); 30B-A3B shape, rank 8, 96 and 130 (100.4 and 136.7); recomputed 7B, 8192 tokens, 25 (23.1)."""
    tokens = trainer.microbatch_tokens
    return math.ceil(held_bytes(trainer, model) + activation_bytes(trainer, model, num_rows=tokens, num_logits=tokens))


def activation_bytes(trainer: TrainerConfig, model: Model, *, num_rows: int, num_logits: int) -> float:
    """Estimate what a micro-batch takes on each GPU: the layers for each of its rows, the output layer for each of its loss tokens."""
    a, tp = model.architecture, trainer.tensor_parallel
    ffn = a.experts.ffn_size * a.experts.per_token if a.experts else a.ffn_size
    a_layer = 2 * (10 * a.hidden_size / (tp if trainer.sequence_parallel else 1) + 2 * ffn / tp)
    layers = a.num_layers * 2 * a.hidden_size + a_layer if trainer.recompute else a.num_layers * a_layer
    return num_rows * layers + num_logits * 8 * a.vocab_size / tp


def held_bytes(trainer: TrainerConfig, model: Model) -> float:
    """Memory held on each GPU: frozen weights, and the adapter with gradient and Adam's moments."""
    split = trainer.tensor_parallel * (trainer.expert_parallel if model.architecture.experts else 1)
    adapter = 16 * num_lora_parameters(trainer.lora.rank, trainer.lora.target_modules, model.architecture)
    return (trainer_weight_bytes(trainer, model) + adapter) / split


@cache
def num_lora_parameters(rank: int, targets: Sequence[str], a: Architecture, only: str = "") -> int:
    """Number of an adapter's parameters.

    targets: Names of projections, such as q_proj.
    only: What the layers' names must contain, such as .experts.
    """
    shapes = linear_shapes(a).items()
    return sum(rank * (out + into) for name, (out, into) in shapes if name.rsplit(".", 1)[1] in targets and only in name)
