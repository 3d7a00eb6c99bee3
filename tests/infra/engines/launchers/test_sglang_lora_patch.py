"""Stacked adapters of experts by SGLang's own loader and by the patched one, in SGLang's environment: the same bits in the same places."""

from pathlib import Path

from shared import in_sglang

from infra.settings import CHECKOUT

PROGRAM = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
_, programs, folder = sys.argv
sys.path.insert(0, programs)
import stacked_adapters as bench
classes = bench.launched("cpu")
from sglang.srt.lora import mem_pool
ways = bench.ways_of(classes)
own = ways["expert by expert"]
assert own.iterate.__code__.co_filename == mem_pool.__file__ and own.join.__code__.co_filename.endswith("lora/lora.py")
calls = []
copy = mem_pool.copy_weight_into_buffer
mem_pool.copy_weight_into_buffer = lambda *args: (calls.append(1), copy(*args))
shape = bench.Shape(layers=2, experts=6, hidden=16, width=10, largest_rank=4, device="cpu")
file = Path(folder) / "adapter.safetensors"
for shape.rank, local, ep_rank in ((4, 6, 0), (2, 6, 0), (4, 3, 1), (3, 2, 1)):
    save_file(bench.stacked(shape), file)
    found, copies, memory = [], [], []
    for way in ways.values():
        pool = bench.made_pool(classes[0], shape, local, ep_rank)
        calls.clear()
        bench.load(classes, way, pool, file, shape.rank)
        found.append([*pool.A_buffer.values(), *pool.B_buffer.values()])
        copies.append(len(calls))
        memory.append([weight for layer in pool.adapter.layers for weight in layer.weights.values()])
    for by_expert, *others in zip(*found, strict=True):
        for whole in others:
            assert all(torch.equal(a, b) for a, b in zip(by_expert, whole, strict=True)), (shape.rank, local)
            assert all((each[0] == 7).all() and (each[2] == 7).all() for each in whole), "memory of other adapters"
            assert all(each[1].count_nonzero() and not (each[1] == 7).all() for each in whole)
    assert copies == [2 * local * 5, 2 * 5, 2 * 5], copies
    classes[0]._iter_local_expert_weights = patched = ways["all at once"].iterate
    assert [number for number, *_ in patched(pool, {4: "weights"}, {4: "key"}, localize=False)] == [4], "not stacked"
    names = [type(each).__name__ for each in memory[-1]]
    assert names.count("Joined") == 4 and len(names) == 8, names
    for eager, later in zip(memory[1], memory[2], strict=True):  # what computes with it gets one tensor
        assert eager.shape == later.shape and torch.equal(eager, later) and torch.equal(eager[1:3, :2] * 2, later[1:3, :2] * 2)
        assert type(later[0]) is torch.Tensor and torch.equal(eager.clone(), later.clone())
        assert later[0].untyped_storage().data_ptr() == later[1].untyped_storage().data_ptr(), "copied together for each expert"
print("the same")
"""
ODD = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import stacked_adapters as bench
adapter = bench.launched("cpu")[1]
alone = adapter.__new__(adapter)
torch.nn.Module.__init__(alone)
alone._is_non_gated_moe_weight = lambda name: False
begin = "layers.0.mlp.experts."
for gate, up in (("3.gate_proj.lora_A", "3.up_proj.lora_A"), ("gate_proj.lora_A", None), ("gate_proj.lora_A", "up_proj.lora_A")):
    shape = (4, 16) if gate[0] == "3" else (6, 4, 16)
    weights = {begin + gate: torch.ones(shape)} | ({begin + up: torch.full(shape, 2.0).to(torch.float64)} if up else {})
    alone.normalize_gate_up_proj(list(weights), weights)
    (joined,) = weights.values()
    assert type(joined) is torch.Tensor and joined.shape[-2:] == (8, 16), "as SGLang joins them"
print("by SGLang")
"""


def test_stacked_experts_are_one_copy_with_the_same_bits(tmp_path: Path) -> None:
    assert in_sglang(PROGRAM, CHECKOUT / "tests/gpu", tmp_path).endswith("the same\n")


def test_what_is_not_stacked_alike_is_joined_by_sglang() -> None:
    assert in_sglang(ODD, CHECKOUT / "tests/gpu").endswith("by SGLang\n")
