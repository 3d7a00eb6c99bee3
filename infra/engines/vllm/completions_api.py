"""vLLM's /v1/completions: how a completion is requested, and how the response is parsed. From the source of vLLM 0.26.0,
vllm/entrypoints/openai/completion/{protocol,serving}.py.

* `prompt` may be token ids, and `return_token_ids` returns them; nothing is tokenised twice.
* `logprobs: 0` gives the log-prob of the sampled token; -inf is written as -9999.0.
* Its JSON encoder cannot write a log-prob that is NaN: HTTP 400 `Out of range float values are not JSON compliant`, as if the
request were wrong. In a stream it is null.
* An error in the middle of a stream is a chunk with HTTP status 200.
"""

from collections.abc import Iterable, Sequence
from typing import Any, get_args

from infra.engines.server.transport import GenerateRequest, GenerateResponse
from infra.failures import EngineRefused, EngineUnavailable, WrongAnswer
from infra.records import FinishReason

BASE_MODEL = "base"
"""The name under which the base model is served. An adapter's name contains its run and version."""
PATH = "/v1/completions"
NO_NUMBER = "not JSON compliant"


class Completions:
    """vLLM's ServerApi."""

    path = PATH
    aborts_by_id = False

    def __init__(self, stop_token_ids: list[int]) -> None:
        self.stop_token_ids = stop_token_ids

    def body(self, request: GenerateRequest) -> dict[str, object]:
        body: dict[str, object] = {
            "model": request.adapter_name or BASE_MODEL,
            "prompt": request.tokens,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        body |= {"top_p": request.top_p} if request.top_p < 1 else {}
        body |= {"cache_salt": request.cache_key} if request.cache_key else {}
        return body | ({"ignore_eos": True} if request.ignore_eos else {"stop_token_ids": self.stop_token_ids})

    def stream_body(self, request: GenerateRequest) -> dict[str, object]:
        return self.body(request) | {"stream": True, "stream_options": {"include_usage": True}}

    def answer(self, content: Any, request: GenerateRequest) -> GenerateResponse:
        (choice,) = content["choices"]
        details = (content.get("usage") or {}).get("prompt_tokens_details") or {}
        reason: FinishReason = choice["finish_reason"] if choice["finish_reason"] in get_args(FinishReason) else "error"
        return GenerateResponse(
            tokens=list(choice["token_ids"]),
            logprobs=numbers(choice["logprobs"]["token_logprobs"]),
            finish_reason=reason,
            num_cached=int(details.get("cached_tokens") or 0),
        )

    def merge_chunks(self, chunks: Sequence[Any]) -> Any:
        for chunk in chunks:
            if "error" in chunk:
                raise EngineUnavailable(f"{PATH}: the stream broke off: {chunk['error']}")
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        whole = {
            "token_ids": [token for choice in choices for token in choice["token_ids"] or []],
            "logprobs": {"token_logprobs": [value for choice in choices for value in _values(choice)]},
            "finish_reason": choices[-1]["finish_reason"],
        }
        return {"choices": [whole], "usage": chunks[-1].get("usage")}

    def abort(self, request_ids: Iterable[str]) -> list[tuple[str, dict[str, object]]]:
        return [("/abort_requests", {})]  # aborts all that are under way (entrypoints/serve/dev/rlhf/api_router.py)

    def refused(self, error: EngineRefused) -> Exception:
        return as_wrong_answer(error)


def _values(choice: dict[str, Any]) -> list[float | None]:
    values: list[float | None] = (choice.get("logprobs") or {}).get("token_logprobs") or []
    return values


def numbers(values: Sequence[float | None]) -> list[float]:
    """Convert log-probs; nan where the engine gives none."""
    return [float("nan") if value is None else float(value) for value in values]


def as_wrong_answer(error: EngineRefused) -> Exception:
    """Convert the error: vLLM reports an invalid number of its own as a wrong request."""
    if NO_NUMBER in str(error):
        return WrongAnswer(f"log-probability nan cannot be: {error}", {"answer": str(error)})
    return error
