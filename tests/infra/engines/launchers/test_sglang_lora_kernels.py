"""Our kernels for LoRA in SGLang, in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys

import pytest

from infra.settings import CHECKOUT

PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import lora_kernels as bench
kernels = bench.ours()
kernels.INPUTS_PER_PART, kernels.MAX_PARTS = 128, 3
print(bench.right(kernels, "cpu", torch.float32, (40, 300, 520), ((72,), (80, 80), (144, 48, 48))))
assert all(not count.any() for count in kernels._arrived.values()), "left for the next call"
print("right")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA")
def test_the_kernels_compute_what_plain_products_do() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(CHECKOUT / "tests/gpu")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.endswith("right\n"), done.stdout + done.stderr
