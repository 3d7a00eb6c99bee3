"""Stacked adapters of experts by SGLang's own loader and by the patched one, in SGLang's environment: the same bits in the same places."""

from shared import in_sglang

from infra.settings import CHECKOUT

PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import stacked_adapters as bench
mem_pool = bench.launched("cpu")
pool_class = mem_pool.LoRAMemoryPool
single, patched = bench.both_ways(pool_class)
assert single.__code__.co_filename == mem_pool.__file__
calls = []
copy = mem_pool.copy_weight_into_buffer
mem_pool.copy_weight_into_buffer = lambda *args: (calls.append(1), copy(*args))
shape = bench.Shape(layers=2, experts=6, hidden=16, width=10, largest_rank=4, device="cpu")
for shape.rank, local, ep_rank in ((4, 6, 0), (2, 6, 0), (4, 3, 1), (3, 2, 1)):
    found, copies = [], []
    for pool_class._iter_local_expert_weights in (single, patched):
        pool = bench.made_pool(pool_class, shape, local, ep_rank)
        calls.clear()
        bench.load(pool, bench.made_adapter(shape))
        found.append([*pool.A_buffer.values(), *pool.B_buffer.values()])
        copies.append(len(calls))
    for by_expert, whole in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(by_expert, whole, strict=True)), (shape.rank, local)
        assert all((each[0] == 7).all() and (each[2] == 7).all() for each in whole), "memory of other adapters"
        assert all(each[1].count_nonzero() and not (each[1] == 7).all() for each in whole)
    assert copies == [2 * local * 5, 2 * 5], copies
assert [number for number, *_ in patched(pool, {4: "weights"}, {4: "key"}, localize=False)] == [4], "not stacked"
print("the same")
"""


def test_stacked_experts_are_one_copy_with_the_same_bits() -> None:
    assert in_sglang(PROGRAM, CHECKOUT / "tests/gpu").endswith("the same\n")
