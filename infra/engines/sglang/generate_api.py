"""SGLang's /generate: how a completion is requested, and how the response is parsed."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import httpx

from infra.engines.server.transport import GenerateRequest, GenerateResponse
from infra.engines.sglang.routed_experts import routes_of
from infra.failures import EngineRefused, WrongAnswer
from infra.store.routes import RouteShape


def all_parsed(response: httpx.Response, number: int) -> list[dict[str, Any]]:
    """Parse the answers to a /generate call with several texts.

    Raises:
        WrongAnswer: if they do not have the requested form.
    """
    try:
        answers = [checked(answer) for answer in response.json()]
        if len(answers) != number:
            raise ValueError(f"{len(answers)} answers")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WrongAnswer(
            f"the engine's answers have not the form that was asked for: {error}", {"answer": response.text}
        ) from error
    return answers


def checked(answer: Any) -> dict[str, Any]:
    """Check one answer. Raises ValueError, TypeError, KeyError or AttributeError if it is not an answer."""
    num_tokens, about = len(answer["output_ids"]), answer["meta_info"]
    if {"output_token_logprobs", "finish_reason", "cached_tokens"} <= about.keys() and num_tokens >= 0:
        return dict(answer)
    raise KeyError("meta_info")


def is_aborted_before_start(content: Any) -> bool:
    """Whether a request was still queued when all were aborted: its response contains only this error."""
    return (content["meta_info"]["finish_reason"] or {}).get("type") == "abort" and not content.get("output_ids")


def values(answer: dict[str, Any], name: str) -> list[float]:
    """Read log-probs; nan where the engine gives none, since JSON has no nan."""
    return [math.nan if entry[0] is None else float(entry[0]) for entry in answer["meta_info"][name]]


def check_tokens(answer: dict[str, Any], name: str, tokens: Sequence[int]) -> None:
    """Raises ValueError if the engine reports log-probs of other tokens. Their number is not checked."""
    said = (entry[1] for entry in answer["meta_info"][name])
    if other := next(((told, token) for told, token in zip(said, tokens, strict=False) if told != token), None):
        raise ValueError(f"{name} is of token {other[0]} where the text has {other[1]}")


def check_version(answer: dict[str, Any], version: str) -> None:
    """Check the version of the weights. With merged weights no request can name its adapter, but each answer reports the weights' version.

    Raises:
        WrongAnswer: if the weights have another version.
    """
    said = answer["meta_info"].get("weight_version")
    if said != version:
        raise WrongAnswer(f"the engine answered with weights {said!r}, asked for {version!r}", {"answer": answer})


class Generate:
    """SGLang's ServerApi."""

    path = "/generate"
    aborts_by_id = True

    def __init__(
        self, stop_token_ids: list[int], merged_version: str | None = None, route_shape: RouteShape | None = None
    ) -> None:
        """merged_version: Version of the weights that contain the adapter. None: requests name their adapter.
        route_shape: Of the model's routes; None: no request returns them.
        """
        self.stop_token_ids, self.merged_version, self.route_shape = stop_token_ids, merged_version, route_shape

    def body(self, request: GenerateRequest) -> dict[str, object]:
        sampling: dict[str, object] = {
            "temperature": request.temperature,
            "max_new_tokens": request.max_new_tokens,
            "sampling_seed": request.seed,
        }
        sampling |= {"top_p": request.top_p} if request.top_p < 1 else {}
        sampling |= {"ignore_eos": True} if request.ignore_eos else {"stop_token_ids": self.stop_token_ids}
        body: dict[str, object] = {"input_ids": request.tokens, "sampling_params": sampling, "return_logprob": True}
        body |= {"rid": request.request_id} if request.request_id else {}
        body |= {"extra_key": request.cache_key} if request.cache_key else {}
        body |= {"return_routed_experts": True} if request.returns_routes else {}
        return body if self.merged_version else body | {"lora_path": request.adapter_name}

    def stream_body(self, request: GenerateRequest) -> dict[str, object]:
        return self.body(request) | {"stream": True}

    def abort(self, request_ids: Iterable[str]) -> list[tuple[str, dict[str, object]]]:
        return [("/abort_request", {"rid": request_id}) for request_id in request_ids]

    def refused(self, error: EngineRefused) -> Exception:
        return error

    def answer(self, content: Any, request: GenerateRequest) -> GenerateResponse:
        if is_aborted_before_start(content):
            return GenerateResponse([], [], "abort", 0)
        answer = checked(content)
        if self.merged_version:
            check_version(answer, self.merged_version)
        about = answer["meta_info"]
        check_tokens(answer, "output_token_logprobs", answer["output_ids"])
        reason, routes = (about["finish_reason"] or {}).get("type", "error"), None
        if request.returns_routes and self.route_shape and reason != "abort":
            routes = routes_of(about, len(request.tokens) + len(answer["output_ids"]), self.route_shape)
        return GenerateResponse(
            tokens=answer["output_ids"],
            logprobs=values(answer, "output_token_logprobs"),
            finish_reason=reason,
            num_cached=int(about["cached_tokens"]),
            routes=routes,
        )

    def merge_chunks(self, chunks: Sequence[Any]) -> Any:
        """Merge the chunks of a stream. With --incremental-streaming-output each chunk holds only new tokens; without it, all tokens so far. A
        stream of n tokens then sends n * n / 2 of them, so infra/comparison sets the flag. All other fields are taken from the last chunk."""
        whole = [checked(chunk) for chunk in chunks]
        about = whole[-1]["meta_info"]
        return {
            "output_ids": [token for chunk in whole for token in chunk["output_ids"]],
            "meta_info": about
            | {"output_token_logprobs": [pair for chunk in whole for pair in chunk["meta_info"]["output_token_logprobs"]]},
        }
