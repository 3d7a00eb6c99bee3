"""Compile SGLang's own CUDA kernels, and FlashInfer's norms, side by side while SGLang is still being imported.

SGLang compiles each kernel at its first use, one after the other, while its GPU waits: 7 to 14 s each, at the first start on a machine. Here
a program beside the launcher asks for the same kernels at once, by SGLang's own functions, and puts each into SGLang's cache when it is
whole. SGLang then finds it there; what is missing it compiles as ever, so nothing here can change a number or stop a start.
Read in the source of SGLang 0.5.17 (kernels/jit/utils/compile.py, kernels/ops/) and FlashInfer 0.6.15 (norm/, jit/core.py).
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

CACHE = "TVM_FFI_CACHE_DIR"
FOLDER = "ahead.tmp"
"""Where kernels are compiled, in the cache. The program that makes it compiles: replicas of an engine share a cache and start together."""
NAME = "sgl_kernel_jit_*"
NORMS = "--norms"
"""Has this program compile FlashInfer's norms alone."""
ARCHITECTURE = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}

Kernel = tuple[str, str, tuple[Any, ...]]
"""A module below sglang.kernels.ops, its function that compiles a kernel, and the function's arguments."""


def start(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> subprocess.Popen[bytes] | None:
    """Start the program if SGLang has compiled nothing in its cache yet.

    argv: The flags of sglang.launch_server.
    """
    folder = environ.get(CACHE)
    if folder is None or any(Path(folder).glob(NAME)):
        return None
    try:
        (Path(folder) / FOLDER).mkdir(parents=True)
    except OSError:
        return None
    # Without a GPU, of which it would take memory while SGLang measures what is free.
    alone = {**environ, "CUDA_VISIBLE_DEVICES": ""}
    program = subprocess.Popen([sys.executable, __file__, *argv], env=alone, stderr=subprocess.DEVNULL)
    threading.Thread(target=program.wait, daemon=True).start()  # or it would stay a zombie as long as the server lives
    return program


def kernels(config: Mapping[str, Any], flags: Mapping[str, str], dtypes: Any) -> list[Kernel]:
    """Return the kernels that a model needs for any batch.

    config: The model's config.json.
    flags: Of sglang.launch_server, by name.
    dtypes: The module torch.
    """
    name = flags.get("--dtype", "auto")
    name = (config.get("dtype") or config.get("torch_dtype") or "bfloat16") if name == "auto" else name
    dtype, heads = getattr(dtypes, name), config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    heads_here = max(1, (config.get("num_key_value_heads") or heads) // int(flags.get("--tp-size", "1")))
    row = heads_here * head_size * (1 if "fp8" in flags.get("--kv-cache-dtype", "auto") else ITEM_SIZE[name])
    found: list[Kernel] = [
        ("activation.activation", "activation_module", (dtype,)),
        ("attention.rope", "_jit_fused_rope_module", (True, head_size, dtype, dtype)),
        ("kvcache.kvcache", "_jit_kvcache_module", (row, row)),
        ("attention.clamp_position", "_jit_clamp_position_module", (dtypes.int64,)),
    ]
    if str(config.get("model_type")).startswith("qwen3"):
        found.append(("layernorm.norm", "_jit_qknorm_module", (head_size, dtype)))
    if (config.get("num_experts") or config.get("num_local_experts")) and "--enable-lora" in flags:
        found.append(("moe.moe_lora_align", "_jit_moe_align_module", (dtypes.int32,)))
    return found


def flags_of(argv: Sequence[str]) -> dict[str, str]:
    """Return the values of the flags by name. One without a value gets what comes after it."""
    return {flag: value for flag, value in pairwise([*argv, ""]) if flag.startswith("--")}


def main(argv: Sequence[str]) -> None:
    if argv == [NORMS]:
        compile_norms()
        return
    try:
        architecture = _architecture()
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"no kernels are compiled ahead: {error!r}", flush=True)
        return
    environ = {"FLASHINFER_CUDA_ARCH_LIST": architecture, **os.environ}
    with subprocess.Popen([sys.executable, __file__, NORMS], env=environ, stderr=subprocess.DEVNULL):
        compile_sglang(argv, architecture)


def compile_sglang(argv: Sequence[str], architecture: str) -> None:
    """Compile SGLang's kernels beside its cache, and put each whole one there."""
    begin, cache = time.monotonic(), Path(os.environ[CACHE])
    os.environ[CACHE] = str(cache / FOLDER)
    try:
        failed = compile_all(argv, architecture)
    except Exception as error:  # noqa: BLE001  # a start goes on without
        print(f"SGLang's kernels are not compiled ahead: {error!r}", flush=True)
        return
    made = [folder for folder in (cache / FOLDER).glob(NAME) if _moved(folder, cache / folder.name)]
    shutil.rmtree(cache / FOLDER, ignore_errors=True)
    print(f"{len(made)} kernels of SGLang compiled ahead in {time.monotonic() - begin:.0f} s", *failed, sep="; ", flush=True)


def compile_norms() -> None:
    """Compile FlashInfer's norms, which are CUDA where the package nvidia-cutlass-dsl is missing. One compilation of them takes 40 s, the longest
    of all, so it begins before SGLang's functions are imported.

    They are compiled in FlashInfer's own cache: SGLang waits for FlashInfer's lock if it is there before they are whole.
    """
    begin = time.monotonic()
    try:
        norm = importlib.import_module("flashinfer.norm")
        if norm._USE_CUDA_NORM:
            norm.gen_norm_module().build(verbose=False)
            print(f"FlashInfer's norms compiled ahead in {time.monotonic() - begin:.0f} s", flush=True)
    except Exception as error:  # noqa: BLE001  # a start goes on without
        print(f"FlashInfer's norms are not compiled ahead: {error!r}"[:200], flush=True)


def _architecture() -> str:
    found = set(subprocess.run(ARCHITECTURE, capture_output=True, text=True, check=True).stdout.split())
    if len(found) != 1:
        raise ValueError(f"which of the GPUs with {sorted(found)} this engine gets is not known here")
    return found.pop()


def compile_all(argv: Sequence[str], architecture: str) -> list[str]:
    """Compile SGLang's kernels of a model, and return in words which could not be."""
    flags = flags_of(argv)
    config = json.loads((Path(flags["--model-path"]) / "config.json").read_bytes())
    import torch
    from sglang.kernels.jit.utils import get_jit_cuda_arch, override_jit_cuda_arch

    major, minor = map(int, architecture.split("."))
    with override_jit_cuda_arch(major, minor), ThreadPoolExecutor(max_workers=8) as threads:
        # Each compilation sets it and puts it back: without a value, another one under way would find none.
        os.environ["TVM_FFI_CUDA_ARCH_LIST"] = get_jit_cuda_arch().target_name
        return [each for each in threads.map(_failure, kernels(config, flags, torch)) if each]


def _failure(kernel: Kernel) -> str:
    """Compile a kernel. Return what went wrong: SGLang will compile it itself then, and say so if it can't."""
    module, function, arguments = kernel
    try:
        getattr(importlib.import_module(f"sglang.kernels.ops.{module}"), function)(*arguments)
    except Exception as error:  # noqa: BLE001  # a start goes on without
        return f"not {function}: {error!r}"[:200]
    return ""


def _moved(folder: Path, target: Path) -> bool:
    """Move a whole folder, unless SGLang was faster."""
    try:
        folder.rename(target)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    # A script's own folder comes first in sys.path: `import megatron` in SGLang's environment would find ours.
    sys.path[:] = sys.path[1:]
    main(sys.argv[1:])
