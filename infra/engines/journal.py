"""Journal of a rollout's finished samples, so that the next attempt after a crash generates only the missing ones; see infra/store/journal.py.

Its inputs key names adapter, prompts, sampling and code. A line with finish_reason `abort` is a prefix, which another adapter continues.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.store.journal import LineJournal
from infra.store.samples import Sample
from infra.trajectories.spans import SegmentSpan


def sample_of(line: dict[str, Any]) -> Sample:
    """Return the sample of a line. Its text is empty: it is made of the tokens when the rollout is complete."""
    spans = tuple(SegmentSpan(**span) for span in line.get("segments", ()))
    routes = base64.b64decode(line["routes"]) if line.get("routes") else None
    return Sample(**line | {"segments": spans, "routes": routes})


class Journal(LineJournal):
    """A context manager. `samples` holds the samples of earlier attempts."""

    def __init__(self, path: Path, fence: dict[str, str], pause_at: int = 0) -> None:
        """pause_at: Number of tokens after which this rollout leaves an answer to another adapter. Such an answer is finished for this rollout,
        and a prefix in the file. 0: it finishes all answers."""
        super().__init__(path, fence)
        self.pause_at = pause_at
        self.samples: dict[tuple[int, int], Sample] = {}
        """Samples by prompt id and sample index."""
        self.prefixes: dict[tuple[int, int], Sample] = {}
        """The same of answers that were begun."""

    def _recover(self, lines: Sequence[dict[str, Any]]) -> Iterable[object]:
        found: dict[tuple[int, int], Sample] = {}
        for line in lines:
            sample, key = sample_of(line), (line["prompt_id"], line["sample_index"])
            if key not in found or found[key].finish_reason == "abort":  # a whole sample comes after its prefix
                found[key] = sample
        self.prefixes = {key: sample for key, sample in found.items() if sample.finish_reason == "abort"}
        self.samples = {key: sample for key, sample in found.items() if key not in self.prefixes}
        if self.pause_at:
            self.samples |= {key: replace(sample, finish_reason="length") for key, sample in self.prefixes.items()}
        return found.values()

    def add(self, sample: Sample) -> None:
        is_paused = self.pause_at and sample.finish_reason == "length"
        self.write(replace(sample, finish_reason="abort") if is_paused else sample)

    def replace_all(self, fence: dict[str, str], samples: Iterable[Sample]) -> None:
        """Put a journal with another inputs key in this one's place, at once and on the disk. This one must be closed."""
        self.fence = fence
        self._rewrite(samples, syncs=True)

    def set_aside(self, reason: str) -> None:
        """Quarantine the collected samples: keep the file for diagnosis, but never resume from it."""
        self.__exit__(None, None, None)
        self._move(reason)
        self.samples.clear()
