"""Write an adapter into its base model: `python -m infra.megatron.lora.merge BASE ADAPTER OUT [--only-changed]`, all three folders.

Shards in, shards out, one at a time in memory. A matrix W becomes W + alpha / r * B A, computed in float32 and rounded once to W's own
type: in bfloat16 an update smaller than 1/256 of a weight is rounded away there, which the adapter beside it would not be.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from infra.config import LoraConfig
from infra.megatron.lora.peft_files import PEFT_PREFIX, adapter_shapes, check_tensors
from infra.megatron.model.base_weights import Checkpoint
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from infra.models.architecture import Architecture, read_architecture
from infra.models.weights import check_base
from infra.store.files import read_json

ONLY_CHANGED = "--only-changed"
USAGE = f"usage: python -m infra.megatron.lora.merge BASE ADAPTER OUT [{ONLY_CHANGED}]"
PLAIN = {"bias": "none", "use_dora": False, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None}
"""Required values of adapter_config.json for fields that it contains; any other value would be merged wrongly."""


@torch.no_grad()
def merge(base: Path, adapter: Path, out: Path, *, only_changed: bool = False) -> None:
    """OUT appears when it is whole.

    only_changed: Leave out all tensors that the adapter does not change: for an engine that has the base model's already.

    Raises:
        ValueError: for an adapter that does not fit the base, or an OUT that is there already.
    """
    if out.exists():
        raise ValueError(f"{out} is already there")
    architecture = read_architecture(base)
    check_base(base, architecture)
    lora = _lora_of(adapter, architecture)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with Checkpoint(adapter / ADAPTER_WEIGHTS) as deltas:
        for path in sorted(base.iterdir()):
            if path.suffix == ".safetensors":
                _merge_shard(path, partial / path.name, deltas, lora, only_changed=only_changed)
            elif path.is_file() and not (only_changed and path.name.endswith(".safetensors.index.json")):  # of all tensors
                shutil.copyfile(path, partial / path.name)
    partial.rename(out)


def _lora_of(adapter: Path, a: Architecture) -> LoraConfig:
    if not (adapter / ADAPTER_CONFIG).is_file() or not (adapter / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"adapter {adapter} has no {ADAPTER_CONFIG} or no {ADAPTER_WEIGHTS}")
    fields = read_json(adapter / ADAPTER_CONFIG)
    for name, plain in PLAIN.items():
        if fields.get(name, plain) not in (plain, None):
            raise ValueError(
                f"adapter {adapter}: {name} {json.dumps(fields[name])} cannot be merged, only {json.dumps(plain)} can"
            )
    try:
        lora = LoraConfig(rank=fields["r"], alpha=fields["lora_alpha"], target_modules=tuple(fields["target_modules"]))
    except (KeyError, ValidationError) as error:
        raise ValueError(f"adapter {adapter}: its {ADAPTER_CONFIG} cannot be used: {error}") from error
    check_tensors(adapter / ADAPTER_WEIGHTS, adapter_shapes(a, lora))
    return lora


def _merge_shard(source: Path, target: Path, deltas: Checkpoint, lora: LoraConfig, *, only_changed: bool) -> None:
    merged = {}
    with Checkpoint(source) as shard:
        for name in shard.files:
            module = PEFT_PREFIX + name.removesuffix(".weight")
            if f"{module}.lora_A.weight" in deltas.files or not only_changed:
                merged[name] = _with_delta(shard[name][:], module, deltas, lora)
    if not merged:
        return
    save_file(merged, target, {"format": "pt"})
    print(f"{target.name}: {len(merged)} tensors", flush=True)


def _with_delta(weight: Tensor, name: str, deltas: Checkpoint, lora: LoraConfig) -> Tensor:
    if f"{name}.lora_A.weight" not in deltas.files:
        return weight
    a, b = (deltas[f"{name}.lora_{matrix}.weight"][:].float() for matrix in "AB")
    return torch.addmm(weight.float(), b, a, alpha=lora.alpha / lora.rank).to(weight.dtype)


def main() -> int:
    places = [argument for argument in sys.argv[1:] if argument != ONLY_CHANGED]
    if len(places) != 3:
        sys.stderr.write(f"error: {USAGE}\n")
        return 2
    try:
        merge(*(Path(place) for place in places), only_changed=ONLY_CHANGED in sys.argv)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
