"""Hugging Face safetensors -> this rank's part of the model. Each rank reads only the slices that it holds."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from infra.models.architecture import Architecture

if TYPE_CHECKING:  # megatron-core takes seconds to import, and checks of the input need none of it
    from infra.megatron.model.parallel import ParallelContext

log = logging.getLogger(__name__)

LINEAR_OF_STACK = {"gate_up": "linear_fc1", "down": "linear_fc2"}
PROGRESS_S = 1.0


class Checkpoint:
    """The tensors of a safetensors file, or of all files in a folder, by name. A tensor is not read until a slice of it is requested."""

    def __init__(self, path: Path) -> None:
        self.paths = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        self.files: dict[str, Any] = {}  # Any: safetensors has no types
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        for path in self.paths:
            try:
                file = self.stack.enter_context(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                self.stack.close()
                raise ValueError(f"{path} is no whole safetensors file: {error}") from error
            self.files.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def __getitem__(self, name: str) -> Any:  # Any: safetensors' slices have no types
        return self.files[name].get_slice(name)


class UnusableBase(ValueError):
    """A base model holds numbers that are NaN or infinite."""


@torch.no_grad()
def load_base(model: nn.Module, folder: Path, a: Architecture, layout: "ParallelContext") -> None:
    """Load every parameter of a model that has no adapters yet. Those without elements are left: see infra.megatron.checkpoint.shared_experts."""
    load({name: parameter for name, parameter in model.named_parameters() if parameter.numel()}, folder, a, layout)


@torch.no_grad()
def load(parameters: Mapping[str, Tensor], folder: Path, a: Architecture, layout: "ParallelContext") -> None:
    """Load these parameters, by Megatron's names.

    Raises:
        UnusableBase: if one is NaN or infinite, in the files or as this type; names it. In a row of a rare token it would show late.
    """
    for name, part, value in _parts(parameters, folder, a, layout):
        part.copy_(value)
        if not all(bound.isfinite() for bound in part.aminmax()):  # NaN is passed on; makes no mask of the part's size
            raise UnusableBase(
                f"the base model in {folder} holds NaN or infinite numbers, in what Megatron calls {name}, as {part.dtype}: fetch or make it again"
            )


@torch.no_grad()
def differing(parameters: Mapping[str, Tensor], folder: Path, a: Architecture, layout: "ParallelContext") -> str | None:
    """Return the first of these parameters that has other values than the files; None if all are equal."""
    for name, part, value in _parts(parameters, folder, a, layout):
        if not torch.equal(part, value.to(part)):
            return name
    return None


def _parts(
    parameters: Mapping[str, Tensor], folder: Path, a: Architecture, layout: "ParallelContext"
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, part and the part's value in the files: each expert of stacked experts, or the whole parameter."""
    with Checkpoint(folder) as checkpoint:
        reader, progress = _Reader(checkpoint, a, layout), _Progress(parameters)
        for name, parameter in parameters.items():
            # Expert by expert: stacked on the host, a layer of experts would be in memory twice.
            parts = parameter if ".experts." in name else [parameter]
            for part, value in zip(parts, reader.read(name), strict=True):
                assert value.shape == part.shape, (name, value.shape, part.shape)
                yield name, part, value
            progress.add(parameter)


class _Progress:
    """Logs the progress of loading a large model, every few seconds."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.total = sum(p.numel() * p.element_size() for p in parameters.values())
        self.done, self.said = 0, time.monotonic()

    def add(self, parameter: Tensor) -> None:
        self.done += parameter.numel() * parameter.element_size()
        if time.monotonic() - self.said > PROGRESS_S:
            self.said = time.monotonic()
            log.info("loaded %.1f of %.1f GiB", self.done / 2**30, self.total / 2**30)


class _Reader:
    """Megatron's parameter name -> this rank's value; for stacked experts, one value after the other."""

    def __init__(self, checkpoint: Checkpoint, a: Architecture, layout: "ParallelContext") -> None:
        self.checkpoint, self.a, self.layout = checkpoint, a, layout

    def read(self, name: str) -> Iterator[Tensor]:
        match name.split("."):
            case ["decoder", "layers", index, "mlp", "experts", stack]:
                # Whole experts are spread over expert-parallel ranks; tensor parallelism does not split them.
                assert self.a.experts
                held = self.a.experts.count // self.layout.ep_size
                for expert in range(self.layout.ep_rank * held, (self.layout.ep_rank + 1) * held):
                    prefix, linear = f"model.layers.{index}.mlp.experts.{expert}.", LINEAR_OF_STACK[stack]
                    yield self._mlp(prefix, linear, self._whole, self._whole)
            case _:
                yield self._one(name)

    def _one(self, name: str) -> Tensor:
        match name.split("."):
            case ["embedding", "word_embeddings", "weight"]:
                return self._rows("model.embed_tokens.weight")
            case ["output_layer", "weight"]:
                return self._rows("lm_head.weight")
            case ["decoder", "final_layernorm", "weight"]:
                return self._whole("model.norm.weight")
            case ["decoder", "layers", index, *rest]:
                return self._layer(f"model.layers.{index}.", rest)
        raise AssertionError(f"no rule for {name}")

    def _layer(self, layer: str, rest: list[str]) -> Tensor:
        match rest:
            case ["input_layernorm", "weight"]:
                return self._whole(layer + "input_layernorm.weight")
            case ["pre_mlp_layernorm", "weight"]:
                return self._whole(layer + "post_attention_layernorm.weight")
            case ["self_attention", ("q_layernorm" | "k_layernorm") as norm, "weight"]:
                return self._whole(f"{layer}self_attn.{norm[0]}_norm.weight")
            case ["self_attention", "linear_qkv", kind]:
                parts = [self._rows(f"{layer}self_attn.{x}_proj.{kind}") for x in "qkv"]
                return interleave_qkv(parts, self.a.num_kv_heads // self.layout.tp_size, dim=0)
            case ["self_attention", "linear_proj", "weight"]:
                return self._columns(layer + "self_attn.o_proj.weight")
            case ["mlp", "router", "weight"]:
                return self._whole(layer + "mlp.gate.weight")
            case ["mlp", linear, "weight"]:
                return self._mlp(layer + "mlp.", linear, self._rows, self._columns)
        raise AssertionError(f"no rule for {layer}{'.'.join(rest)}")

    def _mlp(self, prefix: str, linear: str, rows: Callable[[str], Tensor], columns: Callable[[str], Tensor]) -> Tensor:
        if linear == "linear_fc1":
            return torch.cat([rows(prefix + "gate_proj.weight"), rows(prefix + "up_proj.weight")])
        return columns(prefix + "down_proj.weight")

    def _whole(self, name: str) -> Tensor:
        value: Tensor = self.checkpoint[name][:]
        return value

    def _rows(self, name: str) -> Tensor:
        return cut(self.checkpoint[name], 0, self.layout)

    def _columns(self, name: str) -> Tensor:
        return cut(self.checkpoint[name], 1, self.layout)


def cut(lazy: Any, dim: int, layout: "ParallelContext") -> Tensor:  # Any: safetensors' slices have no types
    """This tensor-parallel rank's even share of an unread tensor along its dimension 0 or 1."""
    size = lazy.get_shape()[dim] // layout.tp_size
    mine = slice(layout.tp_rank * size, (layout.tp_rank + 1) * size)
    share: Tensor = lazy[mine] if dim == 0 else lazy[:, mine]
    return share


def interleave_qkv(parts: list[Tensor], num_groups: int, *, dim: int) -> Tensor:
    """q, k, v in Hugging Face order -> Megatron's order along dim: by key-value head, its query heads, key, value."""
    dim %= parts[0].ndim
    return torch.cat([torch.unflatten(part, dim, (num_groups, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)
