"""One row of a data set, the same for all layouts."""

from typing import NamedTuple

from infra.data.json_values import JSON

Message = dict[str, JSON]


class Chat(NamedTuple):
    """A prompt of several messages."""

    messages: list[Message]
    """With `role` and `content` as the chat template gets them. Where the last one is the assistant's, the model continues it."""
    tools: list[JSON] | None = None

    @property
    def is_continued(self) -> bool:
        return self.messages[-1]["role"] == "assistant"

    @property
    def question(self) -> str:
        """The text of the last message of the user, or of the last message of anyone where the user says nothing."""
        texts = [text_of(message) for message in self.messages if message["role"] == "user"]
        return texts[-1] if texts else text_of(self.messages[-1])


class Row(NamedTuple):
    question: str
    """The prompt's text; of several messages, the last one of the user."""
    answer: str
    columns: dict[str, JSON] = {}  # noqa: RUF012  # of a tuple
    """All columns of the row, as they are."""
    chat: Chat | None = None
    """None: the question is the only message."""

    @property
    def text(self) -> str:
        """What the user and the assistant say, by which rows are compared. System prompts, which many rows share, do not count."""
        if self.chat is None:
            return self.question
        return "\n".join(text_of(message) for message in self.chat.messages if message["role"] not in ("system", "developer"))


def text_of(message: Message) -> str:
    return str(message.get("content") or "")
