"""Samples of a step: rows of a Parquet file, one per completion.

prompt_id, sample_index, prompt_tokens, output_tokens, output_logprobs (nats, one per output token, of the behavior policy),
text, finish_reason, adapter_version, adapter_sha256; and once scored: reward, reward_parts, advantage. If an earlier step aborted the
answer (partial rollouts), its first num_older_tokens were sampled by the adapter older_adapter_sha256. A sample that could not be judged has
the reason in unjudged, and no reward: null, never 0 or NaN. With trainer.routing_replay also routes (infra/store/routes.py).

A sample of several turns has its segments too. Its output_tokens are all tokens after the first prompt, and output_logprobs is 0 at those that
were given.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from infra.records import FinishReason
from infra.store.files import write
from infra.trajectories.segments import StopReason, Trajectory
from infra.trajectories.spans import SegmentSpan, pieces_of, sampled_mask, segments_of, turns_of

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
    segments: tuple[SegmentSpan, ...] = ()
    """Segments of the prompt and the output tokens, in order; empty: one prompt and one answer."""
    branch: int = 0
    """Index of the trajectory in its episode, which has the prompt id and sample index."""
    stop_reason: str = ""
    """Why the episode ended; empty: one prompt and one answer."""
    turn_rewards: tuple[float, ...] | None = None
    """Reward of each turn, for environments that give one; they are parts of the reward."""
    turn_advantages: tuple[float, ...] | None = None
    """Advantage of each turn with batch.advantage_level turn; None: each has the sample's."""
    routes: bytes | None = None
    """Experts of each token, as infra.store.routes.parsed reads them. None: not recorded, or, among samples that have some, the engine
    retracted the request, and they are not those of its log-probs."""

    @property
    def is_sampled(self) -> NDArray[np.bool_]:
        """For each output token, whether it was sampled."""
        if not self.segments:
            return np.ones(len(self.output_tokens), np.bool_)
        return sampled_mask(self.segments)[len(self.prompt_tokens) :]

    @property
    def num_sampled_tokens(self) -> int:
        if not self.segments:
            return len(self.output_tokens)
        return sum(span.num_tokens for span in self.segments if span.is_sampled)

    @property
    def num_turns(self) -> int:
        return len(turns_of(self.segments)) if self.segments else 1

    @property
    def first_turn(self) -> int:
        """Number of its first turn in the episode: above 0 for a later turn that is a trajectory of its own (environment.keep_reasoning)."""
        return turns_of(self.segments)[0] if self.segments else 0

    @property
    def episode(self) -> tuple[int, int]:
        """Key that the trajectories of an episode share."""
        return self.prompt_id, self.sample_index

    @property
    def is_truncated(self) -> bool:
        """Whether a limit ended it: on the answer's tokens, or on the episode."""
        return self.finish_reason == "length" or self.stop_reason in TRUNCATED

    def __eq__(self, other: object) -> bool:
        """Compare values. It does not matter whether lists or arrays hold the numbers."""
        if not isinstance(other, Sample):
            return NotImplemented
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in COLUMNS}
        return all(np.array_equal(*pair) if name in OF_NUMBERS else pair[0] == pair[1] for name, pair in pairs.items())


TRUNCATED = ("max_turns", "context", "time_out")
"""Stop reasons of episodes that a limit ended."""
WHOLE_REWARD = "reward"
"""Name of the only part of a reward that returns a plain number."""
COLUMNS = tuple(field.name for field in fields(Sample))
OF_NUMBERS = ("prompt_tokens", "output_tokens", "output_logprobs")
"""Columns whose cells are lists of numbers."""
OF_PARTIAL_ROLLOUTS = (("num_older_tokens", pa.int32()), ("older_adapter_sha256", pa.string()))
"""Additional columns of files in which a sample has older tokens. Other files do not have them."""
OF_UNJUDGED = (("unjudged", pa.string()),)
"""The same for files in which a sample is unjudged."""
SPAN = pa.struct(
    [
        ("kind", pa.string()),
        ("num_tokens", pa.int32()),
        ("turn", pa.int32()),
        ("adapter_version", pa.int32()),
        ("adapter_sha256", pa.string()),
        ("sampling_seed", pa.int64()),
        ("finish_reason", pa.string()),
    ]
)
OF_TRAJECTORIES = (
    ("segments", pa.list_(SPAN)),
    ("branch", pa.int32()),
    ("stop_reason", pa.string()),
    ("turn_rewards", pa.list_(pa.float64())),
    ("turn_advantages", pa.list_(pa.float64())),
)
"""The same for files in which a sample has several turns."""
OF_ROUTES = (("routes", pa.large_binary()),)
"""The same for files with routes."""
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
    """Write samples as Parquet, as infra.store.files.write does. Equal samples give equal bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(_table_of(samples), sink, use_dictionary=list(REPEATING), **COMPRESSION)
    return write(path, sink.getvalue().to_pybytes())


def _table_of(samples: Sequence[Sample]) -> pa.Table:
    more = [
        *(OF_PARTIAL_ROLLOUTS if any(sample.num_older_tokens for sample in samples) else ()),
        *(OF_UNJUDGED if any(sample.unjudged for sample in samples) else ()),
        *(OF_TRAJECTORIES if any(sample.segments for sample in samples) else ()),
        *(OF_ROUTES if any(sample.routes for sample in samples) else ()),
    ]
    schema = pa.schema([*SCHEMA, *more])
    columns = {name: [getattr(sample, name) for sample in samples] for name in schema.names}
    if "segments" in columns:
        columns["segments"] = [[asdict(span) for span in spans] for spans in columns["segments"]]
    columns["reward_parts"] = [_pairs(parts) for parts in columns["reward_parts"]]
    return pa.table(columns, schema=schema)


def read_samples(path: Path) -> list[Sample]:
    """Read the samples of a file, in its order. Columns that it lacks are at their defaults.

    Raises:
        ValueError: for a damaged file; names it.
    """
    try:
        with path.open("rb") as file:  # once: another process may replace it
            names = set(pq.read_schema(file).names)
            more = [each for each in (*OF_PARTIAL_ROLLOUTS, *OF_UNJUDGED, *OF_TRAJECTORIES, *OF_ROUTES) if each[0] in names]
            table = pq.read_table(file, schema=pa.schema([*SCHEMA, *more]))
    except pa.ArrowException as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    # Arrays that are slices of one large array.
    columns = {
        name: list(table[name].to_numpy()) if name in OF_NUMBERS else table[name].to_pylist() for name in table.column_names
    }
    columns["reward_parts"] = [_parts(pairs) for pairs in columns["reward_parts"]]
    for name in ("turn_rewards", "turn_advantages"):
        if name in columns:
            columns[name] = [None if values is None else tuple(values) for values in columns[name]]
    if "segments" in columns:
        columns["segments"] = [tuple(SegmentSpan(**span) for span in spans) for spans in columns["segments"]]
    return [Sample(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def read_rewards(path: Path) -> dict[int, list[float]]:
    """Return the rewards of the judged samples by prompt, one for each episode. A prompt without judged samples is not there."""
    names = ("prompt_id", "sample_index", "reward")
    found: dict[tuple[int, int], float] = {}
    for prompt_id, index, reward in zip(
        *(pq.read_table(path, columns=[*names])[name].to_pylist() for name in names), strict=True
    ):
        if reward is not None:
            found.setdefault((prompt_id, index), reward)
    rewards: dict[int, list[float]] = {}
    for (prompt_id, _), reward in found.items():
        rewards.setdefault(prompt_id, []).append(reward)
    return rewards


def _pairs(parts: dict[str, float] | None) -> list[tuple[str, float]] | None:
    """Convert to Parquet's map, which is a list of pairs. Sorted, so that equal samples give equal files."""
    return None if parts is None else sorted(parts.items())


def _parts(pairs: list[tuple[str, float]] | None) -> dict[str, float] | None:
    return None if pairs is None else dict(pairs)


def num_retracted(samples: Sequence[Sample]) -> int:
    """Return how many samples have no routes, among samples that have some."""
    return sum(not sample.routes for sample in samples) if any(sample.routes for sample in samples) else 0


def is_judged(group: Sequence[Sample]) -> bool:
    """Whether a group has the two judged samples without which it teaches nothing. A group of one sample needs that one. The branches of an
    episode count as one."""
    judged = {sample.episode for sample in group if sample.reward is not None}
    return len(judged) >= min(2, len({sample.episode for sample in group}))


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by prompt, in their order of appearance."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_id, []).append(sample)
    return list(groups.values())


def episodes_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by episode, in their order of appearance. Without an environment each sample is alone."""
    episodes: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        episodes.setdefault(sample.episode, []).append(sample)
    return list(episodes.values())


def conversations_of(samples: Sequence[Sample]) -> list[list[int]]:
    """Positions of the samples whose turns follow one another: those of an episode whose turns are trajectories of their own; any other sample is
    alone."""
    split = {sample.episode for sample in samples if sample.first_turn}
    found: dict[object, list[int]] = {}
    for position, sample in enumerate(samples):
        found.setdefault(sample.episode if sample.episode in split else position, []).append(position)
    return list(found.values())


def sample_of(trajectory: Trajectory, prompt_id: int, sample_index: int, text: str = "") -> Sample:
    """Return a trajectory with sampled tokens as a sample. Adapter and finish reason are those of its last sampled segment. Raises ValueError for a
    trajectory without sampled tokens."""
    prompt, tokens, logprobs, spans = pieces_of(trajectory)
    last = next((span for span in reversed(spans) if span.is_sampled), None)
    if last is None or last.adapter_version is None or last.finish_reason is None:
        raise ValueError(f"trajectory {trajectory.branch} of episode {trajectory.episode!r} has no sampled token")
    return Sample(
        prompt_id=prompt_id,
        sample_index=sample_index,
        prompt_tokens=prompt,
        output_tokens=tokens,
        output_logprobs=logprobs,
        finish_reason=last.finish_reason,
        adapter_version=last.adapter_version,
        adapter_sha256=last.adapter_sha256,
        text=text,
        segments=spans,
        branch=trajectory.branch,
        stop_reason=trajectory.stop_reason or "",
    )


def trajectory_of(sample: Sample) -> Trajectory:
    """Return the trajectory of a sample that has segments. Raises ValueError if they do not fit its tokens."""
    tokens = [*sample.prompt_tokens, *sample.output_tokens]
    segments = segments_of(sample.segments, tokens, sample.output_logprobs)
    reason: StopReason | None = next((reason for reason in get_args(StopReason) if reason == sample.stop_reason), None)
    return Trajectory(f"{sample.prompt_id}/{sample.sample_index}", segments, sample.branch, reason)
