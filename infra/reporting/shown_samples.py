"""The samples of a step that a person should see first."""

from infra.store.files import read_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import Sample, groups_of, read_samples


def best_and_worst(samples: list[Sample], count: int) -> list[Sample]:
    """Choose the sample with the highest and the one with the lowest reward, of as many groups as fit."""
    chosen: list[Sample] = []
    for group in groups_of(samples):
        ranked = sorted(group, key=lambda sample: sample.reward or 0.0)
        chosen += [ranked[-1], ranked[0]]
    return chosen[:count]


def best_and_worst_rows(run: str, step: int, count: int) -> list[dict[str, object]]:
    """Return rows of a table of samples: prompt, completion, reward, advantage, parts of the reward."""
    folder = StepFolder.at(run, step)
    questions = {row["prompt_id"]: row["question"] for row in read_json_lines(folder.prompts)}
    return [
        {
            "prompt": questions[sample.prompt_id],
            "completion": sample.text,
            "reward": sample.reward,
            "advantage": sample.advantage,
            "parts": sample.reward_parts or {},
        }
        for sample in best_and_worst(read_samples(folder.assembled), count)
    ]
