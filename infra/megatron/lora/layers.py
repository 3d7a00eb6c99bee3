"""LoRA on megatron-core's fused, split linear layers as PEFT sees it: an A and a B for each Hugging Face projection.

    split by column (linear_qkv, linear_fc1):  A [r, in] on every rank,   B [out / tp, r]
    split by row    (linear_proj, linear_fc2): A [r, in / tp],            B [out, r] on every rank

All communication is on the activation of width r, never on hidden states. Experts are not split by tensor parallelism.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from infra.config import LoraConfig
from infra.megatron.lora.peft_files import PEFT_PREFIX
from infra.megatron.lora.products import GradientSums, adapted_product
from infra.megatron.model.base_weights import Checkpoint, cut
from infra.megatron.model.experts.layer import ExpertAdapters, GroupedExperts
from infra.megatron.model.parallel import ParallelContext
from infra.models.architecture import Architecture

PROJECTIONS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


@dataclass(frozen=True)
class Shard:
    """This rank's part of one tensor of the adapter."""

    name: str
    """PEFT's name of the full tensor. For experts, `*` replaces their number."""
    parameter: nn.Parameter
    """The parameter. For experts: stacked over this rank's experts."""
    cut_dim: int | None
    """Dimension along which it is split evenly over tensor-parallel ranks; None: each rank holds all of it."""
    experts: range | None
    """This rank's experts."""
    sums_over_tp: bool
    """Each tensor-parallel rank's gradient covers only its part of the sequence."""

    @property
    def is_expert(self) -> bool:
        return self.experts is not None

    @property
    def stacked_name(self) -> str:
        """Name of the full tensor, with all experts in one, as SGLang reads it."""
        return self.name.replace(".*.", ".")

    def names(self) -> list[str]:
        """PEFT's name of each full tensor of which this holds all or a share."""
        return [self.name] if self.experts is None else _names_of(self.name, self.experts)

    def names_of_whole(self, num_experts: int) -> list[str]:
        """PEFT's names over the experts of all ranks, if it belongs to experts."""
        return [self.name] if self.experts is None else _names_of(self.name, range(num_experts))


def attach(
    model: nn.Module, a: Architecture, lora: LoraConfig, layout: ParallelContext, *, sequence_parallel: bool
) -> list[Shard]:
    """Attach adapters to the target layers. The shards have the same order on all ranks; only the experts differ."""
    shards = []
    for path, base in list(model.named_modules()):
        parent, _, kind = path.rpartition(".")
        if isinstance(base, GroupedExperts):
            base.adapters = ExpertAdapters(base, lora)
            shards += _shards_of_experts(base, base.adapters, _hugging_face(path))
            continue
        targets = [name for name in PROJECTIONS.get(kind, ()) if name in lora.target_modules]
        if not targets:
            continue
        wrapped = LoraLinear(
            base,
            kind,
            targets,
            lora,
            num_groups=a.num_kv_heads // layout.tp_size,
            tp_size=layout.tp_size,
            sequence_parallel=sequence_parallel,
        )
        setattr(model.get_submodule(parent), kind, wrapped)
        shards += wrapped.shards(_hugging_face(parent))
    return shards


def detach(model: nn.Module) -> None:
    """Undo `attach`: the layers stand alone again."""
    for path, module in list(model.named_modules()):
        if isinstance(module, LoraLinear):
            parent, _, kind = path.rpartition(".")
            setattr(model.get_submodule(parent), kind, module.base)
        elif isinstance(module, GroupedExperts):
            module.adapters = None


def _hugging_face(path: str) -> str:
    """`decoder.layers.3.self_attention` -> `model.layers.3.self_attn`."""
    return path.replace("decoder.", "model.", 1).replace(".self_attention", ".self_attn")


def _shards_of_experts(experts: GroupedExperts, adapters: ExpertAdapters, parent: str) -> list[Shard]:
    return [
        Shard(f"{PEFT_PREFIX}{parent}.*.{name}.lora_{matrix}.weight", parameters[name], None, experts.held, False)
        for name in adapters.lora_A
        for matrix, parameters in (("A", adapters.lora_A), ("B", adapters.lora_B))
    ]


def _names_of(name: str, experts: range) -> list[str]:
    return [name.replace("*", str(expert)) for expert in experts]


class LoraLinear(nn.Module):
    """A frozen linear layer with adapters next to it. Keeps megatron-core's (output, bias) contract."""

    def __init__(
        self,
        base: Any,
        kind: str,
        targets: list[str],
        lora: LoraConfig,
        *,
        num_groups: int,
        tp_size: int,
        sequence_parallel: bool,
    ) -> None:  # Any: megatron-core has no types
        super().__init__()
        self.base, self.kind, self.rank, self.scale = base, kind, lora.rank, lora.alpha / lora.rank
        self.num_groups, self.tp_size, self.sequence_parallel = num_groups, tp_size, sequence_parallel
        self.is_split_by_row = kind in ("linear_proj", "linear_fc2")
        self.enabled = True
        self.sums: tuple[GradientSums, ...] = ()
        self.sizes = self._output_sizes()
        device, into = base.weight.device, base.weight.shape[1]
        empty = {name: torch.empty(self.rank, into, device=device) for name in targets}
        zeros = {name: torch.zeros(self.sizes[name], self.rank, device=device) for name in targets}
        self.lora_A = nn.ParameterDict(empty)
        self.lora_B = nn.ParameterDict(zeros)

    def _output_sizes(self) -> dict[str, int]:
        """Rows of each projection in this rank's share of the base weight."""
        rows = self.base.weight.shape[0]
        match self.kind:
            case "linear_qkv":
                head = self.base.config.kv_channels
                key = self.num_groups * head
                return {"q_proj": rows - 2 * key, "k_proj": key, "v_proj": key}
            case "linear_fc1":
                return {"gate_proj": rows // 2, "up_proj": rows // 2}
        return {PROJECTIONS[self.kind][0]: rows}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:  # Any: megatron-core has no types
        """[tokens, 1, in] -> [tokens, 1, out / tp]."""
        if not self.enabled:
            whole: tuple[Tensor, Tensor | None] = self.base(x, *args, **kwargs)
            return whole
        # Adapters are float32; like autocast, the multiplication is in the base model's type.
        down, up = (matrix.to(x.dtype) for matrix in self._pair()) if not self.sums else self.sums[0].used()
        if self.tp_size == 1:
            bias = None if self.base.skip_bias_add else self.base.bias
            return adapted_product(x, down, up, self.base.weight, bias), self.base.bias if self.base.skip_bias_add else None
        if x.requires_grad:
            x, narrow = _Branch.apply(x, down)  # type: ignore[no-untyped-call]  # torch
        else:
            narrow = F.linear(x, down)
        output, bias = self.base(x, *args, **kwargs)
        hidden = self._across_ranks(narrow)
        if self.is_split_by_row:  # the output may be what another layer returned as it was: not ours to change
            return output + F.linear(hidden, up), bias
        return _AddProduct.apply(output, hidden, up), bias  # type: ignore[no-untyped-call]  # torch

    def begin_sums(self) -> None:
        """Use one pair of matrices, and add up its gradients, until the end of an optimizer step's micro-batches."""
        self.sums = (GradientSums(self._pair, self.base.weight.dtype),)

    def _pair(self) -> tuple[Tensor, Tensor]:
        """[all ranks, in] and, scaled, [out / tp, all ranks], in float32."""
        return torch.cat([self.lora_A[name] for name in self.lora_A]), self._up() * self.scale

    def _up(self) -> Tensor:
        """[out / tp, all ranks]: the B matrices as one, block by block, its rows in the order of the fused layer."""
        names, groups = list(self.lora_A), self.num_groups if self.kind == "linear_qkv" else 1
        if len(names) == len(PROJECTIONS[self.kind]) == 1:
            only: Tensor = self.lora_B[names[0]]
            return only
        rows = []
        for name in PROJECTIONS[self.kind]:
            if name in names:
                before = names.index(name) * self.rank
                block = F.pad(self.lora_B[name], (before, (len(names) - 1) * self.rank - before))
            else:
                block = self.lora_B[names[0]].new_zeros(self.sizes[name], len(names) * self.rank)
            rows.append(block.view(groups, -1, block.shape[1]))
        return torch.cat(rows, 1).flatten(0, 1)

    def _across_ranks(self, hidden: Tensor) -> Tensor:
        if self.is_split_by_row:
            combine = (
                reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else reduce_from_tensor_model_parallel_region
            )
        else:
            combine = gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        combined: Tensor = combine(hidden)
        return combined

    def shards(self, parent: str) -> list[Shard]:
        found = []
        for name in self.lora_A:
            for matrix, parameters, is_cut in (
                ("A", self.lora_A, self.is_split_by_row),
                ("B", self.lora_B, not self.is_split_by_row),
            ):
                found.append(
                    Shard(
                        name=f"{PEFT_PREFIX}{parent}.{name}.lora_{matrix}.weight",
                        parameter=parameters[name],
                        cut_dim=(1 if matrix == "A" else 0) if is_cut and self.tp_size > 1 else None,
                        experts=None,
                        sums_over_tp=self.sequence_parallel and not is_cut,
                    )
                )
        return found


class _Branch(torch.autograd.Function):
    """x unchanged for the base layer, and x @ down.T for the adapter. In the backward pass the adapter's share is added in place to the base
    layer's gradient: the base layer's backward pass has just made that tensor, and no other code holds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:  # Any: torch types its context so
        ctx.save_for_backward(x, down)
        return x.view_as(x), F.linear(x, down)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, down = ctx.saved_tensors
        narrow = gradients[1].reshape(-1, down.shape[0])
        to_x = gradients[0] if gradients[0].is_contiguous() else gradients[0].contiguous()
        to_x.view(-1, down.shape[1]).addmm_(narrow, down)
        return to_x, narrow.t() @ x.reshape(-1, down.shape[1])


class _AddProduct(torch.autograd.Function):
    """output += hidden @ up.T, in place: the widest activations of the model are read and written once."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor, up: Tensor) -> Tensor:  # Any: torch types its context so
        ctx.mark_dirty(output)
        ctx.save_for_backward(hidden, up)
        output.view(-1, output.shape[-1]).addmm_(hidden.reshape(-1, hidden.shape[-1]), up.t())
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, up = ctx.saved_tensors
        flat = gradients[0].reshape(-1, up.shape[0])
        return gradients[0], (flat @ up).view_as(hidden), flat.t() @ hidden.reshape(-1, up.shape[1])


@contextmanager
def gradients_summed(model: nn.Module) -> Iterator[None]:
    """Make each layer's pairs of matrices once for all micro-batches of an optimizer step, whose gradients the parameters get at the end.

    Nothing may change the parameters meanwhile. The numbers are those of making it for each micro-batch.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLinear | ExpertAdapters)]
    try:
        for layer in layers:
            layer.begin_sums()
        yield
        for layer in layers:
            for sums in layer.sums:
                sums.hand_on()
            layer.sums = ()
    finally:
        for layer in layers:
            layer.sums = ()


def set_enabled(model: nn.Module, enabled: bool) -> None:
    """Switch all adapters of a model on or off. Off, the model computes as its base."""
    for module in model.modules():
        if isinstance(module, LoraLinear | ExpertAdapters):
            module.enabled = enabled


@torch.no_grad()
def initialize(shards: list[Shard], shapes: dict[str, tuple[int, int]], layout: ParallelContext, seed: int) -> None:
    """Initialize as PEFT does: A uniform within 1 / sqrt(in) (kaiming, a = sqrt 5), B zero. The same under every layout."""
    for shard in shards:
        if ".lora_B." in shard.name:
            shard.parameter.zero_()
            continue
        full = _as_held(shard, [_first_value(name, shapes[name], seed) for name in shard.names()])
        shard.parameter.copy_(full if shard.cut_dim is None else full.chunk(layout.tp_size, shard.cut_dim)[layout.tp_rank])


def _first_value(name: str, shape: tuple[int, int], seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _as_held(shard: Shard, values: list[Tensor]) -> Tensor:
    return torch.stack(values) if shard.is_expert else values[0]


@torch.no_grad()
def read_shard(checkpoint: Checkpoint, shard: Shard, layout: ParallelContext, *, prefix: str = "") -> Tensor:
    """Read this rank's part of full tensors that are named, after a prefix, and laid out like the shard's."""
    lazy = [checkpoint[prefix + name] for name in shard.names()]
    values = [each[:] if shard.cut_dim is None else cut(each, shard.cut_dim, layout) for each in lazy]
    return _as_held(shard, values).to(shard.parameter)
