"""The experts to which SGLang sent each token of an answer, from the answer's meta_info.

SGLang leaves the key out, without an error, where its server has not --enable-return-routed-experts. MoE runners that choose the experts in
their own kernels record nothing: all rows are 0 then. A retraction computes an answer's beginning again, with routes that are not those of
the log-probs that it has given.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from infra.failures import WrongAnswer
from infra.store.routes import RouteShape, serialized

KEY = "routed_experts"
FLAG = "--enable-return-routed-experts"


def routes_of(about: Mapping[str, Any], num_tokens: int, shape: RouteShape) -> bytes | None:
    """Return an answer's routes as a sample carries them; None if the engine retracted the request.

    about: Its meta_info.
    num_tokens: Tokens of prompt and answer.

    Raises:
        WrongAnswer: if there are none, or they have another number of rows, or cannot be routes of this model.
    """
    if about.get("num_retractions"):
        return None
    layout = f"{num_tokens - 1} rows of {shape.num_layers} layers x {shape.per_token} experts"
    if KEY not in about:
        raise _wrong(f"the engine's answer has no {KEY}, {layout} were asked for: does its server run with {FLAG}?", about)
    try:
        found = np.frombuffer(base64.b64decode(about[KEY], validate=True), np.int32)
    except (ValueError, TypeError) as error:
        raise _wrong(f"the engine's {KEY} are no int32 numbers in base64: {error}", about) from error
    row = shape.num_layers * shape.per_token
    if found.size != (num_tokens - 1) * row:
        got = f"{found.size // row} rows" if found.size % row == 0 else f"{found.size} numbers"
        raise _wrong(f"the engine's {KEY} are {got}, {layout} were asked for ({num_tokens} tokens, the last one has none)", about)
    if found.size and not 0 <= found.min() <= found.max() < shape.num_experts:
        raise _wrong(
            f"the engine's {KEY} are {found.min()} to {found.max()}, the model has the experts 0 to {shape.num_experts - 1}",
            about,
        )
    routes = found.reshape(-1, shape.num_layers, shape.per_token)
    records_none = "its MoE runner does not record routes, take --moe-runner-backend triton"
    if shape.per_token > 1 and (same := np.argwhere(routes[..., 0] == routes[..., 1])).size:
        raise _wrong(
            f"the engine's {KEY} send token {same[0][0]} twice to expert {routes[*same[0], 0]} in layer {same[0][1]}: {records_none}",
            about,
        )
    if shape.per_token == 1 and found.size and not found.any():
        raise _wrong(f"the engine's {KEY} send all tokens to expert 0 in each layer: {records_none}", about)
    return serialized(routes.astype(shape.dtype))


def _wrong(message: str, about: Mapping[str, Any]) -> WrongAnswer:
    return WrongAnswer(message, {"meta_info": {name: value for name, value in about.items() if name not in (KEY, *LONG)}})


LONG = ("output_token_logprobs", "input_token_logprobs")
"""Fields of meta_info that say nothing of routes."""
