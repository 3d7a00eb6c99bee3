"""How an answer is read before anyone checks what it says."""

import json
import math

import pytest

from infra.engines.rollout import parsed
from infra.engines.sglang_rollout import values


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
