"""The tensors of a model's safetensors files by what the files' heads say, without reading one."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from infra.models.architecture import Architecture, base_shapes

FLOATS = ("BF16", "F16", "F32", "F64")
"""Kinds of numbers, by safetensors' names, that weights may be."""


def check_base(folder: Path, a: Architecture) -> None:
    """Raises ValueError if a file of the base model is damaged, or a tensor is missing, or its shape or its numbers do not fit config.json."""
    found = _heads_of(folder)
    if extra := next((name for name in found if name.startswith(f"model.layers.{a.num_layers}.")), None):
        raise ValueError(
            f"the base model in {folder} has a tensor {extra}, by its config.json num_hidden_layers {a.num_layers} the last layer is "
            f"{a.num_layers - 1}"
        )
    for name, shape in base_shapes(a).items():
        if name not in found:
            raise ValueError(f"the base model in {folder} has no tensor {name}: is a *.safetensors file missing?")
        has, kind = found[name]
        if has != shape:
            raise ValueError(
                f"the base model's tensor {name} in {folder} has shape {has}, by its config.json it should be {shape}"
            )
        if kind not in FLOATS:
            raise ValueError(
                f"the base model's tensor {name} in {folder} holds {kind} numbers, it should hold {', '.join(FLOATS)}"
            )


def _heads_of(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and kind of numbers of all tensors, by name."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    head = file.get_slice(name)
                    found[name] = (tuple(head.get_shape()), str(head.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    return found
