import re
from typing import Any

import pytest
from pydantic import ValidationError

from infra.config import ALL_LINEAR, DataConfig, EngineConfig, LoraConfig, RunConfig, SamplingConfig
from infra.config.tools.overrides import one_line

CORRECTION = {"mode": "decoupled", "kind": "tis", "max_staleness": 1, "in_flight_updates": True}
IN_FLIGHT: dict[str, Any] = {"trainer": {"loss": {"correction": CORRECTION}}}


def refusal_of(content: dict[str, Any]) -> str:
    """What is said of a configuration that must not pass: exactly one finding."""
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(content)
    assert caught.value.error_count() == 1, caught.value
    return one_line(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"sampling": {"group_size": 1}}, "sampling.group_size 1 with advantage 'grpo': a group needs 2 samples"),
        (
            {"sampling": {"group_size": 1}, "batch": {"advantage": "dr_grpo"}},
            "sampling.group_size 1 with advantage 'dr_grpo': a group needs 2 samples",
        ),
        ({"sampling": {"group_size": 0}}, "sampling.group_size = 0: "),
        (
            {"trainer": {"lora": {"rank": 17}}},
            "trainer.lora.rank 17 is above the engine's maximum, engine.max_lora_rank 16",
        ),
        ({"trainer": {"lora": {"rank": 0}}}, "trainer.lora.rank = 0: "),
        ({"trainer": {"lora": {"rank": -8}}}, "trainer.lora.rank = -8: "),
        ({"trainer": {"lora": {"alpha": 0}}}, "trainer.lora.alpha = 0: "),
        (
            {"data": {"max_prompt_tokens": 449}},
            "data.max_prompt_tokens 449 + sampling.max_output_tokens 64 = 513 is more than engine.max_context_tokens 512",
        ),
        (
            {"engine": {"request_timeout_s": 3}},
            "engine.request_timeout_s 3 with sampling.max_output_tokens 64: at 20 tokens a second one answer takes 3.2 s; set it to that or more",
        ),
        ({"trainer": {"num_processes": 3, "tensor_parallel": 2}}, "num_processes 3 is no multiple of tensor_parallel 2"),
        ({"trainer": {"num_processes": 2, "expert_parallel": 4}}, "num_processes 2 is no multiple of expert_parallel 4"),
        ({"trainer": {"num_processes": 2, "sequence_parallel": True}}, "sequence_parallel needs tensor_parallel of 2 or more"),
        ({"data": {"num_prompts": 0}}, "data.num_prompts = 0: "),
        ({"data": {"too_long": "cut"}}, "data.too_long = 'cut': Input should be 'error', 'drop' or 'truncate_left'"),
        ({"engine": {"replicas": "many"}}, "engine.replicas = 'many': give a whole number, 1 to 64, or auto"),
        ({"engine": {"replicas": 65}}, "engine.replicas = 65: Input should be less than or equal to 64"),
        ({"engine": {"kind": "tgi"}}, "engine.kind = 'tgi': Input should be 'sglang', 'vllm' or 'scripted'"),
        ({"engine": {"memory_fraction": 1.0}}, "engine.memory_fraction = 1.0: "),
        ({"engine": {"max_context_tokens": "many"}}, "engine.max_context_tokens = 'many': "),
        ({"sampling": {"temperature": 0}}, "sampling.temperature = 0: "),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature = nan: "),
        ({"trainer": {"learning_rate": 0}}, "trainer.learning_rate = 0: "),
        ({"trainer": {"learning_rate": 3}}, "trainer.learning_rate = 3: "),
        ({"trainer": {"learning_rate": float("inf")}}, "trainer.learning_rate = inf: "),
        ({"trainer": {"loss": {"clip_low": 1.5}}}, "trainer.loss.clip_low = 1.5: "),
        (
            {"trainer": {"loss": {"kind": "reinforce"}}},
            "trainer.loss.kind = 'reinforce': Input should be 'ppo', 'gspo' or 'cispo'",
        ),
        ({"trainer": {"loss": {"dual_clip": 1}}}, "trainer.loss.dual_clip = 1: "),
        ({"trainer": {"loss": {"kind": "gspo", "dual_clip": 3}}}, "dual_clip 3.0 is for kind 'ppo', not 'gspo'"),
        (
            {"trainer": {"loss": {"aggregation": "seq_mean_token_sum_norm"}}},
            "aggregation 'seq_mean_token_sum_norm' with loss_scale_factor None: seq_mean_token_sum_norm needs one",
        ),
        ({"trainer": {"loss": {"loss_scale_factor": 64}}}, "aggregation 'token_mean' with loss_scale_factor 64: "),
        ({"trainer": {"loss": {"kl": {"estimator": "k4"}}}}, "trainer.loss.kl.estimator = 'k4': "),
        ({"trainer": {"loss": {"kl": {"coefficient": -1}}}}, "trainer.loss.kl.coefficient = -1: "),
        ({"trainer": {"loss": {"entropy_bonus": -1}}}, "trainer.loss.entropy_bonus = -1: "),
        (
            {"trainer": {"loss": {"correction": {"kind": "tis"}}}},
            "correction kind 'tis' with mode 'bypass' would count the mismatch twice, the ratio holds it already: set mode to 'decoupled'",
        ),
        (
            {"trainer": {"loss": {"correction": {"mode": "decoupled", "kind": "icepop", "floor": 2}}}},
            "correction floor 2.0 must be below cap 2.0",
        ),
        (
            {"trainer": {"loss": {"correction": {"mode": "decoupled", "max_staleness": 1}}}},
            "correction max_staleness 1 with kind 'none': samples of an older adapter need a correction",
        ),
        (
            {"trainer": {"loss": {"correction": {"mode": "decoupled", "kind": "tis", "in_flight_updates": True}}}},
            "correction in_flight_updates true with max_staleness 0: no rollout is under way when a new adapter comes",
        ),
        (
            IN_FLIGHT | {"engine": {"kind": "vllm"}},
            "trainer.loss.correction.in_flight_updates true with engine.kind 'vllm': it gives nothing of an answer that is aborted; take 'sglang'",
        ),
        (
            IN_FLIGHT | {"data": {"num_oversampled_prompts": 4}, "engine": {"deterministic": False}},
            "trainer.loss.correction.in_flight_updates true with data.num_oversampled_prompts 4: a prompt that is left out",
        ),
        (
            {
                "trainer": {"loss": {"correction": {"mode": "decoupled", "kind": "tis", "max_staleness": 1}}},
                "retention": {"keep_last": 1, "of_others": "nothing"},
            },
            "retention.keep_last 1 with of_others 'nothing' removes the adapter that trainer.loss.correction.max_staleness 1 still samples from",
        ),
        (
            {
                "trainer": {"loss": {"correction": {"mode": "decoupled", "kind": "tis", "max_staleness": 4}}},
                "retention": {"keep_last": 4, "of_others": "nothing"},
            },
            "retention.keep_last 4 with of_others 'nothing' removes the adapter that trainer.loss.correction.max_staleness 4 still samples from: "
            "keep 5, or of_others 'adapter'",
        ),
        ({"batch": {"max_groups": 4}}, "max_groups 4 without drop_zero_std_groups"),
        ({"batch": {"max_groups": 17, "drop_zero_std_groups": True}}, "batch.max_groups 17 is above data.num_prompts 16"),
        (
            {"batch": {"max_groups": 4, "drop_zero_std_groups": True}, "trainer": {"num_minibatches": 5}},
            "trainer.num_minibatches 5 is above batch.max_groups 4",
        ),
        ({"trainer": {"num_minibatches": 17}}, "trainer.num_minibatches 17 is above the number of groups, data.num_prompts 16"),
        (
            {"trainer": {"lr_scheduler_type": "cosine"}},
            "lr_scheduler_type 'cosine' with num_schedule_steps None and lr_warmup_steps 0: ",
        ),
        (
            {"trainer": {"lr_scheduler_type": "cosine", "num_schedule_steps": 5, "lr_warmup_steps": 5}},
            "lr_scheduler_type 'cosine' with num_schedule_steps 5 and lr_warmup_steps 5: num_schedule_steps must be given and above",
        ),
        (
            {"trainer": {"num_schedule_steps": 200}},
            "lr_scheduler_type 'constant' with num_schedule_steps 200 and min_lr_ratio 0: the rate would not fall, set lr_scheduler_type to ",
        ),
        ({"trainer": {"min_lr_ratio": 0.1}}, "lr_scheduler_type 'constant' with num_schedule_steps None and min_lr_ratio 0.1: "),
        (
            {"trainer": {"loss": {"correction": {"cap": 3}}}},
            "trainer.loss.correction.cap 3.0 with kind 'none': nothing is corrected, set mode to 'decoupled' and kind to 'tis', 'mis' or 'icepop', "
            "or leave cap at 2.0",
        ),
        (
            {"trainer": {"loss": {"correction": {"mode": "decoupled", "level": "sequence"}}}},
            "trainer.loss.correction.level sequence with kind 'none'",
        ),
        ({"trainer": {"min_lr_ratio": 2}}, "trainer.min_lr_ratio = 2: "),
        ({"batch": {"advantage": "gae"}}, "batch.advantage = 'gae': Input should be 'grpo', 'dr_grpo', 'rloo' or 'reinforce_pp'"),
        ({"batch": {"overlong": {"buffer_tokens": 16}}}, "buffer_tokens 16 with max_output_tokens None: set max_output_tokens"),
        (
            {"batch": {"overlong": {"buffer_tokens": 16, "max_output_tokens": 8}}},
            "buffer_tokens 16 with max_output_tokens 8: set max_output_tokens",
        ),
        (
            {"batch": {"overlong": {"buffer_tokens": 16, "max_output_tokens": 65}}},
            "batch.overlong.max_output_tokens 65 is above sampling.max_output_tokens 64: no sample is that long",
        ),
        (
            {"sampling": {"group_size": 1}, "batch": {"advantage": "reinforce_pp", "drop_zero_std_groups": True}},
            "sampling.group_size 1 with batch.drop_zero_std_groups: a group of one is always flat",
        ),
        (
            {"sampling": {"group_size": 1}, "batch": {"advantage": "reinforce_pp"}, "data": {"max_draws": 3}},
            "sampling.group_size 1 with data.max_draws 3: a group of one is always flat, take 2 or more",
        ),
        (
            {"environment": {"name": "/x.py:Game"}, "batch": {"overlong": {"max_output_tokens": 257}}},
            "batch.overlong.max_output_tokens 257 is above sampling.max_output_tokens 64 x environment.max_turns 4: no sample is that long",
        ),
        (
            {"reward": {"functions": [{"name": "reward_model", "weights": {"a": 2}}], "model": {"path": "m"}}},
            "reward.functions 'reward_model' with weights {'a': 2.0}: its score has no parts, set weight instead",
        ),
        (
            {"batch": {"mask_truncated": True}, "trainer": {"loss": {"kl": {"coefficient": 0.05, "where": "reward"}}}},
            "batch.mask_truncated with trainer.loss.kl.where 'reward' (coefficient 0.05)",
        ),
        (
            {"retention": {"keep_last": 1, "keep_best": False, "of_others": "nothing"}},
            "export.which 'best' with retention.keep_best false and of_others 'nothing'",
        ),
        ({"seed": "lucky"}, "seed = 'lucky': "),
    ],
)
def test_a_bad_value_gives_one_message_with_the_value_in_it(content: dict[str, Any], message: str) -> None:
    assert refusal_of(content).startswith(message)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"nmae": "x"}, "nmae"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p"),
        ({"trainer": {"lora": {"r": 4}}}, "trainer.lora.r"),
    ],
)
def test_an_unknown_field_is_refused_at_any_depth(content: dict[str, Any], field: str) -> None:
    assert refusal_of(content).startswith(f"{field} does not exist")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "a\\b", "../a", ".hidden", "-flag", "a b", "a\n", "caf\u00e9", "x" * 81, "a:b", "a\0"]
)
def test_a_run_name_that_is_no_plain_folder_name_is_refused(name: str) -> None:
    assert repr(name) in refusal_of({"name": name})


@pytest.mark.parametrize("name", ["a", "7", "run-2.b_C", "a..b", "x" * 80])
def test_a_plain_folder_name_is_a_run_name(name: str) -> None:
    assert RunConfig(name=name).name == name


@pytest.mark.parametrize(("targets", "named"), [(["q_proj", "wq"], "['wq']"), (["lm_head"], "['lm_head']"), ([], "()")])
def test_an_unknown_or_missing_lora_target_is_refused_with_the_known_ones(targets: list[str], named: str) -> None:
    message = refusal_of({"trainer": {"lora": {"target_modules": targets}}})
    assert f"target_modules {named} cannot be adapted; choose from {', '.join(ALL_LINEAR)}" in message


def test_the_order_in_which_lora_targets_are_named_does_not_matter() -> None:
    assert LoraConfig(target_modules=("v_proj", "q_proj", "v_proj")) == LoraConfig(target_modules=("q_proj", "v_proj"))


def test_values_at_their_limits_pass() -> None:
    RunConfig.model_validate(
        {
            "data": {"max_prompt_tokens": 448},
            "sampling": {"group_size": 2, "max_output_tokens": 64},
            "trainer": {"lora": {"rank": 16}, "num_processes": 4, "tensor_parallel": 2, "sequence_parallel": True},
        }
    )


def test_a_group_of_one_is_enough_where_groups_play_no_part() -> None:
    RunConfig.model_validate({"sampling": {"group_size": 1}, "batch": {"advantage": "reinforce_pp"}})


def test_a_variant_differs_in_what_it_names_and_leaves_its_base_alone() -> None:
    base = RunConfig()
    variant = base.but(seed=7, trainer=base.trainer.but(lora=base.trainer.lora.but(rank=4)))
    assert (variant.seed, variant.trainer.lora.rank) == (7, 4)
    assert variant.but(seed=0, trainer=base.trainer) == base == RunConfig()


def test_a_variant_is_validated() -> None:
    base = RunConfig()
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        base.sampling.but(group_size=0)
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        base.but(sampling_=SamplingConfig())
    with pytest.raises(ValidationError, match=r"max_output_tokens 400 = 656 is more than engine\.max_context_tokens 512"):
        base.but(sampling=base.sampling.but(max_output_tokens=400))


def test_a_config_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().seed = 1  # type: ignore[misc]


def test_a_config_is_the_same_after_a_trip_through_json() -> None:
    config = RunConfig().but(
        trainer={"lora": {"target_modules": ["v_proj"]}}, engine={"extra_flags": ["--schedule-policy", "lpm"]}
    )
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert hash(config) == hash(RunConfig.model_validate_json(config.model_dump_json()))


def test_spare_prompts_and_determinism_exclude_each_other() -> None:
    data = DataConfig(num_prompts=8, num_oversampled_prompts=1)
    with pytest.raises(
        ValidationError, match=r"data\.num_oversampled_prompts 1 with engine\.deterministic: .* a matter of timing"
    ):
        RunConfig(data=data)
    made = RunConfig(data=data, engine=EngineConfig(deterministic=False))
    assert made.eval_config.data.num_oversampled_prompts == 0


PARTIAL = {
    "data": {"partial_rollouts": True, "num_prompts": 4, "num_oversampled_prompts": 2},
    "engine": {"deterministic": False},
    "trainer": {"loss": {"correction": {"mode": "decoupled", "kind": "tis"}}},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"partial_rollouts": True, "num_prompts": 4}}, "num_oversampled_prompts 0: .* take 1 to data.num_prompts 4"),
        (
            {"data": PARTIAL["data"] | {"num_oversampled_prompts": 5}},
            "num_oversampled_prompts 5: .* take 1 to data.num_prompts 4",
        ),
        ({"trainer": {}}, "trainer.loss.correction.kind 'none': tokens of an older adapter need a correction"),
        (
            {"trainer": {"loss": {"correction": {"mode": "decoupled", "kind": "tis", "max_staleness": 1}}}},
            "trainer.loss.correction.max_staleness 1: what goes on would be 2 steps old",
        ),
        ({"engine": {"deterministic": False, "kind": "vllm"}}, "engine.kind 'vllm': it gives nothing of an answer"),
    ],
)
def test_partial_rollouts_with_what_does_not_go_with_them_are_refused(changes: dict[str, Any], message: str) -> None:
    assert re.search(f"data.partial_rollouts with [^ ]*{message}", refusal_of(PARTIAL | changes))


def test_an_exam_has_no_spare_prompts_and_nothing_goes_on_in_it() -> None:
    eval_config = RunConfig.model_validate(PARTIAL).eval_config
    assert (eval_config.data.num_oversampled_prompts, eval_config.data.partial_rollouts) == (0, False)


def test_the_number_of_replicas_may_be_left_to_the_machine() -> None:
    assert EngineConfig.model_validate({"replicas": "auto"}).replicas is None
    with pytest.raises(ValidationError, match="or auto"):
        EngineConfig.model_validate({"replicas": "some"})


def test_an_overlong_penalty_of_episodes_reaches_over_all_their_turns() -> None:
    game = {"environment": {"name": "/x.py:Game"}, "batch": {"overlong": {"buffer_tokens": 32, "max_output_tokens": 256}}}
    assert RunConfig.model_validate(game).batch.overlong.max_output_tokens == 256


def test_fields_of_a_correction_that_fp8_turns_on_have_an_effect() -> None:
    content = {"engine": {"quantization": "fp8"}, "trainer": {"loss": {"correction": {"cap": 3}}}}
    correction = RunConfig.model_validate(content).trainer.loss.correction
    assert (correction.kind, correction.cap) == ("tis", 3.0)
