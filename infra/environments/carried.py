"""Episodes that a step's rollout stops and the next one's goes on with: partial rollouts of several turns.

left_over.jsonl    the environment's key; finished episodes; of the others complete turns, calls of tools and the latest snapshot

The next rollout treats them as a killed rollout treats what its journals hold: a turn on record is not sampled again, and keeps its
adapter. Later turns have the next adapter. A turn under way is sampled again: its seed is the same.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.environments.journal import FinishedEpisode, Key, episode_of, line_of
from infra.failures import WrongAnswer
from infra.gateway.session.calls import CallRecord
from infra.gateway.session.records import TurnRecord, record_of_line
from infra.gateway.session.snapshots import SnapshotRecord
from infra.records import AdapterVersion
from infra.store.files import read_json_lines
from infra.trajectories.segments import Segment

log = logging.getLogger(__name__)

ENVIRONMENT = ("environment", "environment_source", "environment_code")
"""Entries of a rollout's inputs key that must be those of the rollout which stopped the episodes."""
Sampled = tuple[tuple[int, ...], tuple[float, ...], int | None, str]
"""Tokens, log-probabilities, adapter's version and digest."""


@dataclass(frozen=True)
class CarriedEpisodes:
    """By episode; see TurnJournal and EpisodeJournal."""

    turns: Mapping[str, Sequence[TurnRecord]] = field(default_factory=dict)
    calls: Mapping[str, Sequence[CallRecord]] = field(default_factory=dict)
    snapshots: Mapping[str, SnapshotRecord] = field(default_factory=dict)
    finished: Mapping[Key, FinishedEpisode] = field(default_factory=dict)

    @property
    def keys(self) -> set[Key]:
        """The episodes of which something is on record."""
        return set(self.finished) | {key_of(name) for name in (*self.turns, *self.calls)}

    def of(self, prompt_ids: Collection[int]) -> "CarriedEpisodes":
        """Return those of some prompts; of finished episodes their trajectories alone."""
        finished = {key: episode for key, episode in sorted(self.finished.items()) if key[0] in prompt_ids}

        def is_under_way(name: str) -> bool:
            return key_of(name)[0] in prompt_ids and key_of(name) not in finished

        calls = {name: {call.key: call for call in calls} for name, calls in self.calls.items()}  # the latest record of each
        return CarriedEpisodes(
            {name: sorted(turns, key=_number_of) for name, turns in sorted(self.turns.items()) if is_under_way(name)},
            {name: [*by_key.values()] for name, by_key in sorted(calls.items()) if is_under_way(name)},
            {name: snapshot for name, snapshot in sorted(self.snapshots.items()) if is_under_way(name)},
            finished,
        )

    def sampled(self) -> set[Sampled]:
        """What the step before has sampled."""
        turns = (turn for turns in self.turns.values() for turn in turns)
        whole = (each for episode in self.finished.values() for each in episode.trajectories)
        return {
            (tuple(turn.output_tokens), tuple(turn.output_logprobs), turn.adapter_version, turn.adapter_sha256) for turn in turns
        } | {_sampled(segment) for trajectory in whole for segment in trajectory.segments if segment.is_sampled}


NOTHING = CarriedEpisodes()


def key_of(name: str) -> Key:
    """Return the prompt id and sample index in an episode's name, which may have the number of an attempt behind them."""
    prompt_id, index = name.split("/")[:2]
    return int(prompt_id), int(index)


def lines_of(carried: CarriedEpisodes, inputs: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The lines of left_over.jsonl. inputs: Of the rollout that stopped the episodes."""
    yield {"fence": {name: inputs[name] for name in ENVIRONMENT}}
    yield from (line_of(key, episode) for key, episode in carried.finished.items())
    for records in (carried.turns, carried.calls):
        yield from (asdict(record) for of_episode in records.values() for record in of_episode)
    yield from (asdict(snapshot) for snapshot in carried.snapshots.values())


def read_carried(path: Path, inputs: Mapping[str, str]) -> CarriedEpisodes | None:
    """Return the episodes of a left_over.jsonl. None, and a warning, if another environment or another state of its file played them.

    inputs: Of the rollout that goes on with them.
    """
    head, *lines = read_json_lines(path)
    if head["fence"] != {name: inputs[name] for name in ENVIRONMENT}:
        log.warning("the environment has changed since the step before stopped its episodes: they begin again")
        return None
    return _carried(lines)


def num_carried(path: Path) -> int:
    """Number of the episodes in a left_over.jsonl."""
    return len(_carried(read_json_lines(path)[1:]).keys)


def _carried(lines: Iterable[dict[str, Any]]) -> CarriedEpisodes:
    turns: dict[str, list[TurnRecord]] = {}
    calls: dict[str, list[CallRecord]] = {}
    snapshots: dict[str, SnapshotRecord] = {}
    finished: dict[Key, FinishedEpisode] = {}
    for line in lines:
        if "trajectories" in line:
            finished[line["prompt_id"], line["sample_index"]] = episode_of(line)
            continue
        record = record_of_line(line)
        if isinstance(record, SnapshotRecord):
            snapshots[record.episode] = record
        elif isinstance(record, CallRecord):
            calls.setdefault(record.episode, []).append(record)
        else:
            turns.setdefault(record.episode, []).append(record)
    return CarriedEpisodes(turns, calls, snapshots, finished)


def check_adapters(episodes: Mapping[Key, FinishedEpisode], adapter: AdapterVersion, carried: CarriedEpisodes) -> None:
    """Check each sampled segment of a rollout: this adapter sampled it, or the step before has it on record exactly so.

    Raises:
        WrongAnswer: for another one.
    """
    older = carried.sampled()
    for (prompt_id, index), episode in episodes.items():
        for segment in (each for trajectory in episode.trajectories for each in trajectory.segments if each.is_sampled):
            by = (segment.adapter_version, segment.adapter_sha256)
            if by != (adapter.version, adapter.sha256) and _sampled(segment) not in older:
                raise WrongAnswer(
                    f"turn {segment.turn} of episode {index} of prompt {prompt_id} was sampled by adapter {by[0]} ({by[1]}), this rollout's is "
                    f"{adapter.version} ({adapter.sha256}), and the step before has no such turn on record",
                    {"segment": asdict(segment)},
                )


def _sampled(segment: Segment) -> Sampled:
    return segment.tokens, segment.logprobs, segment.adapter_version, segment.adapter_sha256


def _number_of(turn: TurnRecord) -> int:
    return turn.number
