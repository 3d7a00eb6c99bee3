"""A decoding step with LoRA in SGLang's environment: what its CUDA graphs read is prepared once, and the products are ours where they can be."""

from shared import in_sglang

from infra.settings import CHECKOUT

BEGIN = """
import runpy, sys, torch
from types import SimpleNamespace as Some
sys.argv = [sys.argv[1], "--device", "cpu"]
launcher = runpy.run_path(sys.argv[0], run_name="__mp_main__")
from sglang.srt.lora.backend import triton_backend
patch = sys.modules["sglang_lora_decoding"]
"""
PREPARED = """
make = torch.tensor
torch.tensor = lambda *args, pin_memory=False, **named: make(*args, **named)
prepare = triton_backend.TritonLoRABackend.prepare_lora_batch
single = prepare.__closure__[0].cell_contents
assert single.__code__.co_filename == triton_backend.__file__, "the launcher has not patched it"
calls = []
counted = patch.once(lambda *args: (calls.append(1), single(*args))[0] and None)

def backend():
    made = triton_backend.TritonLoRABackend(2, torch.device("cpu"))
    numbers = {name: torch.zeros(9, dtype=torch.int32) for name in ("seg_lens", "seg_indptr", "weight_indices", "permutation")}
    of_slots = {"lora_ranks": torch.zeros(2, dtype=torch.int32), "scalings": torch.zeros(2)}
    info = triton_backend.LoRABatchInfo
    made.cuda_graph_batch_info = info(use_cuda_graph=True, bs=8, num_segments=None, max_len=1, **numbers, **of_slots)
    merged = {name: torch.zeros(2 + (name == "seg_indptr"), dtype=torch.int32) for name in ("seg_lens", "seg_indptr")}
    merged |= {name: each.clone() for name, each in of_slots.items()}
    made.cuda_graph_sgemm_batch_info = info(
        use_cuda_graph=True, bs=2, num_segments=2, max_len=8, weight_indices=torch.arange(2), permutation=torch.zeros(8, dtype=torch.int32), **merged
    )
    return made

def state(backend):
    infos = [info for info in (backend.batch_info, backend.sgemm_batch_info) if info is not None]
    numbers = [(name, torch.is_tensor(value) and value.tolist() or repr(value)) for info in infos for name, value in vars(info).items()]
    return numbers, backend.lm_head_batch_info is None, backend.lm_head_pass_batch_infos is None

class Mode:
    def __init__(self, extends): self.extends = extends
    is_extend = lambda self: self.extends
    is_target_verify = is_draft_extend_v2 = lambda self: False

def batch(num, extends=False):
    lengths = torch.full((num,), 3, dtype=torch.int32)
    return Some(batch_size=num, forward_mode=Mode(extends), extend_seq_lens=lengths, extend_seq_lens_cpu=lengths.tolist(), return_logprob=False)

mine, plain = backend(), backend()
steps = [
    (3, [1, 1, 1], [0, 16], [0, 2.0]), (3, [1, 1, 1], [0, 16], [0, 2.0]), (3, [1, 1, 1], [0, 16], [0, 0.5]), (3, [1, 0, 1], [0, 16], [0, 0.5]),
    (2, [1, 0], [0, 16], [0, 0.5]), (3, [1, 0, 1], [0, 8], [0, 0.5]), None, (3, [1, 0, 1], [0, 8], [0, 0.5]), (3, [1, 0, 1], [0, 8], [0, 0.5]),
]
for step in steps:
    for each, way in ((mine, counted), (plain, single)):
        if step is None:
            way(each, batch(2, True), [1, 1], [0, 8], [0, 0.5], False)
        else:
            way(each, batch(step[0]), *step[1:], True)
    assert state(mine) == state(plain), step
assert len(calls) == len(steps) - 2, len(calls)
other = backend()
mine.cuda_graph_batch_info = other.cuda_graph_batch_info
counted(mine, batch(3), *steps[-1][1:], True)
assert mine.batch_info is other.cuda_graph_batch_info, "memory of other graphs"
print("the same")
"""
PRODUCTS = """
assert triton_backend.sgemm_lora_a_fwd.__code__.co_filename != patch.__file__, "on a CPU SGLang's own compute"
names = [name for name in patch.KNOWN if name != "prepare_lora_batch"]
sources = {name: getattr(triton_backend, name) for name in names}
assert all(patch._is_known(*each) for each in sources.items())
asked = []
kernels = Some(shrink=lambda *args: asked.append(("shrink", args)), expand=lambda *args: asked.append(("expand", args)))
module = Some(TritonLoRABackend=Some(prepare_lora_batch=lambda other: None), **sources)
patch.mend(module, lambda: kernels)
x, w, y = (torch.zeros(2, 4, dtype=torch.bfloat16) for _ in range(3))
sorted_by_adapter = Some(permutation=torch.arange(2))
module.sgemm_lora_a_fwd(x, w, sorted_by_adapter, stack_num=2)
module.sgemm_lora_b_fwd(x, w, sorted_by_adapter, y)
module.gate_up_lora_b_fwd(x, w, sorted_by_adapter, 7, y)
for _ in range(2):
    module.qkv_lora_b_fwd(x, w, sorted_by_adapter, torch.tensor([0, 8, 10, 12]), 8, y)
assert [name for name, _ in asked] == ["shrink"] + 4 * ["expand"]
assert asked[0][1][3] == 2
assert [args[3] for _, args in asked[1:]] == [(2,), (7, 7), (8, 2, 2), (8, 2, 2)]
assert all(args[4] is y for _, args in asked[1:])

def theirs_is_called(name, *args):
    way = {"sgemm_lora_a_fwd": patch.shrinking, "sgemm_lora_b_fwd": patch.expanding, "gate_up_lora_b_fwd": patch.expanding_gate_up}
    made = way.get(name, patch.expanding_qkv)(lambda *given: "theirs", lambda *given: "ours")(*args)
    return made == "theirs"

not_sorted, wide = Some(permutation=None), x.float()
assert theirs_is_called("sgemm_lora_a_fwd", x, w, not_sorted) and not theirs_is_called("sgemm_lora_a_fwd", x, w, sorted_by_adapter)
assert theirs_is_called("sgemm_lora_a_fwd", wide, w, sorted_by_adapter)
assert theirs_is_called("sgemm_lora_b_fwd", x, w, not_sorted) and not theirs_is_called("sgemm_lora_b_fwd", x, w, not_sorted, y)
assert theirs_is_called("gate_up_lora_b_fwd", x, w, not_sorted, 7)
unequal = torch.tensor([0, 8, 10, 13])
assert theirs_is_called("qkv_lora_b_fwd", x, w, not_sorted, unequal, 8, y)
module.gate_up_lora_b_fwd = lambda x, other: None
before = dict(vars(module))
patch.mend(module, lambda: 1 / 0)
assert {name: before[name] for name in names} == {name: getattr(module, name) for name in names}, "a version that has another function"
print("the same")
"""


def test_what_graphs_read_is_prepared_where_the_adapters_changed() -> None:
    assert in_sglang(BEGIN + PREPARED, CHECKOUT / "infra/engines/launchers/sglang_server.py").endswith("the same\n")


def test_products_are_ours_in_half_precision_and_where_tokens_are_sorted() -> None:
    assert in_sglang(BEGIN + PRODUCTS, CHECKOUT / "infra/engines/launchers/sglang_server.py").endswith("the same\n")
