"""Give each sample the reward of a reward function."""

from collections.abc import Sequence
from dataclasses import replace

from infra.data.prompts import Prompt
from infra.progress import work as progress
from infra.store.samples import Sample
from tasks import rewards


def rewarded(samples: Sequence[Sample], prompts: Sequence[Prompt], name: str) -> list[Sample]:
    """Return the samples with reward and reward_parts."""
    reward, asked = rewards.find(name), {prompt.prompt_id: prompt for prompt in prompts}
    scored = []
    with progress.work("scoring", len(samples), "samples") as work:
        for sample in samples:
            prompt = asked[sample.prompt_id]
            parts = rewards.called(name, reward, question=prompt.question, completion=sample.text, answer=prompt.answer)
            scored.append(replace(sample, reward=sum(parts.values()), reward_parts=parts))
            work.done += 1
    return scored
