"""Journal of finished episodes, so that the next attempt after a crash plays only the others; see infra/store/journal.py."""

from collections.abc import Iterable, Sequence
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


class EpisodeJournal(LineJournal):
    """A context manager. `episodes` holds those of earlier attempts and of this one."""

    def __init__(self, path: Path, fence: dict[str, str]) -> None:
        super().__init__(path, fence)
        self.episodes: dict[Key, FinishedEpisode] = {}

    def _recover(self, lines: Sequence[dict[str, Any]]) -> Iterable[object]:
        for line in lines:
            trajectories = [Trajectory.from_json(each) for each in line["trajectories"]]
            self.episodes[line["prompt_id"], line["sample_index"]] = FinishedEpisode(trajectories, Outcome(*line["outcome"]))
        return list(lines)

    def add(self, key: Key, episode: FinishedEpisode) -> None:
        """Add an episode. A failed one is not written: the next attempt plays it again."""
        self.episodes[key] = episode
        if episode.outcome.reward is not None:
            place = {"prompt_id": key[0], "sample_index": key[1]}
            self.write(
                {**place, "trajectories": [asdict(each) for each in episode.trajectories], "outcome": list(episode.outcome)}
            )

    def quarantine(self, reason: str) -> None:
        """Keep the file for diagnosis, but never resume from it."""
        self.__exit__(None, None, None)
        self._move(reason)
        self.episodes.clear()
