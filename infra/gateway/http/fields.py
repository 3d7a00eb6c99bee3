"""Fields of OpenAI's requests: each is served, or refused by name. None is ignored in silence."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.gateway.rendering.messages import BadRequest

WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Names that a caller gives its requests; they change no answer of OpenAI's either."""
ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "1: send the request again for another answer, which is a branch"),
    "best_of": ((1,), "1"),
    "stop": (([], ""), "left out: an answer ends with the model's own token"),
    "top_p": ((1,), "1: the trainer computes the whole distribution"),
    "frequency_penalty": ((0,), "0: the trainer computes the distribution without penalties"),
    "presence_penalty": ((0,), "0: the trainer computes the distribution without penalties"),
    "logit_bias": (({},), "left out: the trainer computes the distribution without it"),
    "top_logprobs": ((0,), "0: only the sampled tokens' log-probabilities are known"),
    "seed": ((), "left out: seeds are derived from the run's"),
    "response_format": (({"type": "text"},), "{'type': 'text'}: structured output is not supported"),
    "text": (({}, {"format": {"type": "text"}}), "{'format': {'type': 'text'}}: structured output is not supported"),
    "parallel_tool_calls": ((True,), "true: the model may call several tools at once"),
    "tool_choice": (("auto", "none"), "'auto' or 'none': a call cannot be forced"),
    "store": ((False,), "false: answers are kept with the episode only"),
    "service_tier": (("auto", "default"), "left out"),
    "modalities": ((["text"],), "['text']"),
    "echo": ((False,), "false"),
    "suffix": (("",), "left out"),
    "background": ((False,), "false"),
    "truncation": (("disabled",), "'disabled': a conversation without room ends the episode"),
    "include": (([],), "left out"),
    "reasoning": (({},), "left out: how much a model reasons is learnt"),
    "top_k": ((0, -1), "0 or -1: the trainer computes the whole distribution"),
    "min_p": ((0,), "0: the trainer computes the whole distribution"),
    "repetition_penalty": ((1,), "1: the trainer computes the distribution without penalties"),
    "min_tokens": ((0,), "0: an answer ends with the model's own token"),
    "ignore_eos": ((False,), "false: an answer ends with the model's own token"),
    "reasoning_effort": ((), "left out: how much a model reasons is learnt"),
}
"""By field: the values that it may have besides null, and what would be right."""
SAMPLING = ("n", "stop", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "temperature", "service_tier")
CHAT = (
    *("messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options", "logprobs", "top_logprobs"),
    *("response_format", "parallel_tool_calls", "tool_choice", "store", "modalities", "reasoning_effort", *SAMPLING),
)
COMPLETIONS = ("prompt", "max_tokens", "stream", "stream_options", "logprobs", "best_of", "echo", "suffix", *SAMPLING)
RESPONSES = (
    *("input", "instructions", "previous_response_id", "tools", "max_output_tokens", "stream", "temperature", "top_p", "text"),
    *("parallel_tool_calls", "tool_choice", "store", "service_tier", "background", "truncation", "include", "reasoning"),
)

GENERATE = ("token_ids", "sampling_params", "cache_salt", "priority")
"""The last two have no effect: each adapter has a prefix cache of its own, and turns come in their order."""
GENERATE_SAMPLING = (
    *("max_tokens", "logprobs", "stop_token_ids", "skip_special_tokens"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", *SAMPLING),
)


@dataclass(frozen=True)
class Fields:
    """A request's fields, after the check."""

    content: Mapping[str, Any]
    is_stream: bool
    has_usage_chunk: bool
    max_tokens: int | None

    @property
    def offers_tools(self) -> bool:
        return self.content.get("tool_choice") != "none"


class UnknownModel(BadRequest):
    """The request names a model that is not served."""


def checked_fields(content: object, known: tuple[str, ...], model: str, temperature: float) -> Fields:
    """Raises BadRequest for a field that is unknown or has a value that cannot be served; names it."""
    if not isinstance(content, Mapping):
        raise BadRequest("the request must be a JSON object")
    if content.get("model") != model:
        raise UnknownModel(f"model {content.get('model')!r} is not served, take {model!r}")
    for name, value in content.items():
        if name not in (*known, "model", *WITHOUT_EFFECT):
            raise BadRequest(f"{name} is not supported; known are {', '.join(sorted(known))}")
        values, right = ONLY.get(name, ((value,), ""))
        if value is not None and value not in values:
            raise BadRequest(f"{name} is {value!r:.80}, it must be {right}")
    asked = content.get("temperature")
    if asked is not None and asked != temperature:
        raise BadRequest(
            f"temperature is {asked!r:.20}, this rollout samples at {temperature:g} (sampling.temperature): leave it out"
        )
    options = content.get("stream_options") or {}
    if not isinstance(options, Mapping) or set(options) - {"include_usage", "include_obfuscation"}:
        raise BadRequest("stream_options may have include_usage only")
    return Fields(content, _flag(content, "stream"), bool(options.get("include_usage")), _max_tokens(content))


def _flag(content: Mapping[str, Any], name: str) -> bool:
    value = content.get(name)
    if value not in (None, True, False):
        raise BadRequest(f"{name} is {value!r:.40}, must be true or false")
    return bool(value)


def _max_tokens(content: Mapping[str, Any]) -> int | None:
    given = {
        name: content[name]
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")
        if content.get(name) is not None
    }
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise BadRequest(f"{name} is {value!r:.40}, must be a whole number of 1 or more")
    if len(set(given.values())) > 1:
        raise BadRequest(f"{' and '.join(given)} differ: give one of them")
    return next(iter(given.values()), None)
