"""Count the tokens that runs of episodes trained on and that were not sampled, from their files alone.

    python tests/benches/count_turns.py .ratchet/runs/NAME ... [--json FILE]

It uses none of our code: a token of a batch's loss must lie in a segment that the engine sampled, with the log-probability that came with it,
by the adapter of the rollout. With partial rollouts a turn may be of an older adapter, if the step before has exactly this turn on record: tokens,
log-probabilities, adapter. Such turns are counted as carried.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import load_file

COUNTS = ("sequences", "turns", "trained_tokens", "unsampled_trained_tokens", "of_another_adapter", "branches", "carried_turns")


class Turn(NamedTuple):
    """What an engine sampled in one turn."""

    adapter: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def turn_of(adapter: str, tokens: Sequence[int], logprobs: Sequence[float]) -> Turn:
    """With log-probabilities in float32, as the samples' file has them."""
    return Turn(adapter, tuple(tokens), tuple(np.asarray(logprobs, np.float32).tolist()))


class CountedSequence(NamedTuple):
    """What the samples' file says of one sequence."""

    tokens: list[int]
    is_sampled: list[bool]
    logprobs: list[float]
    turns: list[Turn]
    is_branch: bool


def sequences(path: Path) -> list[CountedSequence]:
    found = []
    for row in pq.read_table(path).to_pylist():
        spans = row["segments"]
        mask = [span["kind"] == "sampled" for span in spans for _ in range(span["num_tokens"])]
        logprobs = [0.0] * len(row["prompt_tokens"]) + row["output_logprobs"]
        tokens = row["prompt_tokens"] + row["output_tokens"]
        ends = [0, *accumulate(span["num_tokens"] for span in spans)]
        turns = [
            turn_of(span["adapter_sha256"], tokens[begin:end], logprobs[begin:end])
            for span, (begin, end) in zip(spans, pairwise(ends), strict=True)
            if span["kind"] == "sampled"
        ]
        # with environment.keep_reasoning false a later turn is a trajectory of its own, which is no branch
        is_branch = row["branch"] > 0 and spans[0]["turn"] == 0
        found.append(CountedSequence(tokens, mask, logprobs, turns, is_branch))
    return found


def carried(step: Path) -> set[Turn]:
    """The turns on record of the episodes that a step stopped: of those that were under way, and of finished ones in groups that were not."""
    path = step / "left_over.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    spans = [span for line in lines for each in line.get("trajectories", ()) for span in each["segments"]]
    return {
        *(turn_of(x["adapter_sha256"], x["output_tokens"], x["output_logprobs"]) for x in lines if "output_tokens" in x),
        *(turn_of(x["adapter_sha256"], x["tokens"], x["logprobs"]) for x in spans if x["kind"] == "sampled"),
    }


def batch_of(path: Path) -> Iterator[tuple[list[int], Any, Any]]:
    """Tokens, loss mask and log-probabilities of each sequence of a batch."""
    batch = load_file(path)
    ends = batch["cu_seqlens"]
    for begin, end in pairwise(ends):
        yield [int(t) for t in batch["tokens"][begin:end]], batch["loss_mask"][begin:end], batch["rollout_logprobs"][begin:end]


def taken(same: list[CountedSequence], logprobs: Any) -> CountedSequence:
    """Of sequences with equal tokens, the one with these log-probabilities, or any; the last one stays."""
    equal = (each for each in same if np.array_equal(np.asarray(logprobs), np.asarray(each.logprobs, np.float32)))
    found = next(equal, same[-1])
    if len(same) > 1:
        same[:] = [each for each in same if each is not found]
    return found


def counts_of(step: Path) -> dict[str, int]:
    known: dict[tuple[int, ...], list[CountedSequence]] = {}
    for sequence in sequences(step / "samples.parquet"):
        known.setdefault(tuple(sequence.tokens), []).append(sequence)
    counts, before = dict.fromkeys(COUNTS, 0), carried(step.with_name(f"{int(step.name) - 1:06d}"))
    adapter = json.loads((step / "manifest.json").read_bytes())["rollouts"]["adapter_sha256"]
    for tokens, mask, logprobs in batch_of(step / "batch.safetensors"):
        sequence = taken(known[tuple(tokens)], logprobs)
        is_sampled = np.asarray(sequence.is_sampled) & (np.asarray(logprobs) == np.asarray(sequence.logprobs, np.float32))
        counts["sequences"] += 1
        older = [turn for turn in sequence.turns if turn.adapter != adapter]
        counts["turns"] += len(sequence.turns)
        counts["carried_turns"] += sum(turn in before for turn in older)
        counts["trained_tokens"] += int(mask.sum())
        counts["unsampled_trained_tokens"] += int(((mask == 1) & ~is_sampled).sum())
        counts["of_another_adapter"] += not sequence.turns or any(turn not in before for turn in older)
        counts["branches"] += sequence.is_branch
    return counts


def counted(runs: Sequence[Path]) -> dict[str, int]:
    """Counts of all steps of the runs together."""
    total = dict.fromkeys(COUNTS, 0)
    for step in (step for run in runs for step in sorted((run / "steps").glob("[0-9]*"))):
        for name, value in counts_of(step).items():
            total[name] += value
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    total = counted(arguments.runs)
    print(json.dumps(total))
    if arguments.json:
        arguments.json.write_text(json.dumps(total, indent=1) + "\n")


if __name__ == "__main__":
    main()
