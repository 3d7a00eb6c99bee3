"""SGLang's own attention on a CPU and the patched one, in SGLang's environment: the same bits."""

from shared import in_sglang

from infra.settings import CHECKOUT

LAUNCHERS = CHECKOUT / "infra/engines/launchers"
PROGRAM = """
import itertools, runpy, sys, torch
sys.argv = [sys.argv[1], "--device", "cpu"]
launcher = runpy.run_path(sys.argv[0], run_name="launcher")
from sglang.srt.layers.attention import torch_native_backend
backend, patch = torch_native_backend.TorchNativeAttnBackend, sys.modules["sglang_attention_patch"]
patched = backend._run_sdpa_forward_decode
single = patched.__closure__[0].cell_contents
assert single.__code__.co_filename == torch_native_backend.__file__, "the launcher has not patched it"
torch.set_num_threads(1)
torch.manual_seed(0)
calls = []
attention = patch.scaled_dot_product_attention
patch.scaled_dot_product_attention = lambda *args, **kwargs: (calls.append(1), attention(*args, **kwargs))[1]
with torch.inference_mode():
    for heads, dtype in itertools.product(((4, 2, 32), (14, 2, 64)), ("float32", "bfloat16")):
        num_heads, num_kv_heads, size = heads
        dtype = getattr(torch, dtype)
        keys, values = (torch.randn(4096, num_kv_heads, size).to(dtype) for _ in range(2))
        slots, rows = torch.randint(0, 4096, (40, 300)), torch.randperm(40)[:32]
        for lengths in (torch.arange(32) // 8 + 60, torch.randint(1, 300, (32,)), torch.full((32,), 1)):
            query = torch.randn(32, num_heads, size).to(dtype)
            made = []
            for attend in (single, patched):
                output = torch.full_like(query, float("nan"))
                attend(None, query, output, keys, values, slots, rows, lengths, scaling=0.2, enable_gqa=True, causal=False)
                made.append(output)
            assert torch.equal(*made), (heads, dtype, lengths)
            assert len(calls) == len(set(lengths.tolist()))
            calls.clear()
        window = dict(scaling=0.2, enable_gqa=True, causal=False, sliding_window_size=16)
        output = [attend(backend, query, torch.empty_like(query), keys, values, slots, rows, lengths + 40, **window) for attend in (single, patched)]
        assert torch.equal(*output) and not calls
print("the same")
"""


def test_sequences_of_equal_length_are_one_call_with_the_same_bits() -> None:
    assert in_sglang(PROGRAM, LAUNCHERS / "sglang_server.py").endswith("the same\n")
