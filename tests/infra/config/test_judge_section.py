"""Which fields fit a second model that judges, and which configurations of a run do."""

import pytest
from pydantic import ValidationError

from infra.config import EvalConfig, RewardConfig, RunConfig
from infra.config.sections.rewards.judge_server import OF_ENDPOINTS
from infra.config.tools.overrides import changed, one_line
from infra.runs.evaluations import eval_digest

JUDGE: dict[str, object] = {"by": "model", "model": "judge/folder", "rubric": "{completion}"}
REWARD = 'reward={"name": "rubric", "judge": {"by": "model", "model": "judge/folder", "rubric": "{completion}"}}'


def config_of(**fields: object) -> RewardConfig:
    return RewardConfig.model_validate({"name": "rubric", "judge": JUDGE | fields})


def test_a_second_model_needs_a_name_and_no_address() -> None:
    assert config_of().has_judge_server and not config_of().is_judged_by_engine
    assert not RewardConfig.model_validate({"judge": JUDGE}).has_judge_server, "nothing is judged"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": ""}, "reward.judge.by 'model' needs reward.judge.model: a Hugging Face folder or a hub id"),
        ({"base_url": "http://h/v1"}, "reward.judge.base_url 'http://h/v1' with reward.judge.by 'model'"),
        ({"timeout_s": 3}, "reward.judge.timeout_s 3 with reward.judge.by 'model': engine.request_timeout_s holds"),
        ({"concurrency": 4}, "reward.judge.server.max_running_requests takes its place; leave it out"),
        ({"max_attempts": 2}, "reward.judge.max_attempts 2 with"),
        ({"retry_delay_s": 2}, "reward.judge.retry_delay_s 2 with"),
        ({"input_price": 1}, "reward.judge.input_price 1 with reward.judge.by 'model': its answers cost no money"),
        ({"output_price": 1}, "reward.judge.output_price 1 with"),
        ({"answer": "json_schema"}, "its server enforces no schema, take 'auto' or 'text'"),
        ({"max_output_tokens": 2048}, "leaves no room for a prompt in reward.judge.server.max_context_tokens 2048"),
        ({"server": {"memory_fraction": 1.5}}, "memory_fraction"),
        ({"server": {"colocation": "keep_weights"}}, "colocation"),
    ],
)
def test_what_a_second_model_does_not_have_is_refused_in_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config_of(**fields)
    assert message in one_line(caught.value)


def test_each_field_of_an_endpoint_is_refused() -> None:
    other = {"base_url": "http://h/v1", "max_run_cost": 1.0, "input_price": 1.0}
    for name in OF_ENDPOINTS:
        with pytest.raises(ValidationError, match=r"with reward\.judge\.by 'model'"):
            config_of(**{"input_price": 1.0 if name == "max_run_cost" else 0.0, name: other.get(name, 7)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("engine.kind=vllm", "engine.kind 'vllm' with reward.judge.by 'model' is not supported"),
        ("engine.replicas=2", "engine.replicas 2 with"),
        ("engine.replicas=null", "engine.replicas auto with"),
        ("engine.colocation=separate_gpus", "engine.colocation 'separate_gpus' with"),
        ("data.max_draws=2", "data.max_draws 2 with reward.judge.by 'model' is not supported: each draw would move both models"),
        (
            'trainer.loss.correction={"mode": "decoupled", "kind": "tis", "max_staleness": 1}',
            "trainer.loss.correction.max_staleness 1 with reward.judge.by 'model'",
        ),
        ("environment.name=/x.py:Game", "environment '/x.py:Game' with reward.judge.by 'model'"),
    ],
)
def test_what_cannot_take_turns_with_a_second_model_is_refused(change: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        changed(RunConfig(), [REWARD, "evaluation.every=0", change])
    assert message in str(caught.value)


def test_two_models_that_judge_and_score_do_not_share_a_step() -> None:
    functions = [{"name": "rubric"}, {"name": "reward_model"}]
    with pytest.raises(ValidationError, match="which need the GPU one after the other"):
        RewardConfig.model_validate({"functions": functions, "judge": JUDGE, "model": {"path": "x"}})


def digest(reward: RewardConfig) -> str:
    asked = RunConfig().eval_config
    return eval_digest(EvalConfig.model_validate(dict(asked) | {"reward": reward}))


def test_an_evaluation_is_another_one_only_where_its_judge_may_answer_otherwise() -> None:
    first = digest(config_of())
    for fields in ({"memory_fraction": 0.3}, {"colocation": "restart"}, {"max_running_requests": 8}, {"kv_cache_tokens": 4096}):
        assert digest(config_of(server=fields)) == first
    assert (
        len({first, digest(config_of(server={"max_context_tokens": 4096})), digest(config_of(server={"dtype": "float32"}))}) == 3
    )
    by_engine = {"by": "engine", "rubric": "{completion}"}
    without = RewardConfig.model_validate({"name": "rubric", "judge": by_engine})
    unused = RewardConfig.model_validate({"name": "rubric", "judge": by_engine | {"server": {"dtype": "float32"}}})
    assert digest(without) == digest(unused), "figures of other judges stay comparable"
