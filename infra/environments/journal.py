"""Journal of finished episodes, so that the next attempt after a crash plays only the others; see infra/store/journal.py."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from infra.rewards.outcome import Outcome
from infra.store.journal import LineJournal
from infra.trajectories.segments import Trajectory

Key = tuple[int, int]
"""Prompt id and sample index."""


class FinishedEpisode(NamedTuple):
    trajectories: list[Trajectory]
    """Its branches; none if it failed before its first turn."""
    outcome: Outcome


def line_of(key: Key, episode: FinishedEpisode) -> dict[str, Any]:
    """Return the line of an episode."""
    place = {"prompt_id": key[0], "sample_index": key[1]}
    return {**place, "trajectories": [asdict(each) for each in episode.trajectories], "outcome": list(episode.outcome)}


def episode_of(line: Mapping[str, Any]) -> FinishedEpisode:
    return FinishedEpisode([Trajectory.from_json(each) for each in line["trajectories"]], Outcome(*line["outcome"]))


class EpisodeJournal(LineJournal):
    """A context manager. `episodes` holds those of earlier attempts and of this one."""

    def __init__(self, path: Path, fence: dict[str, str], carried: Mapping[Key, FinishedEpisode] | None = None) -> None:
        """carried: Episodes that the step before has finished. They are in its file, not in this one."""
        super().__init__(path, fence)
        self.episodes: dict[Key, FinishedEpisode] = {**(carried or {})}

    def _recover(self, lines: Sequence[dict[str, Any]]) -> Iterable[object]:
        for line in lines:
            self.episodes[line["prompt_id"], line["sample_index"]] = episode_of(line)
        return list(lines)

    def add(self, key: Key, episode: FinishedEpisode) -> None:
        """Add an episode. A failed one is not written: the next attempt plays it again."""
        self.episodes[key] = episode
        if episode.outcome.reward is not None:
            self.write(line_of(key, episode))

    def quarantine(self, reason: str) -> None:
        """Keep the file for diagnosis, but never resume from it."""
        self.__exit__(None, None, None)
        self._move(reason)
        self.episodes.clear()
