"""With a stand-in of SGLang whose compiler only writes files: which kernels the real one compiles was read in its source."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.engines.launchers import sglang_compile_ahead as ahead

QWEN2 = {
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "torch_dtype": "bfloat16",
}
MIXTURE = {"model_type": "qwen3_moe", "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128}
RENAMED = {("num_local_experts" if name == "num_experts" else name): value for name, value in MIXTURE.items()}
"""As transformers 5 writes it."""
DTYPES = SimpleNamespace(bfloat16="bf16", float32="f32", int64="i64", int32="i32")
COMPILER = """
import os
import time
from pathlib import Path

def compiled(name, *arguments):
    assert (os.environ["TVM_FFI_CUDA_ARCH_LIST"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("9.0a", "")
    folder = Path(os.environ["TVM_FFI_CACHE_DIR"]) / "_".join(["sgl_kernel_jit", name, *map(str, arguments)])
    folder.mkdir()
    (folder / "kernel.so").write_text("ahead")
"""
UTILS = """
import contextlib
from types import SimpleNamespace

@contextlib.contextmanager
def override_jit_cuda_arch(major, minor):
    assert (major, minor) == (9, 0)
    yield

def get_jit_cuda_arch():
    return SimpleNamespace(target_name="9.0a")
"""
FLASHINFER = """
import os
from pathlib import Path

_USE_CUDA_NORM = os.environ["FLASHINFER_CUDA_ARCH_LIST"] == "9.0"

class gen_norm_module:
    def build(self, verbose):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        (Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / "norm.so").write_text("ahead")
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with the stand-ins, an empty cache and a model."""
    ops = {
        "activation/activation.py": "def activation_module(dtype):\n    compiled('activation')",
        "attention/rope.py": "def _jit_fused_rope_module(*arguments):\n    compiled('rope', *arguments[:2])",
        "kvcache/kvcache.py": "def _jit_kvcache_module(*arguments):\n    compiled('kvcache', *arguments)",
        "attention/clamp_position.py": "def another_name():\n    pass",
    }
    sglang = tmp_path / "site/sglang/kernels"
    for name, text in {f"ops/{name}": COMPILER + text for name, text in ops.items()}.items() | {("jit/utils.py", UTILS)}:
        (sglang / name).parent.mkdir(parents=True, exist_ok=True)
        (sglang / name).write_text(text)
    (tmp_path / "site/flashinfer").mkdir()
    (tmp_path / "site/flashinfer/norm.py").write_text(FLASHINFER)
    (tmp_path / "site/torch.py").write_text("bfloat16, int64 = 'bf16', 'i64'")
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 9.0; echo ${OTHER_GPU:-9.0}\n")
    tool.chmod(0o700)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(QWEN2))
    search = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {
        "PATH": search, "PYTHONPATH": str(tmp_path / "site"), "TVM_FFI_CACHE_DIR": str(tmp_path / "cache"),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


def done(environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> str:
    program = ahead.start(["--model-path", str(tmp_path / "model"), "--dtype", "auto"], environ)
    assert program is not None
    deadline = time.monotonic() + 60
    while Path(f"/proc/{program.pid}").exists():  # also of a zombie
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert program.wait() == 0
    return capfd.readouterr().out


def test_kernels_are_put_whole_into_the_cache_and_what_cannot_be_compiled_is_one_line(
    environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = done(environ, tmp_path, capfd)
    assert "3 kernels of SGLang compiled ahead in 0 s; not _jit_clamp_position_module: AttributeError(" in said
    assert said.count("\n") == 2
    assert "\nFlashInfer's norms compiled ahead in 0 s\n" in f"\n{said}"
    assert (tmp_path / "norm.so").read_text() == "ahead"
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        "sgl_kernel_jit_activation", "sgl_kernel_jit_kvcache_256_256", "sgl_kernel_jit_rope_True_64"
    ]  # fmt: skip
    assert ahead.start([], environ) is None, "a later start compiles nothing ahead"


def test_what_sglang_has_compiled_in_the_meantime_stays(
    environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "cache/sgl_kernel_jit_activation/kernel.so"
    late = tmp_path / "site/sglang/kernels/ops/activation/activation.py"
    late.write_text(late.read_text() + f"\n    Path({str(own.parent)!r}).mkdir()\n    Path({str(own)!r}).write_text('SGLang')")
    assert "2 kernels" in done(environ, tmp_path, capfd)
    assert own.read_text() == "SGLang"


@pytest.mark.parametrize(
    ("flashinfer", "expected"),
    [
        (FLASHINFER.replace('== "9.0"', '== ""'), "3 kernels"),
        (FLASHINFER.replace("verbose", "loud"), "FlashInfer's norms are not compiled ahead: TypeError("),
    ],
)  # fmt: skip
def test_norms_are_compiled_where_flashinfer_will_use_them(
    flashinfer: str, expected: str, environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site/flashinfer/norm.py").write_text(flashinfer)
    said = done(environ, tmp_path, capfd)
    assert "3 kernels" in said
    assert expected in said
    assert "norms compiled" not in said
    assert not (tmp_path / "norm.so").exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"OTHER_GPU": "12.0"}, "no kernels are compiled ahead: ValueError(\"which of the GPUs with ['12.0', '9.0'] this engine"),
        ({"PATH": "/nowhere"}, "no kernels are compiled ahead: FileNotFoundError("),
    ],
)  # fmt: skip
def test_without_one_kind_of_gpu_nothing_is_compiled(
    change: dict[str, str], expected: str, environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert done(environ | change, tmp_path, capfd).startswith(expected)


def test_one_of_several_replicas_compiles(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cache/ahead.tmp").mkdir(parents=True)
    assert ahead.start([], environ) is None
    assert ahead.start([], {name: value for name, value in environ.items() if name != "TVM_FFI_CACHE_DIR"}) is None


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        (QWEN2, "", ["activation_module bf16", "_jit_fused_rope_module True 64 bf16 bf16", "_jit_kvcache_module 256 256"]),
        (QWEN2, "--dtype float32", ["activation_module f32", "_jit_kvcache_module 512 512", "_jit_clamp_position_module i64"]),
        (QWEN2, "--kv-cache-dtype fp8_e4m3", ["activation_module bf16", "_jit_kvcache_module 128 128"]),
        (RENAMED, "--enable-lora", ["_jit_moe_align_module i32"]),
        (MIXTURE, "--enable-lora --tp-size 8", ["_jit_kvcache_module 256 256", "_jit_qknorm_module 128 bf16", "_jit_moe_align_module i32"]),
    ],
)  # fmt: skip
def test_shapes_come_from_the_model_and_the_flags(config: dict[str, Any], flags: str, expected: list[str]) -> None:
    found = [
        " ".join(map(str, [name, *arguments]))
        for _, name, arguments in ahead.kernels(config, ahead.flags_of(flags.split()), DTYPES)
    ]
    assert set(expected) <= set(found)
    assert len(found) == {"qwen2": 4, "qwen3_moe": 6}[config["model_type"]]
