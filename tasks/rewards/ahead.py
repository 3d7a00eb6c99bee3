"""Score while the rollout still runs: a group is scored when its samples are complete in the rollout's journal.

samples.journal --complete groups--> workers --outcomes--> scores.journal --> tasks/score.py

The task `score` finds what was judged in its journal, and judges the rest. So the scores are those of a scoring afterwards, also where this is
killed. Only rewards that workers call are scored so; the others take next to nothing or need the engine.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from infra.concurrency.deadline import NO_DEADLINE, Deadline
from infra.concurrency.prefetch import Prefetch
from infra.config import RewardConfig, RunConfig
from infra.data.prompts import Prompt
from infra.engines.journal import sample_of
from infra.models import base_model
from infra.processes.gpu_lock import keeps_lock
from infra.progress import work as progress
from infra.records import AdapterVersion, PromptBatch
from infra.rewards.outcome import Outcome
from infra.rewards.scores import ScoreJournal
from infra.store.files import read_json_lines, verified
from infra.store.journal import GrowingJournal
from infra.store.layout import StepFolder
from infra.store.samples import Sample
from tasks.rewards.apply import call_outside, inputs_of, open_journal, outside

log = logging.getLogger(__name__)

POLL_S = 0.1
Group = list[Sample]


@contextmanager
def scored_ahead(
    config: RunConfig, prompts: PromptBatch, adapter: AdapterVersion, deadline: Deadline = NO_DEADLINE
) -> Iterator[Callable[[], None]]:
    """Score the groups of the rollout that runs in the block. Gives a function that ends it: it waits for the samples that are being judged.

    Nothing is scored of a rollout that leaves groups out (over-sampling), since which ones is known only at its end, and of episodes, which bring
    their rewards. An error is a warning: the scoring meets it again.

    adapter: Of the run, for its tokenizer.
    deadline: Of the scoring. It begins when the rollout has ended, and bounds the wait for what is being judged then.
    """
    is_all_used = config.played is None and not prompts.num_oversampled_prompts and not prompts.partial_rollouts
    ended = threading.Event()
    with Prefetch() as prefetch:

        def end() -> None:
            ended.set()
            prefetch.drain()

        if is_all_used and outside(config.reward):
            model = base_model.locate(adapter.base.id)
            how = (config.sampling.group_size, model, ended, deadline)
            prefetch.start(StepFolder.of(prompts).path, keeps_lock(_score), config.reward, prompts, *how)
        try:
            yield end
        finally:
            ended.set()


def _score(
    config: RewardConfig, prompts: PromptBatch, group_size: int, model: Path, ended: threading.Event, deadline: Deadline
) -> None:
    """Score groups until the rollout has ended."""
    asked = {row["prompt_id"]: Prompt(**row) for row in read_json_lines(verified(prompts.file))}
    folder, num = StepFolder.of(prompts), 0
    complete = _CompleteGroups(folder.journal, asked, group_size)
    with ExitStack() as stack, progress.unwatched():
        journal: ScoreJournal | None = None
        while not ended.is_set():
            samples = [sample for group in complete.new() for sample in group]
            if not samples:
                ended.wait(POLL_S)
                continue
            journal = journal or stack.enter_context(open_journal(config, folder.scores_journal, inputs_of(prompts)))
            texts = base_model.texts_of(model, [sample.output_tokens for sample in samples])
            _judge(
                config, [replace(each, text=text) for each, text in zip(samples, texts, strict=True)], asked, journal, deadline
            )
            num += len(samples)
    if num:
        log.info("%d samples were scored while the rollout ran", num)


def _judge(
    config: RewardConfig, samples: list[Sample], asked: dict[int, Prompt], journal: ScoreJournal, deadline: Deadline
) -> None:
    def drop(index: int, outcome: Outcome) -> None:
        """The journal has it."""

    for function in outside(config):
        prompts = [asked[each.prompt_id] for each in samples]
        call_outside(config, function, samples, prompts, journal, drop, deadline, is_ahead=True)


class _CompleteGroups:
    """The groups of a rollout's journal, each once."""

    def __init__(self, path: Path, asked: dict[int, Prompt], group_size: int) -> None:
        self.journal, self.group_size = GrowingJournal(path), group_size
        self.begun: dict[int, dict[int, Sample]] = {prompt_id: {} for prompt_id in asked}
        """Groups that were not given yet."""

    def new(self) -> Iterator[Group]:
        """Give the groups that have become complete since the last call."""
        for line in self.journal.new_lines():
            if line["prompt_id"] in self.begun:
                self.begun[line["prompt_id"]][line["sample_index"]] = sample_of(line)
        for prompt_id in [each for each, found in self.begun.items() if len(found) == self.group_size]:
            found = self.begun.pop(prompt_id)
            yield [found[index] for index in sorted(found)]
