"""Judge samples by a reward outside, with a journal: a scoring that is killed goes on at the missing samples."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from infra.data.prompts import Prompt
from infra.rewards.outcome import Outcome
from infra.rewards.signatures import Fields
from infra.store.journal import LineJournal
from infra.store.samples import Sample

Key = tuple[str, int, int]
"""Name of the function, prompt id and sample index."""


class ScoreJournal(LineJournal):
    """A context manager. `outcomes` holds the judged samples of earlier attempts; unjudged ones are tried again."""

    def __init__(self, path: Path, fence: dict[str, str]) -> None:
        super().__init__(path, fence)
        self.outcomes: dict[Key, Outcome] = {}

    def _recover(self, lines: Sequence[dict[str, Any]]) -> Iterable[object]:
        for line in lines:
            self.outcomes[line["function"], line["prompt_id"], line["sample_index"]] = Outcome(line["reward"], line["parts"])
        return list(lines)

    def add(self, function: str, sample: Sample, outcome: Outcome) -> None:
        if outcome.reward is not None:
            place = {"function": function, "prompt_id": sample.prompt_id, "sample_index": sample.sample_index}
            self.write({**place, "reward": outcome.reward, "parts": outcome.parts})


def fields_of(sample: Sample, prompt: Prompt, takes: Iterable[str], group: Sequence[Sample]) -> bytes:
    """Return what a reward takes of a sample, as JSON."""
    makers: Mapping[str, Callable[[], Any]] = {
        "completion": lambda: sample.text,
        "messages": lambda: [*_messages(prompt), {"role": "assistant", "content": sample.text}],
        "row": lambda: prompt.row,
        "question": lambda: prompt.question,
        "answer": lambda: prompt.answer,
        "prompt_tokens": lambda: sample.prompt_tokens,
        "output_tokens": lambda: sample.output_tokens,
        "finish_reason": lambda: sample.finish_reason,
        "group": lambda: [_in_group(each) for each in group],
        "sample_index": lambda: sample.sample_index,
    }
    found: Fields = {name: makers[name]() for name in takes}
    return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)


def _messages(prompt: Prompt) -> list[Any]:
    """Return the messages of the row; of a row that has none, its question as the user's."""
    for column in ("messages", "prompt"):
        if isinstance(found := prompt.row.get(column), list):
            return found
    return [{"role": "user", "content": prompt.question}]


def _in_group(sample: Sample) -> Fields:
    return {
        "sample_index": sample.sample_index,
        "completion": sample.text,
        "finish_reason": sample.finish_reason,
        "num_output_tokens": sample.num_sampled_tokens,
    }
