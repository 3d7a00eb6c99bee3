"""A program that holds a mixture's experts as the engine does: `lender.py MODEL FOLDER`. It ends when its input does."""

import importlib.util
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

LAUNCHER = Path(__file__).parents[3] / "infra/engines/launchers/sglang_shared_experts.py"


def stacked(model: Path) -> nn.Module:
    """The experts alone, stacked and named as SGLang does it."""
    files: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    root = nn.Module()
    for layer in sorted({name.split(".")[2] for name in files if ".experts." in name}):
        prefix = f"model.layers.{layer}.mlp.experts"
        count = len({name.split(".")[5] for name in files if name.startswith(f"{prefix}.")})
        gate, up, down = (
            torch.stack([files[f"{prefix}.{expert}.{kind}_proj.weight"] for expert in range(count)])
            for kind in ("gate", "up", "down")
        )
        place = root
        for part in prefix.split("."):
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        place.register_parameter("w13_weight", nn.Parameter(torch.cat([gate, up], 1), requires_grad=False))
        place.register_parameter("w2_weight", nn.Parameter(down, requires_grad=False))
    return root


def main(model: Path, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("sglang_shared_experts", LAUNCHER)
    assert spec and spec.loader
    launcher = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launcher)
    held = stacked(model)
    launcher.write(held, folder)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
