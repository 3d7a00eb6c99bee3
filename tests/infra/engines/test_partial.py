"""Partial rollouts: groups that one rollout aborts go on in the next one and become whole there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt, sample_seed
from infra.engines import open_engine
from infra.engines.interface import Engine, RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.partial import Partial
from infra.engines.rollout_collector import RolloutCollector
from infra.failures import WrongAnswer
from infra.records import AdapterVersion
from infra.store.samples import Sample, read_samples, write_samples

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
SAMPLING = SamplingConfig(group_size=4, max_output_tokens=8)
NUM_SPARE = 2
STOP = 2
"""A token that ends an answer; no engine here samples it."""


def partial_of(begun: Mapping[tuple[int, int], Sample] | None = None, prompt_ids: Sequence[int] = ()) -> Partial:
    return Partial(frozenset({STOP}), SAMPLING.max_output_tokens, begun or {}, frozenset(prompt_ids))


def prompts_of(*numbers: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=n, row_number=n, question="?", answer="#### 4", prompt_tokens=[4, 5, 6 + n], seed=70 + n)
        for n in numbers
    ]


@pytest.fixture(params=["scripted", "sglang"])
def config(request: pytest.FixtureRequest, engine_config: EngineConfig, over_scripted_server: None) -> EngineConfig:
    """Four requests at a time: when enough groups are whole, some are under way and others wait for their turn."""
    return engine_config.but(kind=request.param, max_running_requests=2)


def ready(config: EngineConfig, adapter: AdapterVersion) -> Engine:
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    return engine


def from_file(partial: Partial, folder: Path) -> dict[tuple[int, int], Sample]:
    """As the next step gets it."""
    samples = read_samples(write_samples(folder / "left_over.parquet", list(partial.left.values())))
    return {(sample.prompt_id, sample.sample_index): sample for sample in samples}


def test_what_one_rollout_breaks_off_the_next_goes_on_with_and_no_token_is_lost_or_changed(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path
) -> None:
    set_fault("endless from 10" if config.kind != "scripted" else "")  # the prompts' third tokens are 6 and up
    first, second, before = scripted_adapter(1), scripted_adapter(2), partial_of()
    taken, _ = ready(config, first).generate(
        RolloutRequest(prompts_of(*range(6)), SAMPLING, first, NUM_SPARE), SampleSink(partial=before)
    )
    left = sorted({*range(6)} - {sample.prompt_id for sample in taken})
    begun = from_file(before, workspace)
    assert left == [4, 5] and {prompt_id for prompt_id, _ in begun} <= {*left}
    prefixes = {key: sample for key, sample in begun.items() if sample.finish_reason == "abort"}
    assert prefixes and all(sample.adapter_sha256 == first.sha256 for sample in begun.values())
    set_fault("endless from 14" if config.kind != "scripted" else "")
    after = partial_of(begun, left)
    asked = [*prompts_of(*left), *prompts_of(*range(6, 10))]
    samples, _ = ready(config, second).generate(RolloutRequest(asked, SAMPLING, second, NUM_SPARE), SampleSink(partial=after))
    found = {(sample.prompt_id, sample.sample_index): sample for sample in samples}
    assert {prompt_id for prompt_id, _ in found} >= {*left}, "what goes on has to become whole"
    assert len(samples) == 4 * SAMPLING.group_size
    assert all((sample.adapter_version, sample.adapter_sha256) == (2, second.sha256) for sample in samples)
    for key, sample in found.items():
        earlier = begun.get(key)
        num = len(earlier.output_tokens) if earlier else 0
        assert (sample.num_older_tokens, sample.older_adapter_sha256) == (num, first.sha256 if earlier else "")
        if earlier:
            assert list(sample.output_tokens[:num]) == list(earlier.output_tokens)
            assert list(sample.output_logprobs[:num]) == list(earlier.output_logprobs)
        assert sample.finish_reason in ("stop", "length") and (key in prefixes) == (0 < num < len(sample.output_tokens))
    assert not any(sample.num_older_tokens for sample in after.left.values()), "no token is more than one step old"


def test_an_answer_goes_on_after_its_beginning_by_the_new_adapter_and_with_other_chances(
    engine_config: EngineConfig,
    over_scripted_server: None,
    scripted_adapter: MakeAdapter,
    scripted_logprob: Callable[[list[int], str], float],
) -> None:
    adapter, (prompt,) = scripted_adapter(2), prompts_of(3)
    begun = Sample(3, 1, prompt.prompt_tokens, [11, 12], [-0.25, -0.5], "abort", 1, "older")
    partial = partial_of({(3, 1): begun}, [3])
    samples, how = ready(engine_config, adapter).generate(
        RolloutRequest([prompt], SAMPLING, adapter, 0), SampleSink(partial=partial)
    )
    seed = sample_seed(prompt.seed, 1, 2)
    assert seed not in {sample_seed(prompt.seed, index) for index in range(64)}
    new = [(seed + n) % 50 + 3 for n in range(5)]
    assert list(samples[1].output_tokens) == [11, 12, *new]
    before = [*prompt.prompt_tokens, 11, 12]
    assert samples[1].output_logprobs[2:] == [scripted_logprob(before + new[:n], "adapters/000002") for n in range(5)]
    assert how.num_new_output_tokens == 4 * 5, "its beginning is not this rollout's work"
    short = SAMPLING.but(max_output_tokens=4)
    samples, _ = ready(engine_config, adapter).generate(
        RolloutRequest([prompt], short, adapter), SampleSink(partial=partial_of({(3, 1): begun}, [3]))
    )
    assert (len(samples[1].output_tokens), samples[1].finish_reason) == (4, "length"), "its beginning counts"


def test_after_a_crash_what_went_on_is_kept_and_its_beginning_is_no_kept_sample(
    config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    adapter = scripted_adapter(2)
    reasons = {0: "abort", 1: "stop"}
    earlier = _begun_by(config, scripted_adapter(1))
    begun = {key: replace(sample, finish_reason=reasons[key[1]]) for key, sample in earlier.items() if key[1] in reasons}
    with Journal(workspace / "samples.journal", {}) as journal:
        first, how = ready(config, adapter).generate(
            RolloutRequest(prompts_of(0, 1), SAMPLING, adapter), SampleSink(journal, partial_of(begun, [0]))
        )
        assert how.num_kept == 0
    with Journal(workspace / "samples.journal", {}) as journal:
        assert (0, 1) not in journal.samples, "it is in the file of the step before"
        again, how = ready(config, adapter).generate(
            RolloutRequest(prompts_of(0, 1), SAMPLING, adapter), SampleSink(journal, partial_of(begun, [0]))
        )
    assert again == first and how.num_kept == 7 and how.num_new_output_tokens == 0


def _begun_by(config: EngineConfig, adapter: AdapterVersion) -> dict[tuple[int, int], Sample]:
    samples, _ = ready(config, adapter).generate(RolloutRequest(prompts_of(0), SAMPLING, adapter))
    return {
        (sample.prompt_id, sample.sample_index): replace(
            sample,
            output_tokens=np.asarray(sample.output_tokens[:2], np.int32),
            output_logprobs=np.asarray(sample.output_logprobs[:2], np.float32),
        )
        for sample in samples
    }


def answer(adapter: AdapterVersion, prompt_id: int, index: int, num_tokens: int = 3, **changes: object) -> Sample:
    tokens, values = [7] * num_tokens, [-0.5] * num_tokens
    made = Sample(prompt_id, index, [4, 5], tokens, values, "stop", adapter.version, adapter.sha256)
    return replace(made, **changes)  # type: ignore[arg-type]


def gathering(adapter: AdapterVersion, partial: Partial, numbers: Sequence[int], num_oversampled: int) -> RolloutCollector:
    request = RolloutRequest(prompts_of(*numbers), SAMPLING.but(group_size=2), adapter, num_oversampled)
    return RolloutCollector(request, SampleSink(partial=partial), vocab_size=100)


def test_groups_that_were_begun_are_waited_for_and_those_whole_before_them_go_on(scripted_adapter: MakeAdapter) -> None:
    adapter = scripted_adapter(2)
    partial = partial_of({}, [0])
    rollout = gathering(adapter, partial, [0, 1, 2], num_oversampled=1)
    fresh = [(number, index) for number in (1, 2) for index in range(2)]
    assert all(rollout.take(answer(adapter, *key)) for key in fresh), "that are two whole groups, but not the one that was begun"
    assert rollout.take(answer(adapter, 0, 0))
    assert not rollout.take(answer(adapter, 0, 1))
    assert {sample.prompt_id for sample in rollout.whole()} == {0, 1}
    assert partial.left.keys() == {(2, 0), (2, 1)} and {each.finish_reason for each in partial.left.values()} == {"stop"}


@pytest.mark.parametrize(
    ("tokens", "reason", "left"),
    [
        ([7, 8, 9], "abort", ([7, 8, 9], "abort")),
        ([7], "abort", ([7], "abort")),
        ([], "abort", None),
        ([7, 8, STOP], "abort", ([7, 8, STOP], "stop")),
        ([7, STOP, 9], "abort", ([7, STOP], "stop")),
        ([7] * 8, "abort", ([7] * 8, "length")),
        ([7] * 9, "abort", ([7] * 8, "length")),
        ([*[7] * 7, STOP], "abort", ([*[7] * 7, STOP], "stop")),
        ([7, STOP], "stop", ([7, STOP], "stop")),
        ([7] * 8, "length", ([7] * 8, "length")),
    ],
)
def test_what_is_broken_off_goes_on_unless_it_had_just_ended(
    scripted_adapter: MakeAdapter, tokens: list[int], reason: str, left: tuple[list[int], str] | None
) -> None:
    adapter, partial = scripted_adapter(1), partial_of()
    rollout = gathering(adapter, partial, [0, 1], num_oversampled=1)
    rollout.take(answer(adapter, 0, 0))
    rollout.take(answer(adapter, 0, 1))
    values = [-0.1 * n for n in range(len(tokens))]
    assert not rollout.take(answer(adapter, 1, 0, output_tokens=tokens, output_logprobs=values, finish_reason=reason))
    rollout.whole()
    found = {key: (list(each.output_tokens), each.finish_reason) for key, each in partial.left.items()}
    assert found == ({(1, 0): left} if left else {})
    assert all(list(each.output_logprobs) == values[: len(each.output_tokens)] for each in partial.left.values())
    assert rollout.counts()["num_new_output_tokens"] == 6 + (len(left[0]) if left else 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "does not begin as it was begun"),
        ({"num_older_tokens": 2, "older_adapter_sha256": "newer"}, "does not begin as it was begun"),
        ({"num_older_tokens": 1, "older_adapter_sha256": "older"}, "does not begin as it was begun"),
        ({"num_older_tokens": 2, "older_adapter_sha256": "older", "output_tokens": [7, 8, 7]}, "does not begin as it was begun"),
        ({"num_older_tokens": 2, "older_adapter_sha256": "older", "output_logprobs": [-0.5, -0.4, -0.5]}, "as it was begun"),
    ],
)
def test_an_answer_that_does_not_go_on_with_its_beginning_is_refused(
    scripted_adapter: MakeAdapter, changes: dict[str, object], message: str
) -> None:
    adapter = scripted_adapter(2)
    begun = answer(adapter, 0, 0, 2, finish_reason="abort", adapter_version=1, adapter_sha256="older")
    rollout = gathering(adapter, partial_of({(0, 0): begun}, [0]), [0], num_oversampled=0)
    with pytest.raises(WrongAnswer, match=message):
        rollout.take(answer(adapter, 0, 0, **changes))
    rollout.take(answer(adapter, 0, 0, num_older_tokens=2, older_adapter_sha256="older"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": "abort", "output_logprobs": [float("nan")] * 3}, "log-probability nan"),
        ({"finish_reason": "abort", "output_tokens": [7, 7, 1000]}, "1000 is outside"),
        ({"finish_reason": "error"}, "finish reason 'error'"),
        ({"num_older_tokens": 1, "older_adapter_sha256": "older"}, "does not begin as it was begun"),
        ({"sample_index": 7}, "was not asked for"),
        ({"adapter_sha256": "another"}, "sampled by adapter"),
    ],
)
def test_what_is_left_to_the_next_step_is_checked_as_what_is_used(
    scripted_adapter: MakeAdapter, changes: dict[str, object], message: str
) -> None:
    adapter, partial = scripted_adapter(1), partial_of()
    rollout = gathering(adapter, partial, [0, 1], num_oversampled=1)
    rollout.take(answer(adapter, 0, 0))
    rollout.take(answer(adapter, 0, 1))
    with pytest.raises(WrongAnswer, match=message):
        rollout.take(answer(adapter, 1, 0, **changes))
    assert not partial.left
