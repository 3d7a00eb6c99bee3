"""How an answer is read before anyone checks what it says."""

import json
import math

import pytest

from infra.engines.scoring import ScoreRequest, Scores, check
from infra.engines.server.transport import GenerateRequest, parsed
from infra.engines.sglang.generate_api import Generate, values
from infra.failures import WrongAnswer


@pytest.mark.parametrize(
    "content", [{"ids": [1, 2], "logprobs": [-1.25, -0.1, -3e-45, 0.0, -1]}, [], "caf\u00e9 \U0001f600", None]
)
def test_json_is_read_as_pythons_own_reader_reads_it(content: object) -> None:
    assert parsed(json.dumps(content).encode()) == content
    assert parsed(json.dumps(content, ensure_ascii=False).encode()) == content


def test_what_is_no_json_but_can_be_read_is_left_to_the_checks() -> None:
    assert math.isnan(parsed(b'{"logprob": NaN}')["logprob"])
    assert parsed(b'{"text": "\xff"}') == {"text": "\ufffd"}


@pytest.mark.parametrize("data", [b"", b"no JSON", b'{"cut off": ['])
def test_what_cannot_be_read_is_a_wrong_value(data: bytes) -> None:
    with pytest.raises(ValueError):  # whose words are the reader's
        parsed(data)


def test_a_log_probability_that_the_engine_does_not_give_is_nan() -> None:
    found = values(
        {"meta_info": {"output_token_logprobs": [[-0.5, 7, None], [None, 8, None], [-1, 9, None]]}}, "output_token_logprobs"
    )
    assert found[0] == -0.5 and math.isnan(found[1]) and type(found[2]) is float


def test_log_probabilities_of_other_tokens_than_the_answer_s_are_no_answer() -> None:
    about = {"finish_reason": {"type": "stop"}, "cached_tokens": 0}

    def answer(*pairs: tuple[float, int]) -> dict[str, object]:
        return {"output_ids": [7, 8], "meta_info": about | {"output_token_logprobs": [[*pair, None] for pair in pairs]}}

    request = GenerateRequest([5], None, 1.0, 2, 0, ignore_eos=False)
    assert Generate([0]).answer(answer((-1.0, 7), (-2.0, 8)), request).logprobs == [-1.0, -2.0]
    with pytest.raises(ValueError, match="is of token 9 where the text has 8"):
        Generate([0]).answer(answer((-1.0, 7), (-2.0, 9)), request)


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ([-1.0], "gave 1 log-probabilities"),
        ([], "gave 0 log-probabilities"),
        ([-1.0, math.nan], "gave log-probability nan"),
        ([-1.0, 0.5], "gave log-probability 0.5"),
    ],
)
def test_what_cannot_be_said_of_a_text_is_a_wrong_answer(logprobs: list[float], message: str) -> None:
    request = ScoreRequest([4, 5, 6], None)
    check(request, Scores(request.text, [-1.0, -2.0]))
    check(request._replace(is_by_cache=True), Scores(request.text, [-1.0]))
    with pytest.raises(WrongAnswer, match=f"of a text of 3 tokens, the engine {message}"):
        check(request, Scores(request.text, logprobs))
