"""Samples of a step: rows of a Parquet file, one per completion.

prompt_id, sample_index, prompt_tokens, output_tokens, output_logprobs (nats, one per output token, of the behavior policy),
text, finish_reason, adapter_version, adapter_sha256; and once scored: reward, reward_parts, advantage. If an earlier step aborted the
answer (partial rollouts), its first num_older_tokens were sampled by the adapter older_adapter_sha256. A sample that could not be judged has
the reason in unjudged, and no reward: null, never 0 or NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from infra.records import FinishReason
from infra.store.files import write

Tokens = Sequence[int] | NDArray[np.int32]
Logprobs = Sequence[float] | NDArray[np.float32]
"""Lists from an engine; arrays from a file, so that a step never makes a Python object for each of its million numbers."""


@dataclass(frozen=True, eq=False)
class Sample:
    prompt_id: int
    sample_index: int
    prompt_tokens: Tokens
    output_tokens: Tokens
    output_logprobs: Logprobs
    finish_reason: FinishReason
    adapter_version: int
    adapter_sha256: str
    text: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] | None = None
    advantage: float | None = None
    num_older_tokens: int = 0
    older_adapter_sha256: str = ""
    unjudged: str = ""

    def __eq__(self, other: object) -> bool:
        """Compare values. It does not matter whether lists or arrays hold the numbers."""
        if not isinstance(other, Sample):
            return NotImplemented
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in COLUMNS}
        return all(np.array_equal(*pair) if name in OF_NUMBERS else pair[0] == pair[1] for name, pair in pairs.items())


WHOLE_REWARD = "reward"
"""Name of the only part of a reward that returns a plain number."""
COLUMNS = tuple(field.name for field in fields(Sample))
OF_NUMBERS = ("prompt_tokens", "output_tokens", "output_logprobs")
"""Columns whose cells are lists of numbers."""
OF_PARTIAL_ROLLOUTS = (("num_older_tokens", pa.int32()), ("older_adapter_sha256", pa.string()))
"""Additional columns of files in which a sample has older tokens. Other files do not have them."""
OF_UNJUDGED = (("unjudged", pa.string()),)
"""The same for files in which a sample is unjudged."""
# Perf: a write of 512 samples 70 -> 25 ms without a dictionary of log-probabilities (CPU, docs/results/step-tail.md).
REPEATING = (
    "prompt_tokens.list.element",
    "finish_reason",
    "adapter_sha256",
    "reward_parts.key_value.key",
    "older_adapter_sha256",
    "unjudged",
)
"""Columns, by their Parquet names, whose values repeat and are written with a dictionary. Log-probs hardly ever repeat: their dictionary took
two thirds of the time and more space than the values. A dictionary of tokens from a large vocabulary took half of the remaining time."""
COMPRESSION: dict[str, Any] = {"compression": "zstd", "compression_level": 1}
"""Takes a sixth to a fourth less space than Parquet's default, even with a dictionary of sampled tokens in the latter."""
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.int64()),
        ("sample_index", pa.int32()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("output_tokens", pa.list_(pa.int32())),
        ("output_logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("adapter_version", pa.int32()),
        ("adapter_sha256", pa.string()),
        ("text", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("advantage", pa.float64()),
    ]
)


def write_samples(path: Path, samples: Sequence[Sample]) -> Path:
    sink = pa.BufferOutputStream()
    pq.write_table(_table_of(samples), sink, use_dictionary=list(REPEATING), **COMPRESSION)
    return write(path, sink.getvalue().to_pybytes())


def _table_of(samples: Sequence[Sample]) -> pa.Table:
    more = OF_PARTIAL_ROLLOUTS if any(sample.num_older_tokens for sample in samples) else ()
    schema = pa.schema([*SCHEMA, *more, *(OF_UNJUDGED if any(sample.unjudged for sample in samples) else ())])
    columns = {name: [getattr(sample, name) for sample in samples] for name in schema.names}
    columns["reward_parts"] = [_pairs(parts) for parts in columns["reward_parts"]]
    return pa.table(columns, schema=schema)


def read_samples(path: Path) -> list[Sample]:
    names = set(pq.read_schema(path).names)
    table = pq.read_table(
        path, schema=pa.schema([*SCHEMA, *(each for each in (*OF_PARTIAL_ROLLOUTS, *OF_UNJUDGED) if each[0] in names)])
    )
    # Arrays that are slices of one large array.
    columns = {
        name: list(table[name].to_numpy()) if name in OF_NUMBERS else table[name].to_pylist() for name in table.column_names
    }
    columns["reward_parts"] = [_parts(pairs) for pairs in columns["reward_parts"]]
    return [Sample(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _pairs(parts: dict[str, float] | None) -> list[tuple[str, float]] | None:
    """Convert to Parquet's map, which is a list of pairs. Sorted, so that equal samples give equal files."""
    return None if parts is None else sorted(parts.items())


def _parts(pairs: list[tuple[str, float]] | None) -> dict[str, float] | None:
    return None if pairs is None else dict(pairs)


def is_judged(group: Sequence[Sample]) -> bool:
    """Whether a group has the two judged samples without which it teaches nothing. A group of one sample needs that one."""
    return sum(sample.reward is not None for sample in group) >= min(2, len(group))


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by prompt, in their order of appearance."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_id, []).append(sample)
    return list(groups.values())
