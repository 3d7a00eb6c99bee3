"""Weights that do not fit config.json are refused by what the files' heads say, before anything reads them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from flows.presets import preset
from infra.models.architecture import read_architecture
from infra.models.weights import check_base
from tasks.support import preflight

Tensors = dict[str, NDArray[np.generic]]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "copy"))


def without_one(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != UP}


def of_a_further_layer(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.2.mlp.up_proj.weight": tensors[UP]}


def of_another_shape(tensors: Tensors) -> Tensors:
    return tensors | {UP: np.zeros((64, 128), np.float16)}


def of_whole_numbers(tensors: Tensors) -> Tensors:
    return tensors | {UP: tensors[UP].astype(np.int8)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_one, rf"has no tensor {UP}: is a \*.safetensors file missing\?"),
        (
            of_a_further_layer,
            r"has a tensor model.layers.2.mlp.up_proj.weight, by its config.json num_hidden_layers 2 the last layer is 1",
        ),
        (of_another_shape, rf"{UP} in .* has shape \(64, 128\), by its config.json it should be \(128, 64\)"),
        (of_whole_numbers, rf"{UP} in .* holds I8 numbers, it should hold BF16, F16, F32, F64"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(folder: Path, change: Callable[[Tensors], Tensors], said: str) -> None:
    path = folder / "model.safetensors"
    check_base(folder, read_architecture(folder))
    safetensors.numpy.save_file(change(safetensors.numpy.load_file(path)), path)
    with pytest.raises(ValueError, match=said):
        check_base(folder, read_architecture(folder))


@pytest.mark.usefixtures("workspace")
def test_weights_that_are_cut_short_stop_a_run_before_anything_is_started(folder: Path) -> None:
    base = preset("smoke")
    config = base.but(model=str(folder), engine=base.engine.but(kind="scripted"))
    preflight.check(config)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"^{path} is no whole safetensors file: "):
        preflight.check(config)
