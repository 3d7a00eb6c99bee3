"""What every engine does; a new one is done when these pass with it.

`sglang` here runs against a scripted server; tests/test_end_to_end.py has the real one.
"""

from collections.abc import Callable

import pytest

from infra.config import EngineConfig, SamplingConfig
from infra.engines import open_engine
from infra.engines.base import EngineUnavailable, WrongAnswer
from infra.prompts import Prompt
from infra.records import AdapterVersion

MakeAdapter = Callable[[int], AdapterVersion]
PROMPTS = [Prompt(prompt_id=n, row=n, question="?", answer="#### 4", prompt_tokens=[4, 5, 6 + n], seed=70 + n) for n in range(3)]
SAMPLING = SamplingConfig(group_size=4, max_output_tokens=8)


@pytest.fixture(params=["scripted", "sglang"])
def config(request: pytest.FixtureRequest, engine_config: EngineConfig, over_scripted_server: None) -> EngineConfig:
    return engine_config.but(kind=request.param)


def test_each_prompt_gets_its_group_in_order(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    adapter = scripted_adapter(1)
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    samples, how = engine.generate(PROMPTS, SAMPLING, adapter)
    assert [(sample.prompt_id, sample.sample_index) for sample in samples] == [(p, g) for p in range(3) for g in range(4)]
    assert all(sample.adapter_version == 1 and sample.adapter_sha256 == adapter.sha256 for sample in samples)
    assert all(0 < len(sample.output_tokens) == len(sample.output_logprobs) for sample in samples)
    assert how.ttft_s >= 0
    engine.stop()


def test_equal_seeds_give_equal_samples_and_members_of_a_group_differ(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    base = scripted_adapter(0)
    engine = open_engine(config, base)
    engine.wake()
    engine.load_adapter(base)
    first, second = (engine.generate(PROMPTS, SAMPLING, base)[0] for _ in range(2))
    assert first == second
    assert len({(*sample.output_tokens, *sample.output_logprobs) for sample in first[:4]}) == 4
    engine.stop()


def test_a_sample_of_an_adapter_that_is_not_served_is_refused(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    engine = open_engine(config, scripted_adapter(0))
    engine.wake()
    engine.load_adapter(scripted_adapter(1))
    with pytest.raises(WrongAnswer, match="asked for"):
        engine.generate(PROMPTS, SAMPLING, scripted_adapter(2))
    engine.load_adapter(scripted_adapter(2))
    engine.generate(PROMPTS, SAMPLING, scripted_adapter(2))
    engine.stop()


def test_waking_twice_costs_nothing_and_stopping_twice_is_no_error(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    engine = open_engine(config, scripted_adapter(0))
    for _ in range(2):
        engine.wake()
    for _ in range(2):
        engine.stop()
    with pytest.raises(EngineUnavailable):
        engine.generate(PROMPTS, SAMPLING, scripted_adapter(0))


def test_a_release_says_its_plan_and_reason_and_claims_nothing_on_a_cpu(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    engine = open_engine(config, scripted_adapter(0))
    engine.wake()
    release = engine.release_memory()
    assert (release.plan, release.released_bytes) == ("resident", 0)
    assert release.reason
    engine.stop()
