"""Give each sample the reward of a reward function, or the reason why it is unjudged."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from infra.concurrency.deadline import NO_DEADLINE, Deadline
from infra.config import JUDGED_BY_MODEL, REWARD_MODEL, RewardConfig, RewardFunction
from infra.data.prompts import Prompt
from infra.failures import RewardFailed
from infra.progress import work as progress
from infra.records import PromptBatch
from infra.rewards import client, outcome
from infra.rewards.outcome import Outcome
from infra.rewards.scores import ScoreJournal, fields_of, key_of
from infra.store import code_digest
from infra.store.samples import WHOLE_REWARD, Sample, groups_of
from tasks import rewards
from tasks.rewards import by_model, by_reward_model
from tasks.rewards.by_model import JudgedWork

log = logging.getLogger(__name__)

NUM_NAMED = 3
"""Unjudged samples that a message names."""
MAX_PART_LETTERS = 64
SHOWN_CHARACTERS = 200
"""Characters of a question and of a completion that are shown in an error."""
OnOutcome = Callable[[int, Outcome], None]


def judged(
    config: RewardConfig,
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    journal: Path,
    inputs: dict[str, str],
    *,
    stops: bool = True,
    work: JudgedWork | None = None,
    deadline: Deadline | None = None,
) -> list[Sample]:
    """Return the samples with reward and reward_parts, or with the reason why they are unjudged.

    journal: File of what is judged by a reward outside. The caller removes it when the samples are written.
    inputs: Digests of what is scored. With the reward, its source and what it takes of a sample they decide what the journal's results are of.
    work: What is judged, where a model judges.
    deadline: Of the whole scoring, which may have begun. None: reward.task_timeout_s from now on.
    stops: Whether more unjudged samples than reward.max_unjudged_frac allows are an error.

    Raises:
        RewardFailed: for too many unjudged samples; one line with the first of them and the place in the user's file.
    """
    while True:
        before = rewards.source_digests(config)
        found = _judged(config, samples, prompts, journal, inputs, stops=stops, work=work, deadline=deadline)
        if rewards.source_digests(config) == before:
            return found
        log.warning("the source of reward %s changed while it judged: all samples are judged again", config.title)


def _judged(
    config: RewardConfig,
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    journal: Path,
    inputs: dict[str, str],
    *,
    stops: bool,
    work: JudgedWork | None,
    deadline: Deadline | None,
) -> list[Sample]:
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    prompt_of_each = [by_id[sample.prompt_id] for sample in samples]
    by_function, functions = [], config.called
    deadline = (deadline or Deadline(config.task_timeout_s)).begin()
    needs_journal = bool(outside(config)) or config.uses_reward_model
    with (
        progress.work("scoring", len(functions) * len(samples), "samples") as shown,
        open_journal(config, journal, inputs) if needs_journal else nullcontext() as scores,
    ):
        for function in functions:
            collected = _Collected(config, function.name, samples, prompt_of_each, shown, stops=stops)
            _call(config, function, collected, scores, work and work._replace(deadline=deadline), deadline)
            collected.check()
            by_function.append(collected.in_order())
    outcomes = [combined(config, of_functions) for of_functions in zip(*by_function, strict=True)]
    return [
        replace(sample, reward=result.reward, reward_parts=result.parts, unjudged=result.reason)
        for sample, result in zip(samples, outcomes, strict=True)
    ]


def _call(
    config: RewardConfig,
    function: RewardFunction,
    collected: "_Collected",
    scores: ScoreJournal | None,
    work: JudgedWork | None,
    deadline: Deadline,
) -> None:
    """Have one function judge all samples."""
    samples, prompts, take = collected.samples, collected.prompts, collected.add
    if function.name in rewards.BUILT_IN:
        # Perf: a built-in reward is pure and takes microseconds, so it is called in this process (docs/results/rewards.md).
        for index, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
            take(index, called(function, question=prompt.question, completion=sample.text, answer=prompt.answer))
    elif function.name in JUDGED_BY_MODEL:
        assert work, "a model judges for a run"
        by_model.judge(config, function.name, samples, prompts, take, work)
    elif function.name == REWARD_MODEL:
        assert scores
        by_reward_model.call(config, samples, prompts, take, scores, deadline)
    else:
        assert scores
        call_outside(config, function, samples, prompts, scores, take, deadline)


def combined(config: RewardConfig, results: Sequence[Outcome]) -> Outcome:
    """Return the sum of the rewards of several functions times their weights, each of which is a part. Unjudged if one of them is."""
    if not config.functions:
        return results[0]
    parts: dict[str, float] = {}
    total = 0.0
    for function, result in zip(config.functions, results, strict=True):
        if result.reward is None:
            return result._replace(reason=f"{function.label} {result.reason}")
        total += function.weight * result.reward
        inner = {} if set(result.parts or {}) == {WHOLE_REWARD} else result.parts or {}
        parts |= {function.label: result.reward} | {
            f"{function.label}.{name}"[:MAX_PART_LETTERS]: value for name, value in inner.items()
        }
    return Outcome(total, parts) if math.isfinite(total) else outcome.unjudged(outcome.NO_NUMBER, f"the rewards' sum is {total}")


class _Collected:
    """The outcomes of samples as they come, in any order."""

    def __init__(
        self,
        config: RewardConfig,
        name: str,
        samples: Sequence[Sample],
        prompts: Sequence[Prompt],
        shown: progress.Work,
        *,
        stops: bool,
    ) -> None:
        self.config, self.name, self.samples, self.prompts, self.stops = config, name, samples, prompts, stops
        self.shown = shown
        self.outcomes: dict[int, Outcome] = {}
        self.unjudged: list[int] = []

    def add(self, index: int, result: Outcome) -> None:
        self.shown.done += 1
        self.outcomes[index] = result
        if result.reward is None:
            self.unjudged.append(index)
            if len(self.unjudged) >= NUM_NAMED:
                self.check()

    def check(self) -> None:
        """Raises RewardFailed if more samples are unjudged than may be; warns of those that may."""
        if not self.unjudged:
            return
        counts = Counter(self.outcomes[index].reason for index in self.unjudged)
        num, limit = len(self.samples), self.config.max_unjudged_frac
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        cases = "; ".join(self._case(index) for index in sorted(self.unjudged)[:NUM_NAMED])
        if self.stops and len(self.unjudged) > limit * num:
            raise RewardFailed(
                f"reward {self.name!r} could not judge {len(self.unjudged)} of {num} samples ({reasons}), and reward.max_unjudged_frac is "
                f"{limit:g}: {cases}"
            )
        if len(self.outcomes) == num:
            log.warning("%d of %d samples are unjudged (%s) and left out: %s", len(self.unjudged), num, reasons, cases)

    def _case(self, index: int) -> str:
        question, completion = self.prompts[index].question, self.samples[index].text
        return f"{self.outcomes[index].message}, for question {_shown(question)}, completion {_shown(completion)}"

    def in_order(self) -> list[Outcome]:
        return [self.outcomes[index] for index in range(len(self.samples))]


def _shown(text: str) -> str:
    return repr(text[:SHOWN_CHARACTERS]) + ("..." if len(text) > SHOWN_CHARACTERS else "")


def called(function: RewardFunction, *, question: str, completion: str, answer: str) -> Outcome:
    """Call a built-in reward."""
    reward = rewards.BUILT_IN[function.name]
    return outcome.of_value(reward(question=question, completion=completion, answer=answer), function.weights, reward)


def outside(config: RewardConfig) -> list[RewardFunction]:
    """Return the functions that workers call."""
    return [function for function in config.called if function.name not in (*rewards.BUILT_IN, *JUDGED_BY_MODEL, REWARD_MODEL)]


def inputs_of(prompts: PromptBatch) -> dict[str, str]:
    """Return what is scored in a step; see judged."""
    return {"prompts": prompts.file.sha256}


def open_journal(config: RewardConfig, path: Path, inputs: dict[str, str]) -> ScoreJournal:
    return ScoreJournal(path, inputs | _fence(config))


def _fence(config: RewardConfig) -> dict[str, str]:
    functions = [function.model_dump_json() for function in config.called]
    source, code = rewards.source_digests(config), code_digest.digest("infra.rewards")
    return {"reward": " ".join(functions), "source": source, "code": code} | by_reward_model.identity(config)


def call_outside(
    config: RewardConfig,
    function: RewardFunction,
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    journal: ScoreJournal,
    take: OnOutcome,
    deadline: Deadline = NO_DEADLINE,
    *,
    is_ahead: bool = False,
) -> None:
    """Have samples judged by workers, but for those that the journal knows.

    prompts: Of each sample.
    deadline: When it is over, what has no result is unjudged.
    is_ahead: Whether the rollout still runs: then an unjudged sample is kept for the scoring, which does not try it again.
    """
    name, digest = function.name, rewards.source_digest(function.name)
    takes = client.form_of(config, function, digest).takes
    groups = {group[0].prompt_id: group for group in groups_of(samples)}
    fields = [fields_of(each, asked, takes, groups[each.prompt_id]) for each, asked in zip(samples, prompts, strict=True)]
    keys = [key_of(name, each, found) for each, found in zip(samples, fields, strict=True)]
    missing = []
    for index, key in enumerate(keys):
        if (known := journal.outcomes.get(key)) is None:
            missing.append(index)
        else:
            take(index, known)

    def note(position: int, result: Outcome) -> None:
        index = missing[position]
        journal.add(keys[index], result, keeps_unjudged=is_ahead)
        take(index, result)

    if missing:
        client.judge(config, function, digest, [fields[index] for index in missing], note, deadline)
        if rewards.source_digest(name) != digest:
            client.forget(digest)  # workers that began meanwhile have imported another state
