"""RULER as ART defines it: one request in which a judge compares the trajectories of a group, with their common beginning taken out.

Source: OpenPipe/ART, src/art/rewards/ruler.py at 1145f0291ee8cb1eb0c59804e1223c666fb530dc (Apache License 2.0). The prompt and the grading
standards are its, to the letter; a test compares the messages with what its code makes. Two things differ on purpose. Scores are given
to trajectories by their ids, not by their order. And a group with a single sample is not judged: there is nothing to compare it with.
"""

import json
from collections.abc import Sequence
from textwrap import dedent
from typing import Any

from infra.rewards.judges.answers import json_in, score_of, shown
from infra.rewards.judges.cases import Case, Messages, Schema

STANDARDS = """
- A trajectory that achieves its goal should always get a significantly higher score than a trajectory that does not achieve its goal.
- A trajectory that achieves its goal more efficiently (eg. by avoiding unproductive detours) should get a higher score than a trajectory that achieves its goal less efficiently.
- If one trajectory is only slightly better than another, the difference in scores should be small. If it is significantly better, the difference in scores should be large.
- You may give some partial credit for a trajectory that makes progress towards its goal but does not complete it.
"""  # noqa: E501  # ART's words
TASK = (
    "All of the trajectories below have been given the same goal. Your job is to consider each of them and give them a score between 0 and 1. "
    "Take into consideration your best judgement of the agent's goal."
)
MARGIN = " " * 8
"""ART's template keeps its indentation when a rubric's lines have none."""
LOW, HIGH = 0.0, 1.0
SCORE = {
    "type": "object",
    "properties": {
        "trajectory_id": {"type": "string", "description": "The id of the trajectory being scored."},
        "explanation": {"type": "string", "description": "A short description of the trajectory's performance."},
        "score": {"type": "number", "description": "A score between 0 and 1."},
    },
    "required": ["trajectory_id", "explanation", "score"],
    "additionalProperties": False,
}
SCHEMA: Schema = {
    "name": "Response",
    "schema": {
        "type": "object",
        "properties": {"scores": {"type": "array", "items": SCORE, "description": "The scores for each trajectory."}},
        "required": ["scores"],
        "additionalProperties": False,
    },
}


def num_common(trajectories: Sequence[Messages]) -> int:
    """Return how many messages all trajectories begin with."""
    number = 0
    for messages in zip(*trajectories, strict=False):
        if any(message != messages[0] for message in messages):
            break
        number += 1
    return number


def are_equal(trajectories: Sequence[Messages]) -> bool:
    return all(messages == trajectories[0] for messages in trajectories)


def messages_of(trajectories: Sequence[Messages], standards: str = "") -> list[dict[str, Any]]:
    """Return the judge's messages. Of equal trajectories only one is shown, whole. standards: Empty: ART's."""
    if are_equal(trajectories):
        context, shown = "", [trajectories[0]]
    else:
        begin = num_common(trajectories)
        context = f"<context>\n{json.dumps(list(trajectories[0][:begin]))}\n</context>\n\n" if begin else ""
        shown = [messages[begin:] for messages in trajectories]
    parts = [
        f'<trajectory id="{number}">\n{json.dumps(list(messages))}\n</trajectory>'
        for number, messages in enumerate(shown, start=1)
    ]
    return [
        {"role": "system", "content": _system(standards or STANDARDS)},
        {"role": "user", "content": f"{context}Trajectories:\n\n" + "\n\n".join(parts)},
    ]


def _system(standards: str) -> str:
    return dedent(f"\n{MARGIN}{TASK}\n\n{MARGIN}Grading standards:\n{MARGIN}{standards}\n{MARGIN}")


def scores_in(answer: str, num_trajectories: int) -> list[float]:
    """Return the scores in the order of the trajectories.

    Raises:
        ValueError: unless each trajectory has just one score, from 0 to 1.
    """
    found = json_in(answer).get("scores")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"it has no list of scores: {shown(answer)}")
    by_id = {str(each.get("trajectory_id")): each.get("score") for each in found}
    wanted = [str(number) for number in range(1, num_trajectories + 1)]
    if len(found) != num_trajectories or sorted(by_id) != sorted(wanted):
        raise ValueError(
            f"it has scores for {', '.join(by_id) or 'nothing'}, where trajectories 1 to {num_trajectories} were shown"
        )
    return [score_of(by_id[each], LOW, HIGH) for each in wanted]


def case_of(indices: Sequence[int], trajectories: Sequence[Messages], standards: str) -> Case:
    """Return the request for a group of two or more samples. Equal trajectories share one score."""
    num = 1 if are_equal(trajectories) else len(trajectories)

    def read(answer: str) -> list[float]:
        scores = scores_in(answer, num)
        return scores if num > 1 else scores * len(trajectories)

    return Case(tuple(indices), messages_of(trajectories, standards), SCHEMA, read)
