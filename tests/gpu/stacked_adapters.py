"""How long SGLang takes to bring stacked adapters of experts to the GPU: by its own loader, expert by expert, and by the patched one of
infra/engines/launchers/sglang_lora_patch.py. Then, whether both put the same bits into the same places.

    RATCHET_SGLANG_PYTHON tests/gpu/stacked_adapters.py [OUT.json] [--layers 48] [--experts 128] [--hidden 2048] [--width 768] [--rank 8]
        [--largest-rank 8] [--device cuda] [--repeat 4]

The values are random; the default shapes are those of 30B-A3B. Each way loads into the same memory in turns. The first load of each is not
counted. Runs in SGLang's environment; `tests/infra/engines/launchers/test_sglang_lora_patch.py` uses its parts.
"""

import argparse
import json
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LAUNCHER = Path(__file__).resolve().parents[2] / "infra/engines/launchers/sglang_server.py"
SLOT = 1
"""Of three: the others are those of other adapters."""


class Shape(SimpleNamespace):
    """layers, experts, hidden, width, rank, largest_rank, device."""


def launched(device: str) -> Any:
    """The module with SGLang's memory pool, patched as our launcher patches it."""
    sys.argv[:] = [str(LAUNCHER), "--device", device]
    runpy.run_path(str(LAUNCHER), run_name="__mp_main__")
    from sglang.srt.lora import mem_pool

    return mem_pool


def both_ways(pool_class: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """SGLang's own function and the patched one.

    Errors: AssertionError, if the launcher has not patched it.
    """
    patched = pool_class._iter_local_expert_weights
    assert patched.__closure__, "the launcher has not patched it"
    return patched.__closure__[0].cell_contents, patched


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


def made_adapter(s: Shape) -> Any:
    """An adapter on the host, as SGLang has read it: stacked, gate before up."""
    import torch

    torch.manual_seed(s.rank)
    sizes = {"gate_up_proj.lora_A": (2 * s.rank, s.hidden), "gate_up_proj.lora_B": (2 * s.width, s.rank)}
    sizes |= {"down_proj.lora_A": (s.rank, s.width), "down_proj.lora_B": (s.hidden, s.rank)}

    def weights(layer: int) -> dict[str, torch.Tensor]:
        begin = f"base_model.model.model.layers.{layer}.mlp.experts"
        return {f"{begin}.{name}.weight": torch.randn(s.experts, *size).bfloat16() for name, size in sizes.items()}

    layers = [SimpleNamespace(weights=weights(layer), pinned_weights={}) for layer in range(s.layers)]
    return SimpleNamespace(config=SimpleNamespace(r=s.rank), scaling=0.7, embedding_layers={}, layers=layers)


def load(pool: Any, adapter: Any) -> float:
    """Returns the seconds until the GPU has it."""
    import torch
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    experts = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(experts)
    experts.base_layer = SimpleNamespace(is_shared_fused_moe=False, moe_tp_rank=0)
    experts.tp_size, experts._uses_interleaved_gate_up = 1, False
    begin = time.perf_counter()
    pool.load_lora_weight_to_buffer("name", SLOT, adapter, [{"mlp.experts": experts}] * pool.num_layer, None, None)
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
    pool_class = launched(o.device).LoRAMemoryPool

    import torch

    adapter = made_adapter(Shape(**vars(o)))
    ways = both_ways(pool_class)
    pools = {way: made_pool(pool_class, Shape(**vars(o))) for way in ("expert by expert", "all at once")}
    seconds: dict[str, list[float]] = {way: [] for way in pools}
    for _ in range(o.repeat + 1):
        for (way, pool), iterate in zip(pools.items(), ways, strict=True):
            pool_class._iter_local_expert_weights = iterate
            seconds[way].append(round(load(pool, adapter), 4))
    mine, theirs = pools.values()
    for kind in ("A_buffer", "B_buffer"):
        for name, layers in getattr(mine, kind).items():
            assert all(torch.equal(a, b) for a, b in zip(layers, getattr(theirs, kind)[name], strict=True)), (kind, name)
    found = {"command": command, "seconds": seconds, "median_s": {way: statistics.median(s[1:]) for way, s in seconds.items()}}
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print(json.dumps(found))
    if o.out:
        o.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
