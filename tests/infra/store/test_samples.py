import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.store import routes
from infra.store.samples import COMPRESSION, REPEATING, SCHEMA, Sample, groups_of, num_retracted, read_samples, write_samples

SAMPLED = Sample(
    prompt_id=5,
    sample_index=0,
    prompt_tokens=[1, 2, 3],
    output_tokens=[7, 8],
    output_logprobs=[-0.5, -1.25],
    finish_reason="stop",
    adapter_version=3,
    adapter_sha256="abc",
    text="caf\u00e9 \U0001f600\n",
)


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    samples = [
        SAMPLED,
        replace(SAMPLED, sample_index=1, reward=1.0, reward_parts={"right": 0.75, "brief": 0.25}, advantage=-0.1),
        replace(SAMPLED, sample_index=2, reward=0.0, reward_parts={}, advantage=0.0),
        replace(SAMPLED, prompt_id=2**40, output_tokens=[], output_logprobs=[], finish_reason="abort", text=""),
        replace(SAMPLED, sample_index=3, num_older_tokens=1, older_adapter_sha256="older"),
    ]
    path = write_samples(tmp_path / "samples.parquet", samples)
    assert path == tmp_path / "samples.parquet"
    assert read_samples(path) == samples


def test_a_damaged_file_is_named_in_one_line(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "samples.parquet", [SAMPLED])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} cannot be read: ") as caught:
        read_samples(path)
    assert "\n" not in str(caught.value)


def test_routes_come_back_to_the_bit_and_files_without_them_have_no_such_column(tmp_path: Path) -> None:
    recorded = routes.serialized(np.arange(16, dtype=np.uint8).reshape(4, 2, 2))
    samples = [replace(SAMPLED, routes=recorded), replace(SAMPLED, sample_index=1)]
    path = write_samples(tmp_path / "samples.parquet", samples)
    assert [sample.routes for sample in read_samples(path)] == [recorded, None]
    assert read_samples(path) == samples
    assert num_retracted(samples) == 1 and num_retracted(samples[1:]) == 0
    assert "routes" not in pq.read_schema(write_samples(tmp_path / "others.parquet", samples[1:])).names
    assert routes.parsed(recorded).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]], [[12, 13], [14, 15]]]


def test_numbers_from_a_file_are_parts_of_one_array_and_equal_to_those_of_a_list(tmp_path: Path) -> None:
    samples = [SAMPLED, replace(SAMPLED, sample_index=1, output_tokens=[9], output_logprobs=[-0.25])]
    found = read_samples(write_samples(tmp_path / "x.parquet", samples))
    for name in ("prompt_tokens", "output_tokens", "output_logprobs"):
        first, second = (getattr(sample, name) for sample in found)
        assert isinstance(first, np.ndarray) and first.base is not None and first.base is second.base
    again = write_samples(tmp_path / "y.parquet", found)
    assert again.read_bytes() == (tmp_path / "x.parquet").read_bytes()


@pytest.mark.parametrize(
    "difference",
    [
        {"prompt_tokens": [1, 2, 4]},
        {"output_tokens": [7, 9]},
        {"output_tokens": [7]},
        {"output_logprobs": [-0.5, -1.0]},
        {"text": ""},
        {"text": f"{SAMPLED.text}\0"},
        {"reward": 0.0},
        {"reward_parts": {}},
        {"advantage": -0.0},
        {"num_older_tokens": 1},
        {"older_adapter_sha256": "older"},
    ],
)
def test_samples_that_differ_in_anything_are_not_equal(tmp_path: Path, difference: dict[str, Any]) -> None:
    (found,) = read_samples(write_samples(tmp_path / "x.parquet", [SAMPLED]))
    assert found == SAMPLED
    assert found != replace(SAMPLED, **difference)


def test_a_file_holds_what_its_rows_say(tmp_path: Path) -> None:
    """Written row by row, as pyarrow does it by itself, it has the same bytes."""
    rng = random.Random(0)
    samples = [
        replace(
            SAMPLED,
            sample_index=n,
            prompt_tokens=[rng.randrange(2**31) for _ in range(rng.randrange(1, 9))],
            output_tokens=[rng.randrange(9) for _ in range(num)],
            output_logprobs=[-rng.random() for _ in range(num)],
            text=" ".join("word" for _ in range(num)),
            reward=rng.choice([None, 0.0, 1.0]),
            reward_parts=rng.choice([None, {}, {"a": 0.5, "b": rng.random()}]),
        )
        for n, num in enumerate(rng.choices(range(1, 600), k=600))
    ]
    parts = [None if sample.reward_parts is None else list(sample.reward_parts.items()) for sample in samples]
    rows = [asdict(sample) | {"reward_parts": pairs} for sample, pairs in zip(samples, parts, strict=True)]
    pq.write_table(
        pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "rows.parquet", use_dictionary=list(REPEATING), **COMPRESSION
    )
    assert write_samples(tmp_path / "x.parquet", samples).read_bytes() == (tmp_path / "rows.parquet").read_bytes()


def test_log_probabilities_keep_the_precision_of_float32(tmp_path: Path) -> None:
    (back,) = read_samples(write_samples(tmp_path / "x.parquet", [replace(SAMPLED, output_logprobs=[-0.1, -1e-7])]))
    assert [abs(found / true - 1) < 1e-7 for found, true in zip(back.output_logprobs, [-0.1, -1e-7], strict=True)] == [True, True]


def test_equal_samples_give_equal_files(tmp_path: Path) -> None:
    parts = {"a": 1.0, "b": 2.0}
    files = [
        write_samples(tmp_path / str(number), [replace(SAMPLED, reward=3.0, reward_parts=order)]).read_bytes()
        for number, order in enumerate([parts, dict(reversed(parts.items()))])
    ]
    assert files[0] == files[1]


def test_only_files_with_older_tokens_have_columns_for_them(tmp_path: Path) -> None:
    older = replace(SAMPLED, sample_index=1, num_older_tokens=1, older_adapter_sha256="older")
    plain, mixed = write_samples(tmp_path / "x.parquet", [SAMPLED]), write_samples(tmp_path / "y.parquet", [SAMPLED, older])
    assert pq.read_schema(plain).names == SCHEMA.names
    assert pq.read_schema(mixed).names == [*SCHEMA.names, "num_older_tokens", "older_adapter_sha256"]
    assert (read_samples(plain), read_samples(mixed)) == ([SAMPLED], [SAMPLED, older])


def test_no_samples_are_no_samples(tmp_path: Path) -> None:
    assert read_samples(write_samples(tmp_path / "none.parquet", [])) == []


def test_groups_hold_the_samples_of_a_prompt_in_their_order() -> None:
    samples = [replace(SAMPLED, prompt_id=prompt, sample_index=index) for prompt, index in [(9, 0), (4, 0), (9, 1), (4, 1)]]
    assert [[(s.prompt_id, s.sample_index) for s in group] for group in groups_of(samples)] == [
        [(9, 0), (9, 1)],
        [(4, 0), (4, 1)],
    ]
