"""The samples of a step that a person should see first."""

from itertools import accumulate
from pathlib import Path
from typing import Any

from infra.models import base_model
from infra.store.files import read_json, read_json_lines
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


def turns_of(sample: Sample, model_folder: Path) -> list[tuple[str, str]]:
    """Return what was sampled and given after the first prompt, in order, each with a heading; empty for one prompt and one answer."""
    if not sample.segments:
        return []
    spans, tokens = sample.segments, [*sample.prompt_tokens, *sample.output_tokens]
    ends = list(accumulate(span.num_tokens for span in spans))
    pieces = [[int(token) for token in tokens[end - span.num_tokens : end]] for span, end in zip(spans, ends, strict=True)]
    found, rewards, number = [], sample.turn_rewards or (), 0
    for span, text in [*zip(spans, base_model.texts_of(model_folder, pieces), strict=True)][1:]:
        if not span.is_sampled:
            found.append((f"given, {span.num_tokens} tokens", text))
            continue
        reward = f", reward {rewards[number]:.3g}" if number < len(rewards) else ""
        number += 1
        found.append((f"turn {number}, {span.num_tokens} tokens{reward}", text))
    return found


def best_and_worst_rows(run: str, step: int, count: int) -> list[dict[str, Any]]:  # Any: text, numbers, turns
    """Return rows of a table of samples: prompt, completion, its turns, reward, advantage, parts of the reward, the answer of a model that
    judged."""
    folder = StepFolder.at(run, step)
    chosen = best_and_worst(read_samples(folder.assembled), count)
    has_turns = any(sample.segments for sample in chosen)
    model_folder = base_model.locate(read_json(folder.config)["model"]) if has_turns else Path()
    answers = answers_of_judge(folder)
    questions = {row["prompt_id"]: row["question"] for row in read_json_lines(folder.prompts)}
    return [
        {
            "prompt": questions[sample.prompt_id],
            "completion": sample.text,
            "turns": turns_of(sample, model_folder),
            "reward": sample.reward,
            "advantage": sample.advantage,
            "parts": sample.reward_parts or {},
            "judge": answers.get((sample.prompt_id, sample.sample_index), ""),
        }
        for sample in chosen
    ]
