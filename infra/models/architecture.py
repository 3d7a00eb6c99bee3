"""A Hugging Face config.json as the numbers that decide what the model computes.

Strict on purpose: a field that we do not know may change numbers, and a wrong number here teaches the wrong thing in silence.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Fields = dict[str, Any]  # Any: JSON

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""The trainer goes by the type, the engine by the architecture of each."""
HARMLESS = frozenset(
    {
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "initializer_range", "use_cache"),
        *("pretraining_tp", "auto_map", "max_position_embeddings", "max_window_layers", "attention_dropout", "name_or_path"),
        *("output_router_logits", "router_aux_loss_coef", "output_attentions", "output_hidden_states", "return_dict"),
        *("id2label", "label2id", "problem_type", "chunk_size_feed_forward"),
    }
)
"""Fields that do not change a log-probability (attention dropout is off: the engine samples without it)."""
FORBIDDEN = ("quantization_config", "partial_rotary_factor", "attention_bias", "mlp_bias", "mlp_only_layers", "rope_interleaved")
"""Fields that must be missing or off."""


@dataclass(frozen=True)
class Experts:
    count: int
    per_token: int
    ffn_size: int
    renormalise: bool
    """The weights of a token's chosen experts sum to one."""


@dataclass(frozen=True)
class Llama3Rope:
    """How Llama 3.1 stretches positions: slow rotations by factor, fast ones not, those between in part."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Architecture:
    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    """None: positions as they are."""
    tied: bool
    """Output layer and embedding are one matrix."""
    qkv_bias: bool
    qk_norm: bool
    experts: Experts | None


def read_architecture(folder: Path) -> Architecture:
    """The architecture of the model in a Hugging Face folder.

    Raises:
        ValueError: for a model that this trainer would compute wrongly, naming the field of config.json.
    """
    try:
        fields: Fields = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"the base model's {folder / 'config.json'} cannot be read: {error}") from error
    try:
        return parse_architecture(fields)
    except ValueError as error:
        raise ValueError(f"{folder}/{error}") from error  # whose first word is config.json


def parse_architecture(fields: Fields) -> Architecture:
    """Return the architecture that config.json's fields describe.

    Raises:
        ValueError: for a model type, or a field that changes what is computed, that is not supported; begins with `config.json`.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise ValueError(f"config.json: model_type {kind!r} cannot be trained; known are {', '.join(MODEL_TYPES)}")
    if (named := fields.get("architectures")) not in (None, [], [MODEL_TYPES[kind]]):
        raise ValueError(
            f"config.json: architectures {json.dumps(named)[:80]} does not fit model_type {kind!r}, whose one is {MODEL_TYPES[kind]}"
        )
    rest = _Rest(fields)
    heads, hidden = rest.take_count("num_attention_heads"), rest.take_count("hidden_size")
    theta, scaling = _rope(rest, kind)
    architecture = Architecture(
        model_type=kind,
        num_layers=rest.take_count("num_hidden_layers"),
        hidden_size=hidden,
        ffn_size=rest.take_count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=rest.take_count("num_key_value_heads", heads if kind == "llama" else None),
        head_dim=rest.take_count("head_dim", 128 if kind.startswith("qwen3") else hidden // heads),
        vocab_size=rest.take_count("vocab_size"),
        max_positions=fields.get("max_position_embeddings", 32768),
        norm_eps=_positive("rms_norm_eps", rest.take("rms_norm_eps")),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=rest.take_flag("tie_word_embeddings"),
        qkv_bias=kind == "qwen2",
        qk_norm=kind.startswith("qwen3"),
        experts=_experts(rest) if kind == "qwen3_moe" else None,
    )
    _check_attention_spans(rest)
    if (activation := rest.take("hidden_act", "silu")) != "silu":
        raise ValueError(f"config.json: hidden_act {activation!r} is not supported, only 'silu' is")
    rest.refuse_the_remaining()
    return architecture


class _Rest:
    """The fields that were not read yet."""

    def __init__(self, fields: Fields) -> None:
        self.fields = dict(fields)

    def take(self, name: str, default: Any = None) -> Any:
        """A field's value; a field without a default must be there."""
        value = self.fields.pop(name, None)
        if value is None and default is None:
            raise ValueError(f"config.json: {name} is missing")
        return default if value is None else value

    def take_count(self, name: str, default: int | None = None) -> int:
        """Return the value of a field that says how many; it is 1 or more."""
        value = self.take(name, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"config.json: {name} {json.dumps(value)[:80]} must be a whole number of 1 or more")
        return value

    def take_flag(self, name: str) -> bool:
        """Return the value of a field that is true or false; a missing one is false."""
        value = self.take(name, False)
        if type(value) is not bool:
            raise ValueError(f"config.json: {name} {json.dumps(value)[:80]} must be true or false")
        return value

    def refuse_the_remaining(self) -> None:
        for name, value in sorted(self.fields.items()):
            if value in (None, False, [], {}) or name in HARMLESS or name.startswith("_") or name.endswith("_token_id"):
                continue
            if name == "partial_rotary_factor" and value == 1:
                continue
            why = "is not supported" if name in FORBIDDEN else "is not known to this trainer and may change its numbers"
            raise ValueError(f"config.json: {name} {json.dumps(value)[:80]} {why}")


def _rope(rest: _Rest, kind: str) -> tuple[float, Llama3Rope | None]:
    """transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling."""
    new, old = (rest.fields.pop(name, None) or {} for name in ("rope_parameters", "rope_scaling"))
    for name, fields in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(fields, dict):
            raise ValueError(f"config.json: {name} {json.dumps(fields)[:80]} must be an object of names and values")
    found = [_rope_scaling(name, fields) for name, fields in (("rope_parameters", new), ("rope_scaling", old)) if fields]
    if len(set(found)) > 1:
        raise ValueError(f"config.json: rope_parameters and rope_scaling differ: {found[0]} and {found[1]}")
    theta = rest.fields.pop("rope_theta", None)
    # Llama's first checkpoints say nothing and mean 10000; for the others silence is a lost value.
    theta = new.get("rope_theta", theta if theta is not None else (10000.0 if kind == "llama" else None))
    if theta is None:
        raise ValueError("config.json: neither rope_parameters.rope_theta nor rope_theta is there")
    return _positive("rope_theta", theta), found[0] if found else None


def _rope_scaling(name: str, parameters: Fields) -> Llama3Rope | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    values = {key: value for key, value in parameters.items() if key not in ("rope_type", "type", "rope_theta")}
    known = {field.name for field in dataclasses.fields(Llama3Rope)} if kind == "llama3" else set()
    if kind not in ("default", "llama3") or not values.keys() <= known:
        extra = sorted(values.keys() - known)
        raise ValueError(
            f"config.json: {name} asks for rope_type {kind!r} {extra or ''}: only 'default' and 'llama3' are supported"
        )
    if missing := sorted(known - values.keys()):
        raise ValueError(f"config.json: {name} of rope_type 'llama3' does not say {', '.join(missing)}")
    for key, value in values.items():
        _positive(f"{name}.{key}", value)
    return Llama3Rope(**values) if known else None


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {name} {json.dumps(value)[:80]} must be a number above 0")
    return float(value)


def _experts(rest: _Rest) -> Experts:
    names = [name for name in ("num_local_experts", "num_experts") if rest.fields.get(name) is not None]
    if not names:
        raise ValueError("config.json: neither num_experts nor num_local_experts is there")
    counts = {rest.take_count(name) for name in names}
    if len(counts) > 1:
        raise ValueError(f"config.json: num_experts and num_local_experts differ: {sorted(counts)}")
    if (step := rest.take("decoder_sparse_step", 1)) != 1:
        raise ValueError(f"config.json: decoder_sparse_step {step} is not supported, only 1 (experts in every layer) is")
    return Experts(
        count=counts.pop(),
        per_token=rest.take_count("num_experts_per_tok"),
        ffn_size=rest.take_count("moe_intermediate_size"),
        renormalise=rest.take_flag("norm_topk_prob"),
    )


def _check_attention_spans(rest: _Rest) -> None:
    """Every layer must see the whole sequence; a window that is configured but switched off is fine."""
    window = rest.fields.pop("sliding_window", None)
    in_use = rest.fields.pop("use_sliding_window", window is not None)
    types = rest.fields.pop("layer_types", None) or ["full_attention"]
    spans = set(map(str, types if isinstance(types, list) else [types]))
    if (window is not None and in_use) or spans != {"full_attention"}:
        raise ValueError(
            f"config.json: sliding_window {window} with use_sliding_window {in_use} and layer_types {sorted(spans)}: "
            "only full attention is supported"
        )


def base_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> full shape of every tensor of the base model that the trainer reads."""
    h, d = a.hidden_size, a.head_dim
    outer = {"model.embed_tokens.weight": (a.vocab_size, h), "model.norm.weight": (h,)}
    shapes: dict[str, tuple[int, ...]] = dict(outer) if a.tied else outer | {"lm_head.weight": (a.vocab_size, h)}
    for i in range(a.num_layers):
        layer = f"model.layers.{i}."
        shapes |= {layer + f"{name}.weight": (h,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (d,) for name in ("qk" if a.qk_norm else "")}
        shapes |= {f"{layer}self_attn.{name}_proj.bias": (heads(a, name) * d,) for name in ("qkv" if a.qkv_bias else "")}
        if a.experts:
            shapes[layer + "mlp.gate.weight"] = (a.experts.count, h)
    return shapes | {name + ".weight": shape for name, shape in linear_shapes(a).items()}


def linear_shapes(a: Architecture) -> dict[str, tuple[int, int]]:
    """Hugging Face module name -> (out, in) of every linear layer that can carry an adapter."""
    h = a.hidden_size
    shapes: dict[str, tuple[int, int]] = {}
    for i in range(a.num_layers):
        attention = f"model.layers.{i}.self_attn."
        shapes |= {attention + f"{name}_proj": (heads(a, name) * a.head_dim, h) for name in "qkv"}
        shapes[attention + "o_proj"] = (h, a.num_heads * a.head_dim)
        experts, width = [""], a.ffn_size
        if a.experts:
            experts, width = [f"experts.{e}." for e in range(a.experts.count)], a.experts.ffn_size
        for expert in experts:
            mlp = f"model.layers.{i}.mlp.{expert}"
            shapes |= {mlp + "gate_proj": (width, h), mlp + "up_proj": (width, h), mlp + "down_proj": (h, width)}
    return shapes


def heads(a: Architecture, name: str) -> int:
    """Heads of the projection q, k or v."""
    return a.num_heads if name == "q" else a.num_kv_heads


def layout_problem(
    a: Architecture, *, num_processes: int, tensor_parallel: int, expert_parallel: int, sequence_parallel: bool
) -> str | None:
    """Why this model cannot be spread like this, with the sizes that would do; None if it can."""
    # An expert's matrices are not split by tensor parallelism, so their width does not count.
    shared = math.gcd(a.num_kv_heads, a.num_heads, a.vocab_size, 0 if a.experts else a.ffn_size)
    if shared % tensor_parallel:
        return (
            f"tensor_parallel {tensor_parallel} does not divide the model ({a.num_kv_heads} key-value heads, {a.num_heads} heads, "
            f"vocabulary {a.vocab_size}, ffn {a.ffn_size}); {_divisors(shared)} would"
        )
    if a.experts is None:
        return f"expert_parallel {expert_parallel} with a model without experts; 1 would fit" if expert_parallel > 1 else None
    if a.experts.count % expert_parallel:
        fits = _divisors(math.gcd(a.experts.count, num_processes))
        return f"expert_parallel {expert_parallel} does not divide {a.experts.count} experts; {fits} would"
    if tensor_parallel > 1 and not sequence_parallel:
        return f"tensor_parallel {tensor_parallel} of a mixture of experts needs sequence_parallel"
    return None


def serving_problem(a: Architecture, tensor_parallel: int) -> str | None:
    """Why an engine cannot split this model over that many GPUs, with the numbers that would do; None if it can.

    As SGLang and vLLM have it: heads and widths are split evenly, and key-value heads too or each has as many copies (SGLang 0.5.18,
    models/qwen2.py).
    """
    ffn = a.experts.ffn_size if a.experts else a.ffn_size

    def fits(size: int) -> bool:
        return not (a.num_heads % size or ffn % size or (a.num_kv_heads % size and size % a.num_kv_heads))

    if fits(tensor_parallel):
        return None
    would = ", ".join(str(size) for size in range(1, a.num_heads + 1) if fits(size))
    return f"does not divide the model ({a.num_heads} heads, {a.num_kv_heads} key-value heads, ffn {ffn}); {would} would"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def num_active(a: Architecture, sizes: dict[str, int]) -> float:
    """Return the number of weights that a token meets: all of the dense layers, of the experts the share that it is sent to."""
    share = a.experts.per_token / a.experts.count if a.experts else 1.0
    return sum(size * (share if ".experts." in name else 1.0) for name, size in sizes.items())
