"""`/inference/v1/generate`: token ids in, token ids out. verifiers' train client and prime-rl ask it, as vLLM serves it.

Source: renderers 0.1.12 (github.com/PrimeIntellect-ai/renderers), renderers/client.py, function `generate`.
"""

from collections.abc import Iterator, Mapping

from infra.gateway.http.chat_api import Json, usage
from infra.gateway.http.fields import GENERATE_SAMPLING, Fields, checked_fields
from infra.gateway.rendering.messages import BadRequest
from infra.gateway.rendering.token_text import TokenText
from infra.gateway.session.session import Session
from infra.gateway.session.turn import Query, TurnAnswer

PATH = "/inference/v1/generate"
"""At the server's root, not below `/v1`."""


def generate_query(session: Session, fields: Fields) -> Query:
    """Return the turn that a request asks for: the given tokens extend a sequence on record, or begin a branch. Raises BadRequest for fields that
    cannot be served."""
    tokens, sampling = fields.content.get("token_ids"), fields.content.get("sampling_params")
    if not isinstance(tokens, list) or not tokens or any(type(token) is not int or token < 0 for token in tokens):
        raise BadRequest(f"token_ids is {tokens!r:.60}, must be a list of token ids")
    if sampling is not None and not isinstance(sampling, Mapping):
        raise BadRequest(f"sampling_params is {sampling!r:.60}, must be an object")
    model = fields.content["model"]
    found = checked_fields({**(sampling or {}), "model": model}, GENERATE_SAMPLING, model, session.limits.temperature)
    if found.content.get("logprobs") not in (None, 0, 1):
        raise BadRequest(
            f"logprobs is {found.content['logprobs']!r:.40}, it must be 1: only the sampled tokens' log-probabilities are known"
        )
    stops = found.content.get("stop_token_ids") or []
    if not isinstance(stops, list) or any(type(token) is not int for token in stops):
        raise BadRequest(f"stop_token_ids is {stops!r:.60}, must be a list of token ids")
    if others := set(stops) - session.limits.stop_token_ids:
        raise BadRequest(f"stop_token_ids has {sorted(others)}, which end no answer of this model: leave them out")
    return session.tokens_query(tokens, found.max_tokens)


def generate_answer(answer: TurnAnswer, fields: Fields, model: str, text: TokenText, created: int) -> Json:
    """Return the body of an answer: token ids, and the log-probability of each in nats."""
    record = answer.record
    entries: list[Json] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(record.output_tokens, record.output_logprobs, strict=True)
    ]
    choice = {
        "index": 0, "token_ids": record.output_tokens, "finish_reason": record.finish_reason, "logprobs": {"content": entries},
    }  # fmt: skip
    return {"request_id": answer.turn_id, "model": model, "created": created, "choices": [choice], "usage": usage(answer)}


def no_chunks(answer: TurnAnswer, fields: Fields, model: str, text: TokenText, created: int) -> Iterator[Json]:
    """A stream is refused by name."""
    return iter(())
