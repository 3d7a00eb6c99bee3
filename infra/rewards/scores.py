"""Judge samples by a reward outside, with a journal: a scoring that is killed goes on at the missing samples."""

import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson

from infra.data.forms.row import text_of
from infra.data.prompts import Prompt
from infra.rewards.outcome import Outcome
from infra.rewards.signatures import Fields
from infra.store.journal import LineJournal
from infra.store.samples import Sample

Key = tuple[str, int, int, str]
"""Name of the function, prompt id, sample index, and digest of what the function takes of the sample."""
PROCESS = uuid.uuid4().hex


class ScoreJournal(LineJournal):
    """A context manager. `outcomes` holds the judged samples of earlier attempts. Unjudged ones are tried again, but for those that this process
    has tried while the rollout ran: their outcome is used once."""

    decided_by: ClassVar[str] = "rollout, or another state of the reward"
    results: ClassVar[str] = "scores"

    def __init__(self, path: Path, fence: dict[str, str]) -> None:
        super().__init__(path, fence)
        self.outcomes: dict[Key, Outcome] = {}

    def _recover(self, lines: Sequence[dict[str, Any]]) -> Iterable[object]:
        for line in lines:
            if line["outcome"][0] is not None or line["process"] == PROCESS:
                function, prompt_id, sample_index, digest = line["key"]
                self.outcomes[function, prompt_id, sample_index, digest] = Outcome(*line["outcome"])
        return [line for line in lines if line["outcome"][0] is not None]

    def add(self, key: Key, outcome: Outcome, *, keeps_unjudged: bool = False) -> None:
        if outcome.reward is not None or keeps_unjudged:
            self.write({"key": key, "outcome": list(outcome), "process": PROCESS})


def key_of(function: str, sample: Sample, fields: bytes) -> Key:
    """Return the key of a judgement. fields: As fields_of returns them."""
    return function, sample.prompt_id, sample.sample_index, hashlib.sha256(fields).hexdigest()


def fields_of(sample: Sample, prompt: Prompt, takes: Iterable[str], group: Sequence[Sample]) -> bytes:
    """Return what a reward takes of a sample, as JSON."""
    makers: Mapping[str, Callable[[], Any]] = {
        "completion": lambda: sample.text,
        "messages": lambda: _conversation(prompt, sample.text),
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


def _conversation(prompt: Prompt, text: str) -> list[Any]:
    """Return the messages that were asked and the answer; of a prompt that begins the answer, the beginning goes with it."""
    asked = prompt.messages or [{"role": "user", "content": prompt.question}]
    if asked[-1]["role"] == "assistant":
        return [*asked[:-1], asked[-1] | {"content": f"{text_of(asked[-1])}{text}"}]
    return [*asked, {"role": "assistant", "content": text}]


def _in_group(sample: Sample) -> Fields:
    return {
        "sample_index": sample.sample_index,
        "completion": sample.text,
        "finish_reason": sample.finish_reason,
        "num_output_tokens": sample.num_sampled_tokens,
    }
