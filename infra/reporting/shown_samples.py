"""The samples of a step that a person should see first."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from infra.models import base_model
from infra.store.files import read_json, read_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import Sample, episodes_of, groups_of, read_samples


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


def turns_of(episode: Sequence[Sample], model_folder: Path) -> list[tuple[str, str]]:
    """Return what was sampled and given after the first prompt, in order, each with a heading; empty for one prompt and one answer. The whole
    context is shown again where another trajectory of the episode begins."""
    return [turn for sample in episode if sample.segments for turn in _turns_of(sample, model_folder)]


def _turns_of(sample: Sample, model_folder: Path) -> list[tuple[str, str]]:
    spans, tokens = sample.segments, [*sample.prompt_tokens, *sample.output_tokens]
    ends = list(accumulate(span.num_tokens for span in spans))
    pieces = [[int(token) for token in tokens[end - span.num_tokens : end]] for span, end in zip(spans, ends, strict=True)]
    found, number, rewards = (
        list[tuple[str, str]](),
        sample.first_turn,
        dict(enumerate(sample.turn_rewards or (), sample.first_turn)),
    )
    (context, prompt), *others = zip(spans, base_model.texts_of(model_folder, pieces), strict=True)
    if sample.branch:
        begins = f"context of turn {number + 1}" if number else f"branch {sample.branch}, its context"
        found.append((f"{begins}, {context.num_tokens} tokens", prompt))
    for span, text in others:
        if not span.is_sampled:
            found.append((f"given, {span.num_tokens} tokens", text))
            continue
        reward = f", reward {rewards[number]:.3g}" if number in rewards else ""
        number += 1
        found.append((f"turn {number}, {span.num_tokens} tokens{reward}", text))
    return found


def best_and_worst_rows(run: str, step: int, count: int) -> list[dict[str, Any]]:  # Any: text, numbers, turns
    """Return rows of a table of samples: prompt, completion, its turns, reward, advantage, parts of the reward, the answer of a model that
    judged. Raises ValueError for a file of prompts that has lost one of them."""
    folder = StepFolder.at(run, step)
    episodes = {episode[0].episode: episode for episode in episodes_of(read_samples(folder.assembled))}
    chosen = best_and_worst([episode[0] for episode in episodes.values()], count)
    has_turns = any(sample.segments for sample in chosen)
    model_folder = base_model.locate(read_json(folder.config)["model"]) if has_turns else Path()
    answers = answers_of_judge(folder)
    questions = {row["prompt_id"]: row["question"] for row in read_json_lines(folder.prompts)}
    if lost := [sample.prompt_id for sample in chosen if sample.prompt_id not in questions]:
        raise ValueError(
            f"{folder.prompts} has no prompt {lost[0]}, of which {folder.assembled} has samples: put the whole file back"
        )
    return [
        {
            "prompt": questions[sample.prompt_id],
            "completion": sample.text,
            "turns": turns_of(episodes[sample.episode], model_folder),
            "reward": sample.reward,
            "advantage": fmean(each.advantage or 0.0 for each in episodes[sample.episode]),
            "parts": sample.reward_parts or {},
            "judge": answers.get((sample.prompt_id, sample.sample_index), ""),
        }
        for sample in chosen
    ]
