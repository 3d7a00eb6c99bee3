import inspect
from typing import Any, get_args

import pytest

from infra.config import EnvironmentConfig, RunConfig, players, rules
from infra.config.tools.overrides import changed
from infra.settings import CHECKOUT

OFF_POLICY = 'trainer.loss.correction={"mode": "decoupled", "kind": "tis", "max_staleness": 1}'
IN_FLIGHT = 'trainer.loss.correction={"mode": "decoupled", "kind": "tis", "max_staleness": 1, "in_flight_updates": true}'
TWO_STEPS_OFF = 'trainer.loss.correction={"mode": "decoupled", "kind": "tis", "max_staleness": 2}'
PARTIAL = ["engine.deterministic=false", "data.partial_rollouts=true", "data.num_oversampled_prompts=2"]
DECOUPLED = 'trainer.loss.correction={"mode": "decoupled", "kind": "tis"}'
BROKEN = {
    "groups_can_be_compared": ["sampling.group_size=1"],
    "zero_std_groups_need_two_samples": [
        "sampling.group_size=1",
        "batch.advantage=reinforce_pp",
        "batch.drop_zero_std_groups=true",
    ],
    "enough_prompts_are_drawn": ['batch={"drop_zero_std_groups": true, "max_groups": 17}'],
    "minibatches_have_groups": ["trainer.num_minibatches=17"],
    "minibatches_have_groups_of_the_batch": [
        'batch={"drop_zero_std_groups": true, "max_groups": 2}',
        "trainer.num_minibatches=3",
    ],
    "overlong_penalty_is_within_reach": ["batch.overlong.max_output_tokens=65"],
    "correction_fields_have_an_effect": ["trainer.loss.correction.cap=3"],
    "oversampling_is_not_deterministic": ["data.num_oversampled_prompts=1"],
    "partial_rollouts_need_oversampling": ["engine.deterministic=false", "data.partial_rollouts=true", DECOUPLED],
    "partial_rollouts_need_a_correction": PARTIAL,
    "partial_rollouts_are_one_step_old": [*PARTIAL, OFF_POLICY],
    "in_flight_updates_are_of_sglang": [IN_FLIGHT, "engine.kind=vllm"],
    "partial_rollouts_need_sglang": [*PARTIAL, DECOUPLED, "engine.kind=vllm"],
    "dynamic_sampling_is_of_one_step": ["data.max_draws=2", OFF_POLICY],
    "curriculum_knows_the_step_before": ["data.curriculum=uncertain", OFF_POLICY],
    "longest_answer_fits_the_request_timeout": ["engine.request_timeout_s=3"],
    "off_policy_adapter_is_retained": [OFF_POLICY, 'retention={"keep_last": 1, "of_others": "nothing"}'],
    "sampling_ahead_leaves_the_judge_an_engine": [
        TWO_STEPS_OFF,
        'reward={"name": "rubric", "judge": {"by": "engine", "rubric": "{completion}", "max_output_tokens": 64}}',
    ],
    "truncation_is_not_rewarded": ["batch.mask_truncated=true", 'trainer.loss.kl={"where": "reward", "coefficient": 0.1}'],
    "turns_pay_no_kl": ["batch.advantage_level=turn", 'trainer.loss.kl={"where": "reward", "coefficient": 0.1}'],
    "environment_fields_have_an_effect": [
        'environment.command=["python3", "agent.py"]',
        "environment.turn_timeout_s=5",
        "evaluation.every=0",
    ],
    "tasksets_play_their_own_tasks": ["environment.id=/x.py", "evaluation.every=0"],
    "episodes_fit_a_microbatch": [
        "environment.name=/x.py:Game",
        "evaluation.every=0",
        "trainer.max_tokens_per_microbatch=511",
    ],
    "exported_adapter_is_retained": ['retention={"keep_last": 1, "keep_best": false, "of_others": "nothing"}'],
    "sequences_fit_the_context": ["data.max_prompt_tokens=449"],
    "evaluations_fit_the_context": ["evaluation.max_output_tokens=257"],
    "sequences_fit_a_microbatch": ["trainer.max_tokens_per_microbatch=319"],
    "engine_can_serve_the_adapter": ["trainer.lora.rank=17"],
    "engine_can_judge": ['reward={"name": "rubric", "judge": {"by": "engine", "rubric": "{completion}"}}'],
    "judge_takes_turns_with_the_engine": [
        'reward={"name": "rubric", "judge": {"by": "model", "model": "m", "rubric": "{completion}"}}',
        "engine.replicas=2",
    ],
    "own_gpus_are_of_separate_gpus": ["trainer.first_gpu=1"],
    "routing_replay_is_possible": ["trainer.routing_replay=true", "engine.kind=vllm"],
    "experts_can_be_shared": ["trainer.share_experts=true", "engine.kind=vllm"],
    "ruler_compares_several_samples": ['reward={"name": "ruler", "judge": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}}'],
}
"""Rule -> changes of the default configuration that break it and no rule before it."""


def test_every_rule_of_the_module_is_run() -> None:
    functions = [name for name, _ in inspect.getmembers(rules, inspect.isfunction)]
    assert sorted(rule.__name__ for rule in rules.RULES) == sorted(functions) == sorted(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_configuration_that_breaks_one_rule_is_refused_by_it_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError):
        changed(RunConfig(), BROKEN[name])
    monkeypatch.setattr(rules, "RULES", tuple(rule for rule in rules.RULES if rule.__name__ != name))
    changed(RunConfig(), BROKEN[name])


PROGRAM = {"command": ["python3", "agent.py"]}
GAME = {"name": "mine.py:Game"}
TASKSET = {"id": "mine"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            PROGRAM | {"turn_timeout_s": 5},
            r"environment\.turn_timeout_s 5 has no effect with 'python3 agent\.py': an agent has no calls of reset",
        ),
        (
            PROGRAM | {"max_observation_tokens": 64},
            r"environment\.max_observation_tokens 64 has no effect .* leave it at its default, 512",
        ),
        (PROGRAM | {"tool_timeout_s": 5}, r"environment\.tool_timeout_s 5 has no effect .* a program calls its tools by itself"),
        (PROGRAM | {"max_result_characters": 99}, r"environment\.max_result_characters 99 has no effect"),
        (PROGRAM | {"repeats_tools": False}, r"environment\.repeats_tools false has no effect .* leave it at its default, true"),
        (
            GAME | {"repeats_tools": False},
            r"environment\.repeats_tools false has no effect with 'mine\.py:Game': it is for tasksets",
        ),
        (
            TASKSET | {"tool_timeout_s": 5},
            r"environment\.tool_timeout_s 5 has no effect with 'mine': .* environment\.turn_timeout_s",
        ),
        (TASKSET | {"max_result_characters": 99}, r"has no effect with 'mine': .* environment\.max_observation_tokens"),
        ({"max_turns": 2}, r"environment\.max_turns 2 without an environment: name one .* its default, 4"),
        ({"mcp": ["python3 s.py"]}, r"environment\.mcp .* with no environment\.name"),
        ({"keep_reasoning": False}, r"environment\.keep_reasoning false without an environment"),
    ],
)
def test_a_field_of_the_environment_that_would_have_no_effect_is_refused(environment: dict[str, object], said: str) -> None:
    source = {"source": "verifiers:mine"} if environment.keys() & TASKSET else {}
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate({"environment": environment, "data": source})


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("instruction", "Think.", 'instruction "Think."'),
        ("template", "raw", 'template "raw"'),
        ("chat_template_kwargs", ["enable_thinking=false"], r'chat_template_kwargs \["enable_thinking=false"\]'),
    ],
)
def test_what_makes_prompts_of_rows_is_refused_where_an_environment_writes_the_messages(
    field: str, value: object, said: str
) -> None:
    data = {field: value}
    with pytest.raises(
        ValueError, match=rf"  Value error, data\.{said} has no effect with 'mine\.py:Game': an environment writes its own"
    ):
        RunConfig.model_validate({"environment": GAME, "data": data})
    asked = {"name": "games", "data": {"source": "arithmetic"}}
    with pytest.raises(ValueError, match=rf"evaluation\.sets 'games' data\.{said} has no effect with 'mine\.py:Game'"):
        RunConfig.model_validate({"evaluation": {"sets": [{"name": "games", "data": data, "environment": GAME}]}})
    RunConfig.model_validate({"data": data, "evaluation": {"sets": [asked | {"environment": GAME}]}})


def test_every_field_of_the_environment_has_its_place_in_the_table_of_the_docs() -> None:
    text = (CHECKOUT / "docs/how-to/multi-turn.md").read_text()
    lines = [line.split("|") for line in text[text.index("| field | class ") :].partition("\n\n")[0].splitlines()[2:]]
    table = {
        field.strip(): dict(zip(get_args(players.Player), map(str.strip, cells), strict=True)) for _, field, *cells, _ in lines
    }
    named = {f"`environment.{name}`" for name in EnvironmentConfig.model_fields if name not in players.NAMES}
    assert table.keys() == named
    for field, cells in table.items():
        without = players.WITHOUT_EFFECT.get(field.strip("`").removeprefix("environment."), {})
        assert {player for player, cell in cells.items() if cell == "refused"} == without.keys(), field


def test_an_environment_of_a_set_is_checked_and_its_own_fields_win() -> None:
    section = GAME | {"turn_timeout_s": 5}
    asked = {"name": "by-program", "data": {"source": "arithmetic"}}
    with pytest.raises(
        ValueError, match=r"evaluation\.sets 'by-program' environment\.turn_timeout_s 5 has no effect with 'python3 agent\.py'"
    ):
        RunConfig.model_validate({"environment": section, "evaluation": {"sets": [asked | {"environment": PROGRAM}]}})
    given = asked | {"environment": PROGRAM | {"turn_timeout_s": 30}}
    RunConfig.model_validate({"environment": section, "evaluation": {"sets": [given]}})
    RunConfig.model_validate({"environment": {"max_turns": 2}, "evaluation": {"sets": [asked | {"environment": PROGRAM}]}})


OWN_REWARD = {"name": "mine.py:score"}


def test_a_reward_beside_an_environment_is_refused_unless_an_evaluation_has_it() -> None:
    said = r"reward\.name \"mine\.py:score\" has no effect with 'mine\.py:Game': an environment gives the rewards; leave it at its default"
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate({"environment": GAME, "reward": OWN_REWARD})
    with pytest.raises(ValueError, match=r"reward\.functions \[\"mine\.py:score\"\] has no effect"):
        RunConfig.model_validate({"environment": GAME, "reward": {"functions": [OWN_REWARD]}})
    sets: list[dict[str, Any]] = [{"name": "plain", "environment": ""}, {"name": "timed", "reward": {"timeout_s": 5}}]
    for asked in sets:
        RunConfig.model_validate({"environment": GAME, "reward": OWN_REWARD, "evaluation": {"sets": [asked]}})
    with pytest.raises(ValueError, match="has no effect"):
        RunConfig.model_validate(
            {"environment": GAME, "reward": OWN_REWARD, "evaluation": {"sets": [{"name": "a", "reward": "b.py:c"}]}}
        )
