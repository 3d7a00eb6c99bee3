"""Give each sample the reward of a reward function, or the reason why it is unjudged."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from infra.config import RewardConfig
from infra.data.prompts import Prompt
from infra.failures import RewardFailed
from infra.progress import work as progress
from infra.rewards import client, outcome
from infra.rewards.outcome import Outcome
from infra.rewards.scores import ScoreJournal, fields_of
from infra.store import code_digest
from infra.store.samples import Sample, groups_of
from tasks import rewards

log = logging.getLogger(__name__)

NUM_NAMED = 3
"""Unjudged samples that a message names."""
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
) -> list[Sample]:
    """Return the samples with reward and reward_parts, or with the reason why they are unjudged.

    journal: File of what is judged by a reward outside. The caller removes it when the samples are written.
    inputs: Digests of the samples and the prompts. With the reward and its source they decide what the journal's results are of.
    stops: Whether more unjudged samples than reward.max_unjudged_frac allows are an error.

    Raises:
        RewardFailed: for too many unjudged samples; one line with the first of them and the place in the user's file.
    """
    asked = {prompt.prompt_id: prompt for prompt in prompts}
    found = _Collected(config, samples, [asked[sample.prompt_id] for sample in samples], stops=stops)
    with progress.work("scoring", len(samples), "samples") as work:

        def take(index: int, result: Outcome) -> None:
            work.done += 1
            found.add(index, result)

        if config.name in rewards.BUILT_IN:
            _call_here(config.name, found, take)
        else:
            _call_outside(config, found, take, ScoreJournal(journal, inputs | _fence(config)))
    found.check()
    return [_with(sample, result) for sample, result in zip(samples, found.in_order(), strict=True)]


class _Collected:
    """The outcomes of samples as they come, in any order."""

    def __init__(self, config: RewardConfig, samples: Sequence[Sample], prompts: Sequence[Prompt], *, stops: bool) -> None:
        self.config, self.samples, self.prompts, self.stops = config, samples, prompts, stops
        self.outcomes: dict[int, Outcome] = {}
        self.unjudged: list[int] = []

    def add(self, index: int, result: Outcome) -> None:
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
                f"reward {self.config.name!r} could not judge {len(self.unjudged)} of {num} samples ({reasons}), and reward.max_unjudged_frac is "
                f"{limit:g}: {cases}"
            )
        if len(self.outcomes) == num:
            log.warning("%d of %d samples are unjudged (%s) and left out: %s", len(self.unjudged), num, reasons, cases)

    def _case(self, index: int) -> str:
        question, completion = self.prompts[index].question, self.samples[index].text
        return f"{self.outcomes[index].message}, for question {_shown(question)}, completion {_shown(completion)}"

    def in_order(self) -> list[Outcome]:
        return [self.outcomes[index] for index in range(len(self.samples))]


def _with(sample: Sample, result: Outcome) -> Sample:
    return replace(sample, reward=result.reward, reward_parts=result.parts, unjudged=result.reason)


def _shown(text: str) -> str:
    return repr(text[:SHOWN_CHARACTERS]) + ("..." if len(text) > SHOWN_CHARACTERS else "")


# Perf: a built-in reward is pure and takes microseconds: no worker is asked (docs/results/rewards.md).
def _call_here(name: str, collected: _Collected, take: OnOutcome) -> None:
    for index, (sample, prompt) in enumerate(zip(collected.samples, collected.prompts, strict=True)):
        take(index, called(name, question=prompt.question, completion=sample.text, answer=prompt.answer))


def called(name: str, *, question: str, completion: str, answer: str) -> Outcome:
    """Call a built-in reward."""
    reward = rewards.BUILT_IN[name]
    return outcome.of_value(reward(question=question, completion=completion, answer=answer), {}, reward)


def _fence(config: RewardConfig) -> dict[str, str]:
    source = rewards.source_digest(config.name)
    return {"reward": config.judged_by, "source": source, "code": code_digest.digest("infra.rewards")}


def _call_outside(config: RewardConfig, collected: _Collected, take: OnOutcome, scores: ScoreJournal) -> None:
    digest = scores.fence["source"]
    groups = {group[0].prompt_id: group for group in groups_of(collected.samples)}
    with scores as journal:
        known = {index: journal.outcomes.get((each.prompt_id, each.sample_index)) for index, each in enumerate(collected.samples)}
        for index, result in known.items():
            if result:
                take(index, result)
        missing = [index for index, result in known.items() if result is None]
        if not missing:
            return
        takes = client.form_of(config, config.name, digest).takes
        fields = [
            fields_of(collected.samples[index], collected.prompts[index], takes, groups[collected.samples[index].prompt_id])
            for index in missing
        ]

        def note(position: int, result: Outcome) -> None:
            journal.add(collected.samples[missing[position]], result)
            take(missing[position], result)

        client.judge(config, config.name, digest, fields, note)
