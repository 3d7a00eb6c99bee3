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


def answers_of_judge(folder: StepFolder) -> dict[tuple[int, int], str]:
    """Return the first answer of a model that judged, by prompt id and sample index. Empty if no model did."""
    rows = read_json_lines(folder.judgements) if folder.judgements.exists() else []
    return {(row["prompt_id"], index): row["votes"][0]["text"] for row in rows for index in row["sample_indices"]}


def best_and_worst_rows(run: str, step: int, count: int) -> list[dict[str, object]]:
    """Return rows of a table of samples: prompt, completion, reward, advantage, parts of the reward, the answer of a model that judged."""
    folder = StepFolder.at(run, step)
    answers = answers_of_judge(folder)
    questions = {row["prompt_id"]: row["question"] for row in read_json_lines(folder.prompts)}
    return [
        {
            "prompt": questions[sample.prompt_id],
            "completion": sample.text,
            "reward": sample.reward,
            "advantage": sample.advantage,
            "parts": sample.reward_parts or {},
            "judge": answers.get((sample.prompt_id, sample.sample_index), ""),
        }
        for sample in best_and_worst(read_samples(folder.assembled), count)
    ]
