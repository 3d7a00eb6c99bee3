"""Journal of a rollout's finished samples, so that the next attempt after a crash generates only the missing ones; see infra/store/journal.py.

Its inputs key names adapter, prompts, sampling and code.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from infra.store.journal import LineJournal
from infra.store.samples import Sample
from infra.trajectories.spans import SegmentSpan


def sample_of(line: dict[str, Any]) -> Sample:
    """Return the sample of a line. Its text is empty: it is made of the tokens when the rollout is complete."""
    return Sample(**line | {"segments": tuple(SegmentSpan(**span) for span in line.get("segments", ()))})


class Journal(LineJournal):
    """A context manager. `samples` holds the samples of earlier attempts."""

    def __init__(self, path: Path, fence: dict[str, str]) -> None:
        super().__init__(path, fence)
        self.samples: dict[tuple[int, int], Sample] = {}
        """Samples by prompt id and sample index."""

    def _recover(self, lines: Sequence[dict[str, Any]]) -> Iterable[object]:
        for line in lines:
            sample = sample_of(line)
            self.samples.setdefault((sample.prompt_id, sample.sample_index), sample)
        return self.samples.values()

    def add(self, sample: Sample) -> None:
        self.write(sample)

    def set_aside(self, reason: str) -> None:
        """Quarantine the collected samples: keep the file for diagnosis, but never resume from it."""
        self.__exit__(None, None, None)
        self._move(reason)
        self.samples.clear()
