"""config.json in all its dialects; what we would compute wrongly is refused by name."""

from typing import Any

import pytest

from infra.models.architecture import base_shapes, layout_problem, parse_architecture, serving_problem

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 1000000,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
MOE = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ],
)
def test_old_and_new_rope_fields_say_the_same(rope: dict[str, Any]) -> None:
    assert parse_architecture(without(QWEN3, "rope_theta") | rope).rope_theta == 5e5


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_both_ways_of_writing_the_rope_of_llama_31_say_the_same() -> None:
    old = parse_architecture(QWEN3 | {"rope_scaling": LLAMA3})
    new = parse_architecture(without(QWEN3, "rope_theta") | {"rope_parameters": LLAMA3 | {"rope_theta": 1000000}})
    assert old == new
    assert old.rope_scaling is not None and old.rope_scaling.factor == 8


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_old_and_new_expert_fields_say_the_same(name: str) -> None:
    experts = parse_architecture(without(MOE, "num_experts") | {name: 16}).experts
    assert experts is not None and experts.count == 16


def test_a_window_that_is_switched_off_is_fine() -> None:
    off = {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21, "layer_types": ["full_attention"] * 2}
    assert parse_architecture(QWEN3 | off) == parse_architecture(QWEN3)


def test_qwen2_has_biases_and_derives_the_size_of_a_head() -> None:
    a = parse_architecture(without(QWEN3, "head_dim") | {"model_type": "qwen2"})
    assert (a.qkv_bias, a.qk_norm, a.head_dim) == (True, False, 16)
    assert base_shapes(a)["model.layers.1.self_attn.k_proj.bias"] == (32,)


def test_early_llama_means_ten_thousand() -> None:
    fields = without(QWEN3, "rope_theta", "num_key_value_heads", "head_dim") | {"model_type": "llama", "attention_bias": False}
    a = parse_architecture(fields)
    assert (a.rope_theta, a.num_kv_heads) == (10000.0, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling asks for rope_type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters asks for rope_type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling asks for rope_type 'dynamic' ['factor']"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1]}}, "rope_scaling asks for rope_type 'longrope'"),
        ({"rope_scaling": without(LLAMA3, "factor")}, "'llama3' does not say factor"),
        ({"rope_scaling": LLAMA3 | {"attention_factor": 2}}, "rope_type 'llama3' ['attention_factor']"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e6}}, "rope_parameters and rope_scaling differ"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": None}, "rope_theta"),
        ({"sliding_window": 1024, "use_sliding_window": True}, "sliding_window 1024"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0 is not known"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rms_norm_eps": "1e-6"}, 'rms_norm_eps "1e-6" must be a number above 0'),
        ({"rms_norm_eps": -1}, "rms_norm_eps -1 must be a number above 0"),
        ({"rope_theta": "big"}, 'rope_theta "big" must be a number above 0'),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "rope_scaling.factor 0 must be a number above 0"),
        ({"rope_parameters": [1]}, "rope_parameters [1] must be an object"),
        ({"layer_types": [["x"]]}, "only full attention is supported"),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings "false" must be true or false'),
        ({"model_type": ["qwen3"]}, "model_type ['qwen3'] cannot be trained"),
        ({"architectures": ["LlamaForCausalLM"]}, "does not fit model_type 'qwen3', whose one is Qwen3ForCausalLM"),
    ],
)
def test_what_would_change_numbers_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"^config.json: .*") as caught:
        parse_architecture(QWEN3 | changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers [0]"),
        ({"num_experts": None}, "neither num_experts nor num_local_experts"),
        ({"num_local_experts": 4}, "differ: [4, 8]"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size 64"),
    ],
)
def test_other_mixtures_of_experts_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_architecture(MOE | changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "layout", "said"),
    [
        (
            QWEN3,
            {"num_processes": 4, "tensor_parallel": 4},
            "tensor_parallel 4 does not divide the model (2 key-value heads, 4 heads",
        ),
        (QWEN3 | {"vocab_size": 513}, {"num_processes": 2, "tensor_parallel": 2}, "vocabulary 513, ffn 128); 1 would"),
        (QWEN3, {"num_processes": 2, "expert_parallel": 2}, "a model without experts"),
        (MOE, {"num_processes": 6, "expert_parallel": 3}, "expert_parallel 3 does not divide 8 experts; 1, 2 would"),
        (MOE, {"num_processes": 2, "tensor_parallel": 2}, "needs sequence_parallel"),
        (MOE, {"num_processes": 4, "tensor_parallel": 2, "expert_parallel": 2, "sequence_parallel": True}, None),
        (QWEN3, {"num_processes": 4, "tensor_parallel": 2}, None),
    ],
)
def test_a_layout_that_does_not_fit_says_which_would(fields: dict[str, Any], layout: dict[str, Any], said: str | None) -> None:
    whole = {"tensor_parallel": 1, "expert_parallel": 1, "sequence_parallel": False} | layout
    problem = layout_problem(parse_architecture(fields), **whole)
    assert problem is None if said is None else problem is not None and said in problem


@pytest.mark.parametrize(
    ("changes", "size", "problem"),
    [
        ({}, 2, None),
        ({}, 4, None),  # each key-value head twice
        ({}, 3, "does not divide the model (4 heads, 2 key-value heads, ffn 128); 1, 2, 4 would"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 120},
            3,
            "does not divide the model (12 heads, 4 key-value heads, ffn 120); 1, 2, 4, 12 would",
        ),
        ({"intermediate_size": 126}, 4, "does not divide the model (4 heads, 2 key-value heads, ffn 126); 1, 2 would"),
    ],
)
def test_an_engine_splits_a_model_over_as_many_gpus_as_divide_it(changes: dict[str, Any], size: int, problem: str | None) -> None:
    assert serving_problem(parse_architecture(QWEN3 | changes), size) == problem


def test_an_engine_splits_each_expert() -> None:
    assert serving_problem(parse_architecture(MOE), 4) is None
    assert serving_problem(parse_architecture(MOE | {"moe_intermediate_size": 30}), 4) is not None
