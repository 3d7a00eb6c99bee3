"""Collect a rollout's samples as they come. Each is checked before it is kept. The rollout ends when enough groups are complete."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from infra.concurrency.background import in_background
from infra.engines.interface import (
    RolloutMeasures,
    RolloutRequest,
    SampleRequest,
    SampleSink,
    bad_answer_of,
    check_sample,
    check_samples,
)
from infra.engines.partial import Key, Partial
from infra.failures import WrongAnswer
from infra.progress import work as progress
from infra.progress.work import Work
from infra.store.samples import Sample

log = logging.getLogger(__name__)


class RolloutCollector:
    """The requested samples, those from earlier attempts and the step before, and those received since."""

    def __init__(self, request: RolloutRequest, sink: SampleSink, vocab_size: int) -> None:
        prompts, adapter, journal, partial = request.prompts, request.adapter, sink.journal, sink.partial
        self.prompts, self.group_size, self.adapter = prompts, request.sampling.group_size, adapter
        self.deadline = request.deadline
        self.sink, self.partial, self.vocab_size = sink, partial, vocab_size
        begun = partial.prefixes() if partial else {}
        keys = [(prompt, index) for prompt in prompts for index in range(self.group_size)]
        self.asked = [SampleRequest(prompt, index, begun.get((prompt.prompt_id, index))) for prompt, index in keys]
        kept = journal.samples if journal is not None else {}
        earlier = (partial.finished(adapter) if partial else {}) | kept
        self.finished = {wanted.key: earlier[wanted.key] for wanted in self.asked if wanted.key in earlier}
        self.missing = [wanted for wanted in self.asked if wanted.key not in self.finished]
        self.num_kept = sum(wanted.key in kept for wanted in self.asked)
        self._begun = {wanted.key: wanted.begun for wanted in self.missing}
        self._num_late = 0
        self.work = Work("rollout")
        self.num_groups = len(prompts) - request.num_oversampled_prompts
        num_left = Counter(wanted.prompt.prompt_id for wanted in self.missing)
        self.num_left = {prompt.prompt_id: num_left[prompt.prompt_id] for prompt in prompts}
        """Number of missing samples, by prompt."""
        self.whole_groups: set[int] = set()
        """Groups of the rollout: the required ones, and the first others that became complete."""
        self.must_be_whole = partial.prompt_ids if partial else frozenset[int]()
        for prompt_id, left in self.num_left.items():
            if not left:
                self._is_whole(prompt_id)
        for sample in self.finished.values():
            sink.on_sample(sample)
        if self.num_kept:
            log.info("rollout: %d of %d samples are kept from earlier attempts", self.num_kept, len(self.asked))

    @contextmanager
    def with_progress(self) -> Iterator[None]:
        with progress.work("rollout", len(self.missing), "samples") as self.work:
            yield

    @property
    def is_enough(self) -> bool:
        return len(self.whole_groups) >= self.num_groups or self.deadline.is_over

    def _is_whole(self, prompt_id: int) -> None:
        has_room = len(self.whole_groups - self.must_be_whole) < self.num_groups - len(self.must_be_whole)
        if has_room or prompt_id in self.must_be_whole:
            self.whole_groups.add(prompt_id)

    def take(self, sample: Sample) -> bool:
        """Take a finished sample. Returns whether more are needed.

        Raises:
            WrongAnswer: if it is invalid, was not requested, or is a duplicate. It is not kept then.
        """
        key = (sample.prompt_id, sample.sample_index)
        if self.is_enough:  # it was under way when the last needed sample came
            if self.partial is not None:
                self._leave(key, sample, self.partial)
            self._num_late += sample.finish_reason != "abort"
            return False
        self._check_wanted(key, sample)
        check_sample(sample, self.adapter, self.vocab_size)
        self.finished[key] = sample
        self.work.done += 1
        self.work.num_tokens += len(sample.output_tokens) - sample.num_older_tokens
        if self.sink.journal is not None:
            self.sink.journal.add(sample)
        self.sink.on_sample(sample)
        self.num_left[sample.prompt_id] -= 1
        if not self.num_left[sample.prompt_id]:
            self._is_whole(sample.prompt_id)
        return not self.is_enough

    def _check_wanted(self, key: Key, sample: Sample) -> None:
        if key in self.finished or key not in self._begun:
            raise WrongAnswer(f"sample {key[1]} of prompt {key[0]} was not asked for, or came twice", bad_answer_of(sample))
        begun, num = self._begun[key], sample.num_older_tokens
        said = (list(sample.output_tokens[:num]), list(sample.output_logprobs[:num]), sample.older_adapter_sha256)
        if said != ((list(begun.output_tokens), list(begun.output_logprobs), begun.adapter_sha256) if begun else ([], [], "")):
            raise WrongAnswer(f"sample {key[1]} of prompt {key[0]} does not begin as it was begun", bad_answer_of(sample))

    def _leave(self, key: Key, sample: Sample, partial: Partial) -> None:
        """Carry an aborted sample over to the next step."""
        self._check_wanted(key, sample)
        if sample.finish_reason != "abort":
            check_sample(sample, self.adapter, self.vocab_size)
        elif sample.output_tokens:
            check_sample(replace(sample, finish_reason="length"), self.adapter, self.vocab_size)
        partial.leave(sample)

    def completed(
        self,
        sample: Callable[[], RolloutMeasures],
        check_again: Callable[[], None],
        guard: AbstractContextManager[None],
    ) -> tuple[list[Sample], RolloutMeasures]:
        """Return the samples of the rollout after the engine was checked once more.

        sample: Samples what is missing, and passes each sample to `take`.
        check_again: Asks the engine once more whether it serves the adapter.
        guard: Ends an engine that fails.
        """
        how, sink = RolloutMeasures(), self.sink
        try:
            with guard:
                if self.missing and not self.is_enough:
                    with self.with_progress():
                        how = sample()
                # Also if nothing was missing: the process that sampled all of it may have died before this check.
                # Perf: samples written in 0.02 to 0.04 s while the engine is asked again (7B, H200, docs/results/h200-hand-over.md).
                with in_background(check_again):
                    samples = self.whole()
                    sink.on_complete(samples)
        except WrongAnswer:
            if sink.journal is not None:  # no sample of an engine that answers wrongly is used, not even one that looked right
                sink.journal.set_aside("the engine that gave these samples answered wrongly")
            raise
        return samples, how.model_copy(update=self.counts())

    def whole(self) -> list[Sample]:
        """Return the samples by prompt and sample index. Raises WrongAnswer if some are missing."""
        taken = self.whole_groups if self.is_enough else set(self.num_left)
        asked = [prompt for prompt in self.prompts if prompt.prompt_id in taken]
        keys = [(prompt.prompt_id, index) for prompt in asked for index in range(self.group_size)]
        samples = [self.finished[key] for key in keys if key in self.finished]
        check_samples(samples, asked, self.group_size, self.adapter, self.vocab_size)
        if self.partial is not None:
            self.partial.left |= {key: sample for key, sample in self.finished.items() if key[0] not in taken}
        return samples

    def _num_unused(self) -> int:
        if self.partial is not None or not self.is_enough:
            return 0
        return self._num_late + sum(key[0] not in self.whole_groups for key in self.finished)

    def counts(self) -> dict[str, int]:
        new = [self.finished[wanted.key] for wanted in self.missing if wanted.key in self.finished]
        broken_off = [sample for key, sample in self.partial.left.items() if key not in self.finished] if self.partial else []
        return {
            "num_kept": self.num_kept,
            "num_unused": self._num_unused(),
            "num_new_output_tokens": sum(len(sample.output_tokens) - sample.num_older_tokens for sample in (*new, *broken_off)),
        }
