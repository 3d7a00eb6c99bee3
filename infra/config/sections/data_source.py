"""One of several sources of prompts, as data.sources names it: `mine.jsonl?weight=2&answer_column=solution`."""

from typing import NamedTuple, Self
from urllib.parse import parse_qsl

OPTIONS = (
    "subset",
    "revision",
    "split",
    "question_column",
    "answer_column",
    "messages_column",
    "tools_column",
    "assistant_turn",
    "filter",
)
"""Fields of the section `data` that a source may have for itself."""
MIXED = "mixed"
"""The value of data.source where data.sources is given."""


class DataSource(NamedTuple):
    source: str
    fields: dict[str, object]
    weight: float | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for an option that is unknown, or a weight that is no number above 0."""
        source, _, options = text.partition("?")
        fields: dict[str, object] = {}
        weight = None
        for name, value in parse_qsl(options, keep_blank_values=True):
            if name == "weight":
                weight = _weight(text, value)
            elif name == "filter":
                fields["filter"] = (*fields.get("filter", ()), value)  # type: ignore[misc]
            elif name in OPTIONS:
                fields[name] = value
            else:
                raise ValueError(f"data.sources {text!r}: option {name!r} is unknown; known are weight, {', '.join(OPTIONS)}")
        return cls(source, fields, weight)


def _weight(text: str, value: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise ValueError(f"data.sources {text!r}: weight {value!r} is no number above 0")
    return weight
