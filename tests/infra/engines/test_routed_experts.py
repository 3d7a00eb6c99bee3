"""Routes in SGLang's answers: how they are asked for, and every way in which they are not what they should be."""

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infra.config import EvalSamplingConfig, SamplingConfig
from infra.engines.server.transport import GenerateRequest
from infra.engines.sglang.generate_api import Generate
from infra.engines.sglang.routed_experts import routes_of
from infra.failures import WrongAnswer
from infra.store import routes
from infra.store.routes import RouteShape

SHAPE = RouteShape(num_layers=3, per_token=2, num_experts=8)
NUM_TOKENS = 5
ROWS = np.stack([np.arange(4 * 3) % 8, (np.arange(4 * 3) + 1) % 8], 1).reshape(4, 3, 2).astype(np.int32)
REQUEST = GenerateRequest([4, 5, 6], None, 1.0, 2, 0, ignore_eos=False, returns_routes=True)


def about(rows: Any = ROWS, **others: object) -> dict[str, Any]:
    return {"routed_experts": base64.b64encode(rows.tobytes()).decode(), "num_retractions": 0, **others}


def answer(meta: dict[str, Any]) -> dict[str, Any]:
    said = {"output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None]], "finish_reason": {"type": "stop"}, "cached_tokens": 0}
    return {"output_ids": [7, 8], "meta_info": said | meta}


def test_routes_are_those_of_the_answer_in_as_few_bytes_as_hold_an_expert() -> None:
    found = routes.parsed(routes_of(about(), NUM_TOKENS, SHAPE) or b"")
    assert found.dtype == np.uint8 and np.array_equal(found, ROWS)
    wide = ROWS * 100
    found = routes.parsed(routes_of(about(wide), NUM_TOKENS, RouteShape(3, 2, 701)) or b"")
    assert found.dtype == np.int16 and np.array_equal(found, wide)


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no key": (
        lambda: {"num_retractions": 0},
        "has no routed_experts, 4 rows of 3 layers x 2 experts were asked for: does its server run with --enable-return-routed-experts",
    ),
    "a row too few": (lambda: about(ROWS[1:]), "are 3 rows, 4 rows of 3 layers x 2 experts were asked for"),
    "a row too many": (lambda: about(np.concatenate([ROWS, ROWS[:1]])), "are 5 rows, 4 rows"),
    "another shape": (lambda: about(ROWS[:, :1, :1]), "are 4 numbers, 4 rows of 3 layers x 2 experts were asked for"),
    "no numbers": (lambda: about() | {"routed_experts": "!"}, "are no int32 numbers in base64"),
    "no text": (lambda: about() | {"routed_experts": [1, 2]}, "are no int32 numbers in base64"),
    "no such expert": (lambda: about(ROWS + 1), "are 1 to 8, the model has the experts 0 to 7"),
    "below zero": (lambda: about(ROWS - 1), "are -1 to 6, the model has the experts 0 to 7"),
    "nothing recorded": (
        lambda: about(0 * ROWS),
        "send token 0 twice to expert 0 in layer 0: its MoE runner does not record routes",
    ),
}


def test_with_one_expert_a_token_nothing_recorded_is_a_wrong_answer_too() -> None:
    one = RouteShape(num_layers=3, per_token=1, num_experts=8)
    assert routes.parsed(routes_of(about(ROWS[..., :1]), NUM_TOKENS, one) or b"").shape == (4, 3, 1)
    with pytest.raises(WrongAnswer, match=r"send all tokens to expert 0 in each layer: its MoE runner does not record routes"):
        routes_of(about(0 * ROWS[..., :1]), NUM_TOKENS, one)


@pytest.mark.parametrize("kind", BAD)
def test_routes_that_cannot_be_replayed_are_a_wrong_answer(kind: str) -> None:
    make, message = BAD[kind]
    with pytest.raises(WrongAnswer, match=message) as error:
        Generate([2], route_shape=SHAPE).answer(answer(make()), REQUEST)
    assert len(json.dumps(error.value.evidence)) < 500


def test_a_retracted_answer_has_no_routes() -> None:
    found = Generate([2], route_shape=SHAPE).answer(answer(about(num_retractions=1)), REQUEST)
    assert found.routes is None and found.tokens == [7, 8]


def test_routes_are_asked_for_and_read_where_the_request_wants_them_only() -> None:
    api, plain = Generate([2], route_shape=SHAPE), REQUEST._replace(returns_routes=False)
    assert api.body(REQUEST) == api.body(plain) | {"return_routed_experts": True}
    assert api.answer(answer(about()), REQUEST).routes == routes.serialized(ROWS.astype(np.uint8))
    assert api.answer(answer({}), plain).routes is None
    assert SamplingConfig().is_for_training and not EvalSamplingConfig().is_for_training
