"""Other block sizes for SGLang's LoRA kernels (csgmv) than its own, in the files that it reads from SGLANG_LORA_CONFIG_DIR.

Under a CUDA graph its second kernel (expand) is started for as many segments as the graph has requests, 512 here, though 512 rows of one adapter
are 32 segments of 16: the others end at once, but each is a program for every BLOCK_N = 64 columns of the output. At the 7B shape that
is 447 000 programs a layer and 12.5 million a decoding step (docs/results/h200-hand-over.md). Wider blocks are fewer programs; each output
is still one sum over the rank, in the same order.

Names and form of the files: sglang/kernels/ops/gemm/lora_tuning_config.py of 0.5.17 and 0.5.18.
"""

from pathlib import Path

from infra.models.architecture import Architecture
from infra.store.files import write_json

VARIABLE = "SGLANG_LORA_CONFIG_DIR"
CHUNK_SIZES = ("16", "32", "64", "128")
BLOCK_K = 16
"""SGLang's own: columns of the rank taken at a time."""


def expand_shapes(a: Architecture, tensor_parallel: int = 1) -> dict[str, tuple[int, int]]:
    """Layer -> (columns of the output on one rank, slices) of a dense model."""
    heads = (a.num_heads + 2 * a.num_kv_heads) // tensor_parallel
    return {
        "qkv_proj": (heads * a.head_dim, 3),
        "o_proj": (a.hidden_size, 1),
        "gate_up_proj": (2 * a.ffn_size // tensor_parallel, 2),
        "down_proj": (a.hidden_size, 1),
    }


def write_blocks(folder: Path, a: Architecture, *, rank: int, block_n: int, gpu: str, tensor_parallel: int = 1) -> Path:
    """Files that have the expand kernel of every layer take block_n columns at a time; the folder for the variable."""
    blocks = {size: {"BLOCK_N": block_n, "BLOCK_K": BLOCK_K} for size in CHUNK_SIZES}
    for columns, slices in expand_shapes(a, tensor_parallel).values():
        name = f"lora_expand,K={columns},R={rank},S={slices},device={gpu.replace(' ', '_')}.json"
        write_json(
            folder / "csgmv_configs" / "triton_0_0_0" / name, blocks
        )  # of another Triton: read with a warning where there is no other
    return folder


def num_programs(a: Architecture, *, num_segments: int, block_n: int) -> int:
    """Of the expand kernels of one decoding step."""
    width = {"qkv_proj": a.num_heads * a.head_dim, "gate_up_proj": a.ffn_size}
    per_segment = sum(-(-width.get(name, columns) // block_n) * slices for name, (columns, slices) in expand_shapes(a).items())
    return a.num_layers * num_segments * per_segment
