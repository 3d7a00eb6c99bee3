"""A small model of a step's memory and seconds, fitted to the measured points.

Each figure is a sum of terms that grow with the work, times coefficients that are 0 or more:

    trainer's memory    held + a hidden + b ffn + c attention outputs, of each layer and row, + d logits    [bytes]
    training            a arithmetic + b passes over activations + c layers launched + d routed rows        [s]
    rollout             a samples + b weights read + c arithmetic, of each token that is decoded            [s]

`held` is known: frozen weights, adapter, gradient and Adam's moments. Coefficients minimise the squares of the relative errors.
"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infra.colocation.trainer_memory import Model, held_bytes
from infra.config import LoraConfig, TrainerConfig
from infra.forecast.points import Points, RolloutPoint, TrainingPoint, measured_points
from infra.forecast.shapes import GPU_KINDS, GpuKind, model_of, with_layers
from infra.models.architecture import Architecture, linear_shapes, num_active

GIB = 2**30
PEAK_FLOPS = 989e12
"""Of an H200 in dense bfloat16, from the data sheet."""
BYTES_PER_S = 4.8e12
"""Of an H200's memory, from the data sheet."""

Terms = tuple[float, ...]


class Coefficients(NamedTuple):
    memory: Terms
    training: Terms
    rollout: Terms


class Training(NamedTuple):
    """A step of the trainer, on each of its GPUs."""

    rows: float
    logits: float
    sequence: int
    microbatch_rows: float
    microbatch_logits: float
    passes: float = 1.0
    """1: forward and backward. A forward pass more (reference or old log-probabilities) adds FORWARD."""


FORWARD = 0.45
"""Share of a step that a forward pass alone takes: 0.267 and 0.230 s of 0.544 s, with and without adapters (7B on an H200)."""


@cache
def fitted() -> Coefficients:
    """The coefficients by all measured points."""
    return fit(measured_points())


def fit(points: Points) -> Coefficients:
    """Fit the coefficients; equal points give equal ones."""
    memory = [(memory_terms_of(p), p.peak_gib * GIB - known_bytes_of(p), p.peak_gib * GIB) for p in points.training if p.peak_gib]
    training = [(training_terms_of(p), p.seconds, p.seconds) for p in points.training if p.seconds]
    rollout = [(rollout_terms_of(p), p.seconds, p.seconds) for p in points.rollout]
    return Coefficients(least_squares(memory), least_squares(training), least_squares(rollout))


def least_squares(rows: Sequence[tuple[Terms, float, float]]) -> Terms:
    """Return the coefficients of 0 or more with the least squares of errors.

    rows: Terms, what they should sum up to, and the size that the error is relative to.

    Raises:
        ValueError: if no such coefficients fit.
    """
    terms = np.array([row[0] for row in rows], dtype=float)
    wanted, size = (np.array([row[i] for row in rows], dtype=float) for i in (1, 2))
    scale = np.where(terms.any(0), np.abs(terms).max(0), 1.0)  # terms are of very different sizes
    weighted, target = terms / scale / size[:, None], wanted / size
    best: tuple[float, NDArray[np.float64]] | None = None
    columns = [i for i in range(terms.shape[1]) if terms[:, i].any()]
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(columns, count):
            found = np.linalg.lstsq(weighted[:, chosen], target, rcond=None)[0]
            error = float(((weighted[:, chosen] @ found - target) ** 2).sum())
            if (found >= 0).all() and (best is None or error < best[0] - 1e-12):
                coefficients = np.zeros(terms.shape[1])
                coefficients[list(chosen)] = found
                best = error, coefficients
    if best is None:
        raise ValueError(f"{len(rows)} points have no fit with coefficients of 0 or more")
    return tuple(float(value) for value in best[1] / scale)


def total(terms: Terms, coefficients: Terms) -> float:
    """Sum of terms, each times its coefficient."""
    return sum(term * coefficient for term, coefficient in zip(terms, coefficients, strict=True))


def peak_bytes(trainer: TrainerConfig, model: Model, work: Training, coefficients: Coefficients | None = None) -> float:
    """The trainer's peak memory on each GPU."""
    terms = memory_terms(trainer, model.architecture, work.microbatch_rows, work.microbatch_logits)
    known = held_bytes(trainer, model) + _layer_inputs(trainer, model.architecture, work.microbatch_rows)
    return known + total(terms, (coefficients or fitted()).memory)


def training_s(
    trainer: TrainerConfig, model: Model, gpu: GpuKind, work: Training, coefficients: Coefficients | None = None
) -> float:
    """Seconds of forward, backward and optimizer on one GPU; a recomputed step has a forward pass more."""
    passes = work.passes + (FORWARD if trainer.recompute else 0)
    return passes * total(training_terms(trainer, model.architecture, gpu, work), (coefficients or fitted()).training)


def decoding_s(model: Model, rank: int, gpu: GpuKind, running: float, coefficients: Coefficients | None = None) -> float:
    """Seconds from one token of each of `running` samples to the next one, on one GPU."""
    return total(decoding_terms(model, rank, gpu, running), (coefficients or fitted()).rollout)


def memory_terms(trainer: TrainerConfig, a: Architecture, rows: float, logits: float) -> Terms:
    """Bytes, but for what is known. A layer's activations are split by tensor parallelism; what lies between layers by sequence parallelism."""
    tp = trainer.tensor_parallel
    layers = 1 if trainer.recompute else a.num_layers
    each = 2.0 * rows * layers
    hidden = each * a.hidden_size / (tp if trainer.sequence_parallel else 1)
    return (hidden, each * _ffn(a) / tp, each * a.num_heads * a.head_dim / tp, logits * a.vocab_size / tp)


def _layer_inputs(trainer: TrainerConfig, a: Architecture, rows: float) -> float:
    """Bytes of what recomputation keeps of each layer: its input."""
    split = trainer.tensor_parallel if trainer.sequence_parallel else 1
    return 2.0 * rows * a.num_layers * a.hidden_size / split if trainer.recompute else 0.0


def training_terms(trainer: TrainerConfig, a: Architecture, gpu: GpuKind, work: Training) -> Terms:
    """Terms of `training_s`, for a pass of forward and backward: seconds of arithmetic and of memory at the GPU's peaks, thousands of layers of
    micro-batches, and with experts millions of rows of layers."""
    linear = num_active(a, {name: out * into for name, (out, into) in linear_shapes(a).items()})
    adapted = {name: x for name, x in linear_shapes(a).items() if name.rsplit(".", 1)[1] in trainer.lora.target_modules}
    adapters = num_active(a, {name: trainer.lora.rank * (out + into) for name, (out, into) in adapted.items()})
    attention = 3.5 * 4 * a.num_heads * a.head_dim * a.num_layers * work.rows * work.sequence / 2
    flops = (4 * linear + 6 * adapters) * work.rows + 4 * a.hidden_size * a.vocab_size * work.logits + attention
    wide = 2 * work.rows * a.num_layers * (a.hidden_size + _ffn(a) + a.num_heads * a.head_dim)
    return (
        flops / (PEAK_FLOPS * gpu.arithmetic),
        wide / (BYTES_PER_S * gpu.bandwidth),
        a.num_layers * -(-work.rows // work.microbatch_rows) / 1e3,
        work.rows * a.num_layers / 1e6 / gpu.bandwidth if a.experts else 0.0,
    )


def decoding_terms(model: Model, rank: int, gpu: GpuKind, running: float) -> Terms:
    """Terms of `decoding_s`: thousands of running samples, and seconds of reading weights and of arithmetic at the GPU's peaks."""
    a = model.architecture
    linear = {name: out * into for name, (out, into) in linear_shapes(a).items()}
    active = num_active(a, linear) + a.hidden_size * a.vocab_size
    met = 1 - (1 - a.experts.per_token / a.experts.count) ** running if a.experts else 1.0
    experts = sum(size for name, size in linear.items() if ".experts." in name)
    read = 2 * (sum(linear.values()) - experts * (1 - met) + a.hidden_size * a.vocab_size)
    return (
        running / 1e3,
        read / (BYTES_PER_S * gpu.bandwidth),
        2 * running * active / (PEAK_FLOPS * gpu.arithmetic),
    )


def _ffn(a: Architecture) -> int:
    """Columns of the hidden layer that a token meets."""
    return a.experts.ffn_size * a.experts.per_token if a.experts else a.ffn_size


def trainer_of(p: TrainingPoint) -> TrainerConfig:
    """Return the section of a trainer that was measured."""
    return TrainerConfig(dtype="bfloat16", lora=LoraConfig(rank=p.rank), recompute=p.recompute)


def memory_terms_of(p: TrainingPoint) -> Terms:
    """Return `memory_terms` of a measured training."""
    return memory_terms(trainer_of(p), _model(p).architecture, p.microbatch_rows, p.microbatch_logits)


def known_bytes_of(p: TrainingPoint) -> float:
    """Bytes on each GPU that need no fit: weights, adapter with its state, and what recomputation keeps."""
    return held_bytes(trainer_of(p), _model(p)) + _layer_inputs(trainer_of(p), _model(p).architecture, p.microbatch_rows)


def work_of(p: TrainingPoint) -> Training:
    """Return what a measured training computed."""
    return Training(p.rows, p.logits, p.sequence, p.microbatch_rows, p.microbatch_logits, 1 + FORWARD * p.recompute)


def training_terms_of(p: TrainingPoint) -> Terms:
    """Return `training_terms` of a measured training, for all its passes."""
    work = work_of(p)
    return tuple(work.passes * term for term in training_terms(trainer_of(p), _model(p).architecture, GPU_KINDS[p.gpu], work))


def rollout_terms_of(p: RolloutPoint) -> Terms:
    """Return `decoding_terms` of a measured rollout, for all its tokens."""
    terms = decoding_terms(model_of(p.model), p.rank, GPU_KINDS[p.gpu], p.running)
    return tuple(p.output_tokens * term for term in terms)


def _model(p: TrainingPoint) -> Model:
    return with_layers(model_of(p.model), p.num_layers)
