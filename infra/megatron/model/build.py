"""Architecture -> megatron-core GPTModel, frozen and without weights yet; runs on gloo and on NCCL alike."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from infra.config import TrainerConfig
from infra.megatron.loss.microbatch import MicroBatch
from infra.megatron.model.attention import PackedAttention
from infra.megatron.model.copies import gather
from infra.megatron.model.experts.layer import MixtureOfExperts, replay_routes
from infra.megatron.model.norms_and_activation import HeadNorm, RMSNorm, SwiGLU
from infra.megatron.model.parallel import ParallelContext
from infra.megatron.model.rotary import Packed, Rotary
from infra.models.architecture import Architecture


def build(a: Architecture, trainer: TrainerConfig, layout: ParallelContext) -> nn.Module:
    """This rank's part of the model on its device."""
    config = transformer_config(a, trainer, layout)
    model: nn.Module = GPTModel(
        config,
        _layer_specs(a, config, layout, is_shared=trainer.share_experts),
        vocab_size=a.vocab_size,
        max_sequence_length=a.max_positions,
        position_embedding_type="none",  # the attention rotates
        share_embeddings_and_output_weights=a.tied,
        parallel_output=True,
    )
    model.requires_grad_(False).to(layout.device)
    model.rotary = Rotary(a.head_dim, a.rope_theta, config.params_dtype, layout.device, a.rope_scaling)
    # It gets the rows of loss tokens from the whole micro-batch, not this rank's share of the rows.
    head: Any = model.get_submodule("output_layer")
    head.sequence_parallel, head.allreduce_dgrad = False, layout.tp_size > 1
    if trainer.recompute:
        # The reentrant checkpoint gives no gradient to anything inside it when no input of it needs one.
        model.get_submodule("embedding").register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    return model.train()


def logits_of(model: Any, micro: MicroBatch) -> Tensor:
    """[N, V / tensor parallel], for each loss token the logits of the row before it. The output layer computes no other rows."""
    if isinstance(model.decoder.layers[0].mlp, MixtureOfExperts):
        replay_routes(model.decoder.layers, micro.routes)
    cos, sin = model.rotary(micro.positions[0])
    packed = Packed(
        qkv_format="thd",
        cu_seqlens_q=micro.starts,
        cu_seqlens_kv=micro.key_starts,
        max_seqlen_q=micro.longest,
        max_seqlen_kv=micro.longest_keys,
        cos=cos,
        sin=sin,
        copies=micro.keys,
    )
    hidden = model.decoder(model.embedding(micro.tokens, micro.positions), None, packed_seq_params=packed)
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    logits: Tensor
    logits, _ = model.output_layer(gather(hidden.flatten(0, 1), micro.rows), weight=weight)
    return logits


def base_dtype(trainer: TrainerConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the frozen base: with `auto` bfloat16 on a GPU, float32 on a CPU."""
    if trainer.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if trainer.dtype == "bfloat16" else torch.float32


def transformer_config(
    a: Architecture, trainer: TrainerConfig, layout: ParallelContext
) -> Any:  # Any: megatron-core has no types
    """Return megatron-core's configuration of a model: no dropout, no bias but that of qkv, and nothing fused by torch.compile."""
    dtype, on_cuda = base_dtype(trainer, layout.device), layout.device.type == "cuda"
    options: dict[str, Any] = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.ffn_size,
        "num_attention_heads": a.num_heads,
        "num_query_groups": a.num_kv_heads,
        "kv_channels": a.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": a.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": a.qkv_bias,
        "qk_layernorm": a.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp_size,
        "sequence_parallel": trainer.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": not on_cuda,
        "perform_initialization": False,
        # Without dropout and bias there is nothing to fuse; torch.compile would only cost its start.
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "use_te_activation_func": True,  # which means: the module of the layer spec, here SwiGLU
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    if trainer.recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**options)


def _layer_specs(a: Architecture, config: Any, layout: ParallelContext, *, is_shared: bool) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(qk_layernorm=a.qk_norm, normalization="RMSNorm")
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    if a.qk_norm:
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    if a.experts:
        parts.mlp = ModuleSpec(MixtureOfExperts, params={"shape": a.experts, "layout": layout, "is_shared": is_shared})
    else:
        parts.mlp.submodules.activation_func = SwiGLU
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm)
