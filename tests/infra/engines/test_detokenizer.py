"""Samples made ready beside their rollout."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shared import sample

from infra.engines.detokenizer import Detokenizer
from infra.models import base_model
from infra.store.samples import Sample, Tokens, write_samples

DEADLINE_S = 60.0


def samples_of(model_folder: Path) -> list[Sample]:
    """Of three prompts, two each, as an engine gives them: lists, without a text."""
    said = [base_model.tokenizer(model_folder).encode(f"#### {n} caf\u00e9") for n in range(6)]
    return [
        replace(
            sample(n // 2),
            sample_index=n % 2,
            prompt_tokens=[4, 5, n // 2],
            output_tokens=tokens,
            output_logprobs=[-0.1 * k - n / 3 for k in range(len(tokens))],
        )
        for n, tokens in enumerate(said)
    ]


def test_a_file_has_the_same_bytes_whether_its_samples_were_finished_beside_the_rollout_or_after_it(
    model_folder: Path, tmp_path: Path
) -> None:
    samples = samples_of(model_folder)
    with Detokenizer(model_folder) as in_background:
        for one in [samples[4], *samples[:2]]:  # three of six, in another order
            in_background.add(one)
        finished = in_background.finished(samples)
    texts = base_model.texts_of(model_folder, [one.output_tokens for one in samples])
    after = [replace(one, text=text) for one, text in zip(samples, texts, strict=True)]
    assert [one.text for one in finished] == texts
    assert all(isinstance(one.output_logprobs, np.ndarray) for one in finished)
    files = [write_samples(tmp_path / name, what) for name, what in (("in_background", finished), ("after", after))]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_text_is_there_before_the_next_sample_and_what_came_meanwhile_is_decoded_together(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, has_begun, may_go_on = list[int](), threading.Event(), threading.Event()

    def texts_of(folder: Path, outputs: Sequence[Tokens]) -> list[str]:
        decoded.append(len(outputs))
        has_begun.set()
        assert may_go_on.wait(DEADLINE_S)
        return ["text"] * len(outputs)

    monkeypatch.setattr(base_model, "texts_of", texts_of)
    samples = samples_of(model_folder)
    with Detokenizer(model_folder) as in_background:
        in_background.add(samples[0])
        assert has_begun.wait(DEADLINE_S), "it waits for no other sample"
        for one in samples[1:]:
            in_background.add(one)
        may_go_on.set()
        in_background.finished(samples)
    assert [number for number in decoded if number] == [1, 5]


def test_what_goes_wrong_beside_is_raised_where_the_samples_are_asked_for(model_folder: Path) -> None:
    impossible = replace(sample(), output_tokens=[2**40])
    with pytest.raises(OverflowError), Detokenizer(model_folder) as in_background:
        in_background.add(impossible)
        in_background.finished([impossible])


def test_a_rollout_that_fails_leaves_no_thread(model_folder: Path) -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), Detokenizer(model_folder) as in_background:
        in_background.add(sample())
        raise KeyError
    assert threading.active_count() == before
