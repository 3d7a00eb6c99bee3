"""Samples of a step: rows of a Parquet file, one per completion.

prompt_id, sample_index, prompt_tokens, output_tokens, output_logprobs (nats, one per output token, of the policy that sampled),
text, finish_reason, adapter_version, adapter_sha256; and once scored: reward, reward_parts, advantage.
"""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infra.files import write
from infra.records import FinishReason


@dataclass(frozen=True)
class Sample:
    prompt_id: int
    sample_index: int
    prompt_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    finish_reason: FinishReason
    adapter_version: int
    adapter_sha256: str
    text: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] | None = None
    advantage: float | None = None


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
    rows = [asdict(sample) | {"reward_parts": _pairs(sample.reward_parts)} for sample in samples]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), buffer)
    return write(path, buffer.getvalue())


def read_samples(path: Path) -> list[Sample]:
    rows = pq.read_table(path, schema=SCHEMA).to_pylist()
    return [Sample(**(row | {"reward_parts": _parts(row["reward_parts"])})) for row in rows]


def _pairs(parts: dict[str, float] | None) -> list[tuple[str, float]] | None:
    """Parquet's map is a list of pairs; sorted, so that equal samples give equal files."""
    return None if parts is None else sorted(parts.items())


def _parts(pairs: list[tuple[str, float]] | None) -> dict[str, float] | None:
    return None if pairs is None else dict(pairs)


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by prompt, in their order of appearance."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_id, []).append(sample)
    return list(groups.values())
