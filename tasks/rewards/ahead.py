"""Score while the rollout still runs: a group is scored when its samples are complete in the rollout's journal.

samples.journal --complete groups--> workers --outcomes--> scores.journal --> tasks/score.py
                                 --> judge at an endpoint --answers--> ledger -->

The task `score` finds what was judged there, and judges the rest. So the scores are those of a scoring afterwards, also where this is
killed. The program of a reward model starts, and waits for the GPU. The other rewards take next to nothing, or need the engine.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from infra.concurrency.deadline import NO_DEADLINE, Deadline
from infra.concurrency.prefetch import Prefetch
from infra.config import JUDGED_BY_MODEL, RewardConfig, RewardFunction, RunConfig
from infra.data.prompts import Prompt
from infra.engines.journal import sample_of
from infra.models import base_model
from infra.processes.gpu_lock import keeps_lock
from infra.progress import work as progress
from infra.records import AdapterVersion, PromptBatch
from infra.rewards.judges.ledger import step_work
from infra.rewards.outcome import Outcome
from infra.rewards.scores import ScoreJournal
from infra.store.files import read_json_lines, verified
from infra.store.journal import GrowingJournal
from infra.store.layout import StepFolder
from infra.store.samples import Sample
from tasks.rewards import by_model, by_reward_model
from tasks.rewards.apply import call_outside, inputs_of, open_journal, outside
from tasks.rewards.by_model import JudgedWork, NewSamples

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
    loading = nullcontext() if config.played else by_reward_model.loading(config.reward)
    with Prefetch() as calling, Prefetch() as asking, loading:  # a judge is asked while functions are called

        def end() -> None:
            ended.set()
            calling.drain()
            asking.drain()

        for each, is_used, work in (
            (calling, bool(outside(config.reward)), _call),
            (asking, bool(_judged_by_endpoint(config.reward)), _ask),
        ):
            if is_all_used and is_used:
                samples = _NewSamples(prompts, config.sampling.group_size, base_model.locate(adapter.base.id), ended)
                each.start(StepFolder.of(prompts).path, keeps_lock(work), config.reward, prompts, samples, deadline)
        try:
            yield end
        finally:
            ended.set()


def _judged_by_endpoint(config: RewardConfig) -> list[RewardFunction]:
    """Return the rewards that a model at an endpoint gives."""
    return [function for function in config.called if function.name in JUDGED_BY_MODEL and config.judge.by == "endpoint"]


def _call(config: RewardConfig, prompts: PromptBatch, samples: "_NewSamples", deadline: Deadline) -> None:
    """Have workers judge until the rollout has ended."""
    folder, num = StepFolder.of(prompts), 0
    with ExitStack() as stack, progress.unwatched():
        journal: ScoreJournal | None = None
        while not samples.ended.is_set():
            found = samples.new()
            if not found:
                samples.ended.wait(POLL_S)
                continue
            journal = journal or stack.enter_context(open_journal(config, folder.scores_journal, inputs_of(prompts)))
            for function in outside(config):
                call_outside(config, function, found, samples.prompts_of(found), journal, _drop, deadline, is_ahead=True)
            num += len(found)
    if num:
        log.info("%d samples were scored while the rollout ran", num)


def _drop(index: int, outcome: Outcome) -> None:
    """The journal has it."""


def _ask(config: RewardConfig, prompts: PromptBatch, samples: "_NewSamples", deadline: Deadline) -> None:
    """Have a judge at an endpoint judge until the rollout has ended and all requests are answered."""
    work = JudgedWork(prompts.run, step_work(prompts.step), StepFolder.of(prompts).judgements, deadline=deadline)
    is_over = False

    def new() -> NewSamples | None:
        nonlocal is_over
        if is_over:
            return None
        is_over = samples.ended.is_set()  # looked at first: what was complete by then is found below
        found = samples.new()
        return found, samples.prompts_of(found)

    with progress.unwatched():
        for function in _judged_by_endpoint(config):  # one: rubric and ruler share their settings
            by_model.judge_ahead(config, function.name, new, work)


class _NewSamples:
    """The samples of groups that are complete, each once, with their texts."""

    def __init__(self, prompts: PromptBatch, group_size: int, model: Path, ended: threading.Event) -> None:
        self.asked = {row["prompt_id"]: Prompt(**row) for row in read_json_lines(verified(prompts.file))}
        self.complete, self.model, self.ended = (
            _CompleteGroups(StepFolder.of(prompts).journal, self.asked, group_size),
            model,
            ended,
        )

    def new(self) -> list[Sample]:
        """Return those since the last call."""
        samples = [sample for group in self.complete.new() for sample in group]
        texts = base_model.texts_of(self.model, [sample.output_tokens for sample in samples]) if samples else []
        return [replace(each, text=text) for each, text in zip(samples, texts, strict=True)]

    def prompts_of(self, samples: Sequence[Sample]) -> list[Prompt]:
        return [self.asked[each.prompt_id] for each in samples]


class _CompleteGroups:
    """The groups of a rollout's journal, each once."""

    def __init__(self, path: Path, asked: dict[int, Prompt], group_size: int) -> None:
        self.journal, self.group_size = GrowingJournal(path), group_size
        self.begun: dict[int, dict[int, Sample]] = {prompt_id: {} for prompt_id in asked}
        """Groups that were not given yet."""

    def new(self) -> Iterator[Group]:
        """Give the groups that have become complete since the last call."""
        for line in self.journal.new_lines():
            if line["prompt_id"] in self.begun and line["finish_reason"] != "abort":
                self.begun[line["prompt_id"]][line["sample_index"]] = sample_of(line)
        for prompt_id in [each for each, found in self.begun.items() if len(found) == self.group_size]:
            found = self.begun.pop(prompt_id)
            yield [found[index] for index in sorted(found)]
