"""`/v1/completions`: a prompt without messages, as text or as token ids."""

from collections.abc import Iterator
from typing import Any

from infra.gateway.http.chat_api import Json, usage
from infra.gateway.http.fields import Fields
from infra.gateway.rendering.messages import BadRequest
from infra.gateway.rendering.token_text import TokenText
from infra.gateway.session.session import Session
from infra.gateway.session.turn import Query, TurnAnswer


def completion_query(session: Session, fields: Fields) -> Query:
    """Return the turn that a request asks for. Raises BadRequest for fields that cannot be served."""
    if fields.content.get("logprobs") not in (None, 0) or fields.content.get("logprobs") is False:
        raise BadRequest("logprobs must be 0: only the sampled tokens' log-probabilities are known")
    prompt = fields.content.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return session.text_query(prompt, fields.max_tokens)
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return session.tokens_query(prompt, fields.max_tokens)
    raise BadRequest(f"prompt is {prompt!r:.60}, must be one text or one list of token ids")


def completion_answer(answer: TurnAnswer, fields: Fields, model: str, text: TokenText, created: int) -> Json:
    """Return the body of an answer, as OpenAI's API has it. created: seconds since 1970."""
    logprobs = None if fields.content.get("logprobs") is None else _logprobs(answer, text)
    choice = {"index": 0, "text": answer.message.content, "finish_reason": answer.record.finish_reason, "logprobs": logprobs}
    head = {"id": f"cmpl-{answer.turn_id}", "object": "text_completion", "created": created, "model": model}
    return head | {"choices": [choice], "usage": usage(answer)}


def completion_chunks(answer: TurnAnswer, fields: Fields, model: str, text: TokenText, created: int) -> Iterator[Json]:
    """Yield the complete answer as one chunk, then its usage, if it is asked for."""
    whole = completion_answer(answer, fields, model, text, created)
    used = whole.pop("usage")
    yield whole
    if fields.has_usage_chunk:
        yield whole | {"choices": [], "usage": used}


def _logprobs(answer: TurnAnswer, text: TokenText) -> dict[str, Any]:
    return {
        "tokens": [text.decode_all([token]) for token in answer.record.output_tokens],
        "token_logprobs": answer.record.output_logprobs,
        "top_logprobs": None,
        "text_offset": None,
    }
