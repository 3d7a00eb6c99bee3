"""Prepare samples for their file while others are still being generated: decode their text, and convert numbers to arrays.

Otherwise both would be done for all samples between the last token and the next task, while the GPUs are idle.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import numpy as np

from infra.models import base_model
from infra.store.samples import Sample, Tokens

Key = tuple[int, int]
"""Prompt id and sample index."""


# Perf: journal, texts and arrays of 512 samples 371 ms, where journal and then texts took 393 ms (CPU, docs/history/log.md).
class Detokenizer:
    """A context manager with a thread, which takes all samples added since its last poll. Decoding releases Python's lock
    for the thread that reads the answers."""

    def __init__(self, model_folder: Path) -> None:
        self.model_folder = model_folder
        self._came: SimpleQueue[Sample | None] = SimpleQueue()
        """Added samples; None marks the end."""
        self._finished: dict[Key, Sample] = {}
        self._prompts: dict[int, Tokens] = {}
        self._thread = ThreadPoolExecutor(1)
        self._work = self._thread.submit(self._finish_what_comes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._came.put(None)
        self._thread.shutdown()

    def add(self, sample: Sample) -> None:
        self._came.put(sample)

    def finished(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return these samples, ready to be written, including any that were never added. No sample can be added afterwards."""
        self._came.put(None)
        self._work.result()
        self._finish([sample for sample in samples if _key(sample) not in self._finished])
        return [self._finished[_key(sample)] for sample in samples]

    def _finish_what_comes(self) -> None:
        while (first := self._came.get()) is not None:
            found: list[Sample | None] = [first]
            while found[-1] is not None and not self._came.empty():
                found.append(self._came.get())
            self._finish([sample for sample in found if sample is not None])
            if found[-1] is None:
                return

    def _finish(self, samples: Sequence[Sample]) -> None:
        texts = base_model.texts_of(self.model_folder, [sample.output_tokens for sample in samples])
        for sample, text in zip(samples, texts, strict=True):
            if sample.prompt_id not in self._prompts:
                self._prompts[sample.prompt_id] = np.asarray(sample.prompt_tokens, np.int32)
            self._finished[_key(sample)] = replace(
                sample,
                text=text,
                prompt_tokens=self._prompts[sample.prompt_id],
                output_tokens=np.asarray(sample.output_tokens, np.int32),
                output_logprobs=np.asarray(sample.output_logprobs, np.float32),
            )


def _key(sample: Sample) -> Key:
    return sample.prompt_id, sample.sample_index
