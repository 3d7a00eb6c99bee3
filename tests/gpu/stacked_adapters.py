"""How long SGLang takes to bring stacked adapters of experts to the GPU: by its own loader, expert by expert, and by the two patches of
infra/engines/launchers/sglang_lora_patch.py. Then, whether all put the same bits into the same places.

    RATCHET_SGLANG_PYTHON tests/gpu/stacked_adapters.py [OUT.json] [--layers 48] [--experts 128] [--hidden 2048] [--width 768] [--rank 8]
        [--largest-rank 8] [--device cuda] [--repeat 4]

The values are random; the default shapes are those of 30B-A3B. Each way loads into the same memory in turns, from a file that the kernel has in
memory. The first load of each is not counted. Runs in SGLang's environment; `tests/infra/engines/launchers/test_sglang_lora_patch.py` uses its
parts.
"""

import argparse
import json
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

LAUNCHER = Path(__file__).resolve().parents[2] / "infra/engines/launchers/sglang_server.py"
SLOT = 1
"""Of three: the others are those of other adapters."""


class Shape(SimpleNamespace):
    """layers, experts, hidden, width, rank, largest_rank, device."""


class Way(NamedTuple):
    """Functions of SGLang, or those that replace them."""

    join: Callable[..., Any]
    iterate: Callable[..., Any]

    def take(self, classes: tuple[Any, Any]) -> None:
        """classes: As `launched` returns them."""
        classes[0]._iter_local_expert_weights, classes[1].normalize_gate_up_proj = self.iterate, self.join


def launched(device: str) -> tuple[Any, Any]:
    """SGLang's memory pool and adapter, patched as our launcher patches them."""
    sys.argv[:] = [str(LAUNCHER), "--device", device]
    runpy.run_path(str(LAUNCHER), run_name="__mp_main__")
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.mem_pool import LoRAMemoryPool

    return LoRAMemoryPool, LoRAAdapter


def ways_of(classes: tuple[Any, Any]) -> dict[str, Way]:
    """SGLang's own functions, one patched, both patched.

    Errors: AssertionError, if the launcher has not patched them.
    """
    iterate, join = classes[0]._iter_local_expert_weights, classes[1].normalize_gate_up_proj
    assert iterate.__closure__ and join.__closure__, "the launcher has not patched them"
    own = Way(join.__closure__[0].cell_contents, iterate.__closure__[0].cell_contents)
    return {"expert by expert": own, "all at once": Way(own.join, iterate), "joined on the GPU": Way(join, iterate)}


def made_pool(pool_class: Any, s: Shape, num_local: int | None = None, ep_rank: int = 0) -> Any:
    """A memory pool whose memory is full of sevens. num_local: Experts of this rank."""
    import torch

    local = num_local or s.experts
    pool = pool_class.__new__(pool_class)
    pool.num_layer, pool.max_lora_rank, pool.target_modules = s.layers, s.largest_rank, {"gate_up_proj", "down_proj"}
    pool.strict_loading, pool.experts_shared_outer_loras, pool.enable_lora_overlap_loading = True, False, False
    pool.pin_memory_available, pool.base_model, pool.base_hf_config = s.device == "cuda", torch.nn.Module(), None
    pool.tp_rank = pool.lora_added_tokens_size = 0
    pool.moe_ep_rank, pool.moe_ep_size, pool._num_experts_local = ep_rank, s.experts // local, local
    pool.moe_use_local_expert_ids = local < s.experts
    for part in ("embedding_A", "embedding_B", "lm_head_A", "lm_head_B", "new_embeddings"):
        setattr(pool, f"{part}_buffer", {})

    def memory(*shape: int) -> list[torch.Tensor]:
        return [torch.full((3, local, *shape), 7.0, dtype=torch.bfloat16, device=s.device) for _ in range(s.layers)]

    pool.A_buffer = {"gate_up_proj_moe": memory(2 * s.largest_rank, s.hidden), "down_proj_moe": memory(s.largest_rank, s.width)}
    pool.B_buffer = {"gate_up_proj_moe": memory(2 * s.width, s.largest_rank), "down_proj_moe": memory(s.hidden, s.largest_rank)}
    return pool


def stacked(s: Shape) -> dict[str, Any]:
    """The tensors of an adapter's file for the engine, by name."""
    import torch

    torch.manual_seed(s.rank)
    sizes = {
        f"{name}_proj.lora_{of}": size
        for name in ("gate", "up")
        for of, size in (("A", (s.rank, s.hidden)), ("B", (s.width, s.rank)))
    }
    sizes |= {"down_proj.lora_A": (s.rank, s.width), "down_proj.lora_B": (s.hidden, s.rank)}
    return {
        f"base_model.model.model.layers.{layer}.mlp.experts.{name}.weight": torch.randn(s.experts, *size).bfloat16()
        for layer in range(s.layers)
        for name, size in sizes.items()
    }


def load(classes: tuple[Any, Any], way: Way, pool: Any, file: Path, rank: int) -> float:
    """Returns the seconds until the GPU has what is in the file. The adapter before stays on the host meanwhile, as it does in a run."""
    import torch
    from safetensors import safe_open
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    way.take(classes)
    experts = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(experts)
    experts.base_layer = SimpleNamespace(is_shared_fused_moe=False, moe_tp_rank=0)
    experts.tp_size, experts._uses_interleaved_gate_up = 1, False
    begin = time.perf_counter()
    adapter = classes[1].__new__(classes[1])
    torch.nn.Module.__init__(adapter)
    adapter.config, adapter.scaling, adapter.embedding_layers = SimpleNamespace(r=rank), 0.7, {}
    adapter.layers = [SimpleNamespace(weights={}, pinned_weights={}) for _ in range(pool.num_layer)]
    with safe_open(file, framework="pt", device="cpu") as tensors:  # as SGLang reads it
        for name in tensors.keys():  # noqa: SIM118  # it has no iterator
            adapter.layers[int(name.split(".")[4])].weights[name] = tensors.get_tensor(name)
    for layer in adapter.layers:
        adapter.normalize_gate_up_proj(list(layer.weights), layer.weights)
    pool.load_lora_weight_to_buffer("name", SLOT, adapter, [{"mlp.experts": experts}] * pool.num_layer, None, None)
    pool.adapter = adapter
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path, nargs="?")
    defaults = {"layers": 48, "experts": 128, "hidden": 2048, "width": 768, "rank": 8, "largest-rank": 8, "repeat": 4}
    for name, default in defaults.items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--device", default="cuda")
    o, command = p.parse_args(), [*sys.argv]
    classes = launched(o.device)

    import torch
    from safetensors.torch import save_file

    ways = ways_of(classes)
    pools = {name: made_pool(classes[0], Shape(**vars(o))) for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        save_file(stacked(Shape(**vars(o))), file := Path(folder) / "adapter_model.safetensors")
        for _ in range(o.repeat + 1):
            for name, way in ways.items():
                seconds[name].append(round(load(classes, way, pools[name], file, o.rank), 4))
    own, *others = pools.values()
    for kind in ("A_buffer", "B_buffer"):
        for name, layers in getattr(own, kind).items():
            for other in others:
                assert all(torch.equal(a, b) for a, b in zip(layers, getattr(other, kind)[name], strict=True)), (kind, name)
    found = {"command": command, "seconds": seconds, "median_s": {name: statistics.median(s[1:]) for name, s in seconds.items()}}
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print(json.dumps(found))
    if o.out:
        o.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
